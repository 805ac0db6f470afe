"""The rooms of the code: imports between them run one way, and each says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(
    path.parent
    for package in ("services", "shard_worker", "coordinator")
    for path in (ROOT / package).rglob("__init__.py")
    if path.parent.name != package
)


def test_imports_between_rooms_run_one_way() -> None:
    """The contracts in pyproject.toml hold, for imports inside functions too."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_room_says_what_it_is(room: Path) -> None:
    """A room's `__init__` begins with a docstring of two to nine lines, the first of which is a sentence of its own."""
    described = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    assert described is not None
    first, *others = described.strip().splitlines()
    assert first.endswith(".")
    assert 1 <= len(others) <= 8
