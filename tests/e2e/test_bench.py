"""Benches as a user runs them: the figures that they print, what they write, and two runs side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

DEMO = ROOT / "deploy" / "demo"


def bench(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "coordinator", "bench", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of every kind on two workers, with a picture."""
    path = tmp_path_factory.mktemp("bench") / "steps.json"
    asked = ["--model", DEMO / "target", "--draft", DEMO / "draft", "--target-devices", "cpu,cpu", "--rows", 8]
    small = ["--context", 40, "--prefill-tokens", 100, "--prefill-chunk", 16, "--steps", 3]
    path.write_text(bench("step", *asked, *small, "--json", "--plot", path.with_suffix(".png")))
    return path


def test_steps_of_every_kind_beside_their_floors(report: Path) -> None:
    """Each takes time, and no less than the floor but for the noise of so few steps; the picture is one."""
    found = json.loads(report.read_text())
    rows = {row["kind"]: row for row in found["rows"]}
    assert list(rows) == ["decode", "verify", "draft", "cycle", "prefill"]
    assert [row["rows"] for row in rows.values()] == [1, 8, 8, 8, 100]
    assert all(row["floor_ms"] > 0 and row["ms"] > 0 for row in rows.values())
    assert rows["cycle"]["floor_ms"] > rows["verify"]["floor_ms"] == rows["decode"]["floor_ms"]
    assert found["engines"] == ["torch", "torch"]
    assert len(found["copy_bytes_per_s"]) == 2
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_two_reports_side_by_side(report: Path, tmp_path: Path) -> None:
    """Rows are matched by what was measured; one that the other report doesn't have is left out."""
    found = json.loads(report.read_text())
    other = [{**row, "ms": row["ms"] * 2} for row in reversed(found["rows"]) if row["kind"] != "draft"]
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"rows": other}))
    pairs = json.loads(bench("compare", report, second, "--json"))
    assert {pair["what"].split()[0] for pair in pairs} == {"decode", "verify", "cycle", "prefill"}
    assert {pair["ratio"] for pair in pairs if pair["measure"] == "ms"} == {2.0}
    assert {pair["ratio"] for pair in pairs if pair["measure"] == "floor_ms"} == {1.0}
    assert "verify 8 40" in bench("compare", report, second)


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": 1}', '{"rows": [1]}', "{}"])
def test_what_is_no_report_is_refused(report: Path, tmp_path: Path, text: str) -> None:
    """Whatever else is in the file."""
    other = tmp_path / "other.json"
    other.write_text(text)
    assert "other.json is no report of a bench" in bench("compare", report, other, code=2)


def test_wrong_flags_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """A picture of no known kind, or nowhere; neither a model nor a shape; a draft that is missing."""
    for plot in ("x.txt", tmp_path / "none" / "x.png"):
        assert "--plot" in bench("step", "--shape", "qwen3-8b", "--plot", plot, code=2)
    assert "give --shape or --model" in bench("step", code=2)
    assert "--draft is missing" in bench("step", "cycle", "--model", DEMO / "target", code=2)
