"""Scratch directories: private, removed, and swept up when their owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.processes.scratch import Scratch

ROOT = Path(__file__).parents[3]

OWNER = """
import time
from services.processes.scratch import Scratch
print(Scratch().path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_made_and_removed(temporary: Path) -> None:
    """A scratch directory is its user's alone, and gone with all it holds after removing it, once or twice."""
    scratch = Scratch()
    (scratch.path / "worker.log").write_text("x")
    assert scratch.path.parent == temporary
    assert scratch.path.stat().st_mode & 0o077 == 0

    scratch.remove()
    scratch.remove()

    assert list(temporary.iterdir()) == []


def test_what_a_killed_owner_left_is_swept_up(temporary: Path) -> None:
    """By whoever comes next, but never a living owner's, nor anything else that is called like it."""
    foreign = temporary / "flashsplit-notes"
    foreign.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        first = Scratch()
        assert theirs.is_dir()
        owner.kill()
        owner.wait()
        second = Scratch()
        assert not theirs.exists()
        assert first.path.is_dir()
        assert foreign.is_dir()
        first.remove()
        second.remove()
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()
    assert os.listdir(temporary) == ["flashsplit-notes"]
