"""Benches as a user runs them: the figures that they print, what they write, and two runs side by side."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.bench import bench as command
from coordinator.bench.drafts import Positions
from coordinator.bench.step import SINGLE_KINDS
from coordinator.bench.step_bench import StepFigures, times_decode
from coordinator.engine.step_times import StepTaken
from services.messages.steps import StepKind
from tests.e2e.conftest import ROOT, Pair, Worker

DEMO = ROOT / "deploy" / "demo"
PAIR = ("--model", DEMO / "target", "--draft", DEMO / "draft")
SMALL = {"rows": 8, "context": 40, "steps": 3, "prefill-tokens": 100, "prefill-chunk": 16}
USED = {
    "decode": {"context", "steps"},
    "verify": {"rows", "context", "steps"},
    "draft": {"rows", "context", "steps"},
    "cycle": {"rows", "context", "steps"},
    "prefill": {"prefill-tokens", "prefill-chunk"},
}


def bench(*arguments: object, code: int = 0, timeout: float = 120) -> str:
    """As a user runs it: what it printed, or where `code` is not 0, the error."""
    line = [sys.executable, "-m", "coordinator", "bench", *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def here(*arguments: object, code: int = 0) -> str:
    """The same in this process, which saves the imports."""
    result = CliRunner().invoke(command, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def sizes(kind: str) -> list[str]:
    """Small ones for what the kind's command takes."""
    return [f"--{name}={SMALL[name]}" for name in USED[kind]]


@pytest.fixture(scope="session")
def tiny(pairs: dict[str, Pair]) -> Sequence[object]:
    """A pair whose devices are measured soonest: it has one kind of layer."""
    return "--model", pairs["qwen3"].target, "--draft", pairs["qwen3"].draft


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, tiny: Sequence[object]) -> Path:
    """Steps of every kind on two workers, with a picture."""
    path = tmp_path_factory.mktemp("bench") / "steps.json"
    asked = ["--target-devices", "cpu,cpu", *(f"--{name}={size}" for name, size in SMALL.items())]
    path.write_text(bench("step", *tiny, *asked, "--json", "--plot", path.with_suffix(".png")))
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
    ratios = {kind: rows[kind]["ms"] / rows["decode"]["ms"] for kind in ("verify", "draft", "cycle")}
    assert found["times_decode"] == pytest.approx(ratios)
    run = found["run"]
    assert run["devices"] == ["cpu", "cpu"]
    assert run["cores"] >= 1
    assert run["processor"]
    assert run["version"] == metadata.version("flashsplit")
    assert shlex.split(run["command"])[:3] == ["flashsplit", "bench", "step"]
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_commands_of_one_kind(start_worker: Callable[..., Worker], tiny: Sequence[object]) -> None:
    """Each measures its kind, and a decode where its figure is a ratio to one."""
    placed = (*tiny, "--target-devices", start_worker().address)
    found = json.loads(here("draft", *placed, *sizes("draft"), "--json"))
    assert [(row["kind"], row["rows"], row["context"]) for row in found["rows"]] == [
        ("decode", 1, 40),
        ("draft", 8, 40),
    ]
    assert list(found["times_decode"]) == ["draft"]
    found = json.loads(here("prefill", *placed, *sizes("prefill"), "--json"))
    assert [(row["kind"], row["rows"], row["context"]) for row in found["rows"]] == [("prefill", 100, 0)]
    assert found["times_decode"] == {}
    machine, line, engines, headings, decode, cycle = here("cycle", *placed, *sizes("cycle")).splitlines()
    assert re.fullmatch(r".+, \d+ cores; workers on cpu; flashsplit [\d.]+(, commit [0-9a-f]{7,}\+?)?", machine)
    assert line.startswith("$ flashsplit")
    assert engines.startswith("qwen3 by torch; copies at ")
    assert headings.endswith("times decode")
    assert (decode.split()[0], cycle.split()[0], len(cycle.split())) == ("decode", "cycle", len(decode.split()) + 1)


def test_ratios_are_to_decode() -> None:
    """For kinds that are steps too; none without a decode."""
    rows = [
        StepFigures(kind, 1, 40, ms, 0.0, 1.0) for kind, ms in (("decode", 4.0), ("cycle", 10.0), ("prefill", 90.0))
    ]
    assert times_decode(rows) == {"cycle": 2.5}
    assert times_decode(rows[1:]) == {}
    for kind, made in SINGLE_KINDS.items():
        assert made.beside == (() if kind in ("decode", "prefill") else ("decode",))


@pytest.mark.parametrize("kind", USED)
def test_a_kind_has_only_options_that_matter_to_it(kind: str) -> None:
    """All others are refused, and are not in its help."""
    text = here(kind, "--help")
    for name in SMALL:
        assert (f"--{name} " in text) == (name in USED[kind])
        if name not in USED[kind]:
            assert f"--{name}" in here(kind, *PAIR, f"--{name}=8", code=2)


@pytest.mark.slow
def test_drafts_beside_each_other(start_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """A row for each draft, kind of prompt and way to answer, beside plain decode and the fastest fixed way, with how
    often each place of blocks is accepted; answers are the same in all ways, and a way that is fixed keeps to it."""
    prompts, picture = tmp_path / "prompts.json", tmp_path / "drafts.svg"
    prompts.write_text(json.dumps({"chat": ["What is 17 * 4?"], "tokens": [[300, 301, 302], [303]]}))
    asked = ["--target-devices", start_worker().address, "--prompts", prompts, "--max-tokens", 12, "--repeats", 2]
    named = ["--model", DEMO / "target", "--draft", DEMO / "draft", "--draft", "ngram"]
    lengths = ["--draft-tokens", "15,1"]

    found = json.loads(here("drafts", *named, *asked, *lengths, "--dtype", "float32", "--json", "--plot", picture))

    ways = ["plain", "15 a step", "1 a step", "ngram", "choice"]
    rows = found["rows"]
    assert [(row["layout"], row["kind"], row["way"]) for row in rows] == [
        ("DFlash", kind, way) for kind in ("chat", "tokens") for way in ways
    ]
    assert [row["identical"] for row in rows] == [2] * 5 + [4] * 5
    for part in (rows[:5], rows[5:]):
        plain = part[0]
        assert plain["tokens_a_step"] == plain["of_plain"] == 1
        assert 1 <= part[2]["tokens_a_step"] <= 2
        assert max(row["of_best"] for row in part[:4]) == 1
        assert all(row["tokens_per_s"] == pytest.approx(row["of_plain"] * plain["tokens_per_s"]) for row in part)
    assert rows[1]["tokens_a_step"] > 2 > rows[3]["tokens_a_step"]
    shares = found["accepted_by_position"]["draft"]["chat"]
    assert len(shares["15 a step"]) > 7
    assert len(shares["1 a step"]) == 1
    assert shares["15 a step"][0] > 0.5
    assert "<svg" in picture.read_text()
    assert "--draft is missing" in here("drafts", *named[:2], *asked, code=2)
    assert "at most 15 draft tokens" in here("drafts", *named, *asked, "--draft-tokens", 16, code=2)


def test_positions_of_blocks_are_counted_apart() -> None:
    """Of each place, the blocks that had a draft token there, and those in which it was accepted."""
    positions = Positions()
    for kind, rows, kept in (
        (StepKind.VERIFY, 4, 3),
        (StepKind.VERIFY, 2, 1),
        (StepKind.VERIFY, 3, 3),
        (StepKind.DECODE, 1, 1),
    ):
        positions.add(StepTaken("a", kind, rows, kept, 1, 0, (), ()))

    assert (positions.offered, positions.accepted) == ([3, 2, 1], [2, 2, 0])
    assert positions.shares == [pytest.approx(2 / 3), 1.0, 0.0]


def test_an_answer_that_is_forced_is_drafted_too(start_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """A text that must be given back comes by n-grams in fewer steps, whatever the model would say; a prompt of another
    form is refused by its name."""
    prompts = tmp_path / "prompts.json"
    given = "a line of a text\nand another one\n"
    prompts.write_text(json.dumps({"code": [{"prompt": given + given, "forced_answer": given}]}))
    asked = ["--model", DEMO / "target", "--draft", "ngram", "--target-devices", start_worker().address]
    asked += ["--dtype", "float32", "--prompts", prompts, "--repeats", 1, "--max-tokens", 24]

    plain, lookup = json.loads(here("drafts", *asked, "--json"))["rows"]

    assert (plain["way"], lookup["way"], lookup["identical"]) == ("plain", "ngram", 1)
    assert lookup["tokens_a_step"] > 2 > plain["tokens_a_step"]
    assert "--draft-tokens 3" in here("drafts", *asked, "--draft-tokens", 3, code=2)
    for wrong, word in (({"prompt": "a", "forced_answer": 3}, "forced_answer"), ([1, -1], "token ids")):
        prompts.write_text(json.dumps({"code": [wrong]}))
        assert word in here("drafts", *asked, code=2)


def test_generating_plainly_and_with_dflash(tmp_path: Path) -> None:
    """A row for each placement and kind of prompt; two of its reports can be compared."""
    prompts, path = tmp_path / "prompts.json", tmp_path / "generate.json"
    prompts.write_text(json.dumps({"chat": ["Reverse this list: seal, oyster"], "code": [{"prompt": "import os\n"}]}))
    asked = ["--prompts", prompts, "--workers", 2, "--max-tokens", 8, "--dtype", "float32", "--json"]
    path.write_text(bench("generate", *PAIR, *asked, "--plot", path.with_suffix(".svg")))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["devices"], row["kind"], row["identical"]) for row in rows] == [
        ("cpu,cpu", "chat", 1),
        ("cpu,cpu", "code", 1),
    ]
    pairs = json.loads(here("compare", path, path, "--json"))
    assert {pair["what"] for pair in pairs} == {"cpu,cpu chat 1", "cpu,cpu code 1"}
    assert {pair["measure"] for pair in pairs} > {"plain_tokens_per_s", "dflash_tokens_per_s", "hop_ms"}
    assert "<svg" in path.with_suffix(".svg").read_text()


@pytest.mark.slow
def test_clients_at_once_and_requests_as_they_come(start_worker: Callable[..., Worker], tiny: Sequence[object]) -> None:
    """Each load is measured alone and while long prompts come; its times lie in order, and its lengths are drawn anew
    from the same seed."""
    placed = (*tiny, "--target-devices", start_worker().address)
    lengths = ("--prompt-tokens", "3-20", "--max-tokens", "4-9", "--prefill-chunk", 128, "--json")
    closed = json.loads(here("serve", *placed, *lengths, "--clients", 2, "--requests", 2, "--long-prompts", 1))
    arriving = json.loads(here("serve", *placed, *lengths, "--rate", 50, "--requests", 5, "--plain"))
    assert [(row["load"], row["draft"], row["long_prompts"]) for row in closed["rows"]] == [
        ("2 clients", "DFlash", 0),
        ("2 clients", "DFlash", 1),
    ]
    assert [row["load"] for row in arriving["rows"]] == ["50 requests/s"]
    assert [closed["rows"][0]["requests"], arriving["rows"][0]["requests"]] == [4, 5]
    assert {row["tokens_per_step"] for row in arriving["rows"]} == {1.0}
    for row in [*closed["rows"], *arriving["rows"]]:
        assert row["requests"] >= 4
        assert row["tokens_per_s"] > 0
        assert 0 < row["first_token_p50_ms"] <= row["first_token_p95_ms"] <= row["first_token_p99_ms"]
        assert 0 <= row["between_p50_ms"] <= row["between_p95_ms"] <= row["between_p99_ms"]
        assert row["set_aside"] == 0
        [busy] = row["busy"]
        assert 0 < busy <= 1
    assert closed["fairness"]["chunk_ms"] > 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"chat": []}', '{"chat": "one"}', '{"chat": [{"text": "one"}]}'])
def test_prompts_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    """Before any worker is started."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text(text)
    assert "prompts.json must be a JSON object of lists" in here("generate", *PAIR, "--prompts", prompts, code=2)


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
    text = bench("compare", report, second)
    assert "verify 8 40" in text
    # The second one is as earlier versions wrote them, and says nothing of its run.
    assert "first: $ flashsplit bench step" in text
    assert "second:" not in text


NO_FAULTS = ("--kills", 0, "--stops", 0, "--drains", 0, "--pauses", 0, "--cuts", 0)
"""What stands behind it counts."""

FAULTS = ("faults", "--dtype", "float32", "--exact", "--threads", 1, "--json")


# What it does to a server is tested by default without it.
@pytest.mark.slow
def test_faults_lose_nothing() -> None:
    """The worker of a small model is killed while it decodes, and while a prefix comes from the disk, and drained while
    it decodes: all answers survive with their tokens, and nothing is left behind."""
    asked = ("--kills", 2, "--drains", 1, "--workers", 1, "--requests", 1, "--phases", "decode,restore")
    found = json.loads(here(*FAULTS, *NO_FAULTS, *PAIR[:2], *asked))
    assert [(row["fault"], row["phase"], row["faults"]) for row in found["rows"]] == [
        ("kill", "decode", 1),
        ("kill", "restore", 1),
        ("drain", "decode", 1),
    ]
    # Where prefixes were concerned they are asked for twice.
    assert [row["answers"] for row in found["rows"]] == [1, 2, 1]
    assert found["rows"][0]["silence_longest_ms"] > 0
    assert (found["left"], found["wrong"], found["missed"]) == ([], [], [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_in_every_phase() -> None:
    """With a draft, beside the last stage and apart, and a worker that stands by."""
    asked = ("--kills", 14, "--drains", 6, "--workers", 2, "--requests", 2, "--standby", "cpu")
    found = json.loads(bench(*FAULTS, *NO_FAULTS, *PAIR, *asked, timeout=600))
    phases = {"loading", "prefill", "decode", "verify", "save", "restore", "hand-over"}
    assert {row["phase"] for row in found["rows"]} == phases
    assert sum(row["resumed"] for row in found["rows"]) > 0
    assert (found["left"], found["wrong"]) == ([], [])


@pytest.mark.slow
@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize("fault", ["pause", "cut"])
def test_faults_that_pass(fault: str) -> None:
    """A worker that runs apart is stopped for a while, or cut off: the answer waits until it is back, as there is no
    other worker, and has its tokens."""
    asked = (f"--{fault}s", 1, "--pause-for", 5, "--workers", 1, "--requests", 1, "--phases", "decode")
    line = [sys.executable, "-m", "coordinator", "bench", *map(str, (*FAULTS, *NO_FAULTS, *PAIR[:2], *asked))]
    if fault == "cut":
        space = ["unshare", "--user", "--map-root-user", "--net"]
        if subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no network namespace can be made here")
        line = [*space, *line]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [row] = found["rows"]
    assert (row["fault"], row["answers"], row["resumed"], row["unnoticed"]) == (fault, 1, 1, 0)
    assert row["noticed_longest_ms"] < row["silence_longest_ms"]
    assert (found["left"], found["wrong"], found["missed"], found["no_cuts"]) == ([], [], [], None)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_faults_on_named_devices_are_made_of() -> None:
    """A restart, a hand-over and a split over the others are told apart, with what their silence was made of."""
    asked = ("--kills", 1, "--drains", 1, "--reboots", 1, "--replace-after", 0, "--pause-for", 8, "--after-tokens", 20)
    places = (*PAIR[:2], "--target-devices", "cpu,cpu,cpu", "--requests", 1, "--phases", "decode")
    found = json.loads(bench(*FAULTS, *NO_FAULTS, *places, *asked, timeout=240))
    assert [(row["fault"], row["answers"]) for row in found["rows"]] == [("kill", 1), ("drain", 1), ("reboot", 1)]
    recoveries = {(row["fault"], row["remedy"]): row for row in found["recoveries"]}
    assert set(recoveries) == {("kill", "restart"), ("reboot", "re-split")}
    for row in found["recoveries"]:
        assert 0 < row["known_ms"] < row["whole_ms"]
        assert row["load_ms"] > 0
    # A process is started for the one alone; for the other those that run are called.
    assert recoveries["kill", "restart"]["process_ms"] > 2 * recoveries["reboot", "re-split"]["process_ms"]
    [handed] = found["hand_overs"]
    assert handed["link_mb_per_s"] > 0
    assert (found["left"], found["wrong"], found["missed"]) == ([], [], [])


def test_faults_need_workers_that_may_be_ended() -> None:
    """Those that run already are refused, and options that contradict each other or name what there is not."""
    none = (*FAULTS, *NO_FAULTS)
    places = ("--target-devices", "cpu,unix:/x")
    assert "--target-devices unix:/x runs already" in here(*none, *PAIR, *places, code=2)
    assert "--workers 2 has no effect with --target-devices" in here(*none, *PAIR, *places, "--workers", 2, code=2)
    assert "--standby unix:/x runs already" in here(*none, *PAIR, "--standby", "unix:/x", code=2)
    assert "--draft-device cpu has no effect without --target" in here(*none, *PAIR, "--draft-device", "cpu", code=2)
    assert "--after-tokens 64 is behind the end" in here(*none, *PAIR, "--after-tokens", 64, code=2)
    alone = ("--target-devices", "cpu", "--draft-device", "cpu")
    assert "--draft-device cpu has no effect without a draft" in here(*none, *PAIR[:2], *alone, code=2)
    assert "--phases 'verify' is not one of" in here(*none, *PAIR[:2], "--phases", "verify", code=2)


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": 1}', '{"rows": [1]}', "{}", '{"rows": [], "run": {}}'])
def test_what_is_no_report_is_refused(report: Path, tmp_path: Path, text: str) -> None:
    """Whatever else is in the file."""
    other = tmp_path / "other.json"
    other.write_text(text)
    assert "other.json is no report of a bench" in here("compare", report, other, code=2)


def test_wrong_flags_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """A picture of no known kind, or nowhere; no model, or two; a draft that is missing; counts that are none."""
    for plot in ("x.txt", tmp_path / "none" / "x.png"):
        assert "--plot" in here("step", "--shape", "qwen3-8b", "--plot", plot, code=2)
    for kind in ("step", "decode", "prefill", "serve", "snapshot"):
        assert "give --shape or --model" in here(kind, code=2)
    assert "give --shape or --model" in here("verify", "--shape", "qwen3-8b", *PAIR, code=2)
    assert "--draft is missing" in bench("step", "cycle", *PAIR[:2], code=2)
    for kind in ("draft", "cycle"):
        assert "--draft is missing" in here(kind, *PAIR[:2], code=2)
        assert "0 is not in the range" in here(kind, *PAIR, "--rows", 0, code=2)
    assert "--clients has no effect with --rate" in here("serve", *PAIR, "--rate", 1, "--clients", 2, code=2)
    for more, refusal in ((PAIR, "is for a --shape"), (("--shape", "qwen3-8b", "--plain"), "no effect with --plain")):
        assert refusal in here("serve", *more, "--synthetic-acceptance", 5, code=2)
    assert "'5-3' must be a number of at least 2, or two" in here("serve", *PAIR, "--max-tokens", "5-3", code=2)
    for kind, flag, text in (
        ("serve", "--clients", "1,0"),
        ("snapshot", "--lengths", "1"),
        ("serve", "--clients", "x"),
    ):
        assert f"'{flag}': '{text}' must be whole numbers" in here(kind, *PAIR, flag, text, code=2)


def test_more_than_the_model_holds_is_refused(start_worker: Callable[..., Worker]) -> None:
    """With the size that it would take, before anything is measured."""
    placed = (*PAIR, "--target-devices", start_worker().address)
    assert "--context 4000 and --steps 64 of cycle may make" in here("cycle", *placed, "--context", 4000, code=2)
    assert "--max-tokens 64 may make 4464 tokens" in here("serve", *placed, "--prompt-tokens", "9-4400", code=2)
    assert "--prefill-tokens 5000: the model's context" in here("prefill", *placed, "--prefill-tokens", 5000, code=2)
