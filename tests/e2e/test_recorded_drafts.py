"""What the tests of the choice play again is what the demo pair does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.reference.choice_played_again import RECORDED

DEMO = ROOT / "deploy" / "demo"
FIRST_CHAT = "Convert 204 to hexadecimal."


@pytest.mark.slow
def test_a_chat_is_recorded_anew(tmp_path: Path) -> None:
    """Of draft tokens that are about as probable as others, rounding decides, which differs between processors."""
    prompts, out = tmp_path / "prompts.json", tmp_path / "recorded.json"
    prompts.write_text(json.dumps({"chat": [FIRST_CHAT]}))
    recorder = [sys.executable, "-m", "tests.reference.record_drafts", "--prompts", prompts, "--out", out]
    pair = ["--model", DEMO / "target", "--draft", DEMO / "draft", "--target-devices", "cpu", "--dtype", "float32"]
    subprocess.run([*recorder, *pair], cwd=ROOT, check=True, capture_output=True, timeout=120)

    [now], [before, *_] = (json.loads(path.read_text())["chat"] for path in (out, RECORDED))
    assert (now["prompt"], now["answer"]) == (before["prompt"], before["answer"])
    same = sum(one == other for one, other in zip(now["right"], before["right"], strict=True))
    assert same >= 0.9 * len(before["right"])
