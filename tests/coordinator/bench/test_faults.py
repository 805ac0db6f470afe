"""What `bench faults` does to whom, what it counts, and what it finds left behind."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from coordinator.answer import Answer, Stats
from coordinator.bench.faults.cases import Case, Fault, Phase, Shape, spread_cases
from coordinator.bench.faults.command import FaultOptions, faulty
from coordinator.bench.faults.drill import Outcome, Told
from coordinator.bench.faults.figures import summarise
from coordinator.bench.faults.traces import Watched
from services.errors import InvalidArgument, Unavailable

SHAPES = [Shape(1, False, 1), Shape(2, False, 1), Shape(2, True, 1)]


def test_faults_meet_all_phases_workers_and_shapes() -> None:
    """As many of each phase, give or take one; those of one cluster together; with enough of them everything once."""
    cases = spread_cases(SHAPES, list(Phase), (1, 8), {Fault.KILL: 200, Fault.STOP: 8}, seed=3)
    assert Counter(case.fault for case in cases) == {Fault.KILL: 200, Fault.STOP: 8}
    phases = Counter(case.phase for case in cases if case.fault is Fault.KILL)
    assert set(phases) == set(Phase)
    assert max(phases.values()) - min(phases.values()) <= 1
    shapes = [case.shape for case in cases]
    assert shapes == sorted(shapes, key=SHAPES.index)
    assert [case.number for case in cases] == list(range(208))
    for phase in Phase:
        met = {(case.shape, case.worker, case.requests) for case in cases if case.phase is phase}
        assert met == {(shape, worker, many) for shape in SHAPES for worker in shape.workers for many in (1, 8)}
    assert SHAPES[2].workers == ["stage 0", "stage 1", "draft worker", "stand-by 0"]


def test_who_is_drained_and_when() -> None:
    """Every worker that has a place, in all phases but that of loading for a lost one; behind all other faults, since
    the worker that stands by takes the first one's place."""
    counts = {Fault.KILL: 10, Fault.DRAIN: 50}
    cases = spread_cases(SHAPES[2:], list(Phase), (1,), counts, seed=3)
    assert [case.fault for case in cases] == [Fault.KILL] * 10 + [Fault.DRAIN] * 50
    drained = cases[10:]
    assert {case.phase for case in drained} == set(Phase) - {Phase.LOADING}
    assert {case.worker for case in drained} == {"stage 0", "stage 1", "draft worker"}


def test_phases_are_chosen_by_name() -> None:
    """An unknown one is refused with the known ones, and drafts are verified only where there is one."""
    assert FaultOptions(phases="decode, save").chosen(has_draft=False) == [Phase.DECODE, Phase.SAVE]
    assert Phase.VERIFY not in FaultOptions().chosen(has_draft=False)
    with pytest.raises(InvalidArgument, match="'verify' is not one of loading, prefill, decode, save, restore; drafts"):
        FaultOptions(phases="verify").chosen(has_draft=False)
    with pytest.raises(InvalidArgument, match="'sleep' is not one of loading, prefill, decode, verify"):
        FaultOptions(phases="decode,sleep").chosen(has_draft=True)


def answer(*token_ids: int, text: str, resumed: int = 0) -> Answer:
    count = len(token_ids)
    stats = Stats(9, 0, None, 0.0, count, 1.0, 1.0, 1.0, count, 0, 0, None, 0.0, (), resumed=resumed)
    return Answer(token_ids, text, "length", stats)


def test_what_is_counted() -> None:
    """Answers that were lost, have other tokens, or came to their client as another text; and the longest silence."""
    alone = answer(1, 2, 3, text="abc")
    told = [
        Told(0.0, ["a", "bc"], [1.0, 5.5], answer(1, 2, 3, text="abc", resumed=1)),
        Told(0.0, ["a", "bd"], [1.0, 3.0], answer(1, 2, 4, text="abd")),
        # A piece that came twice, and one that never did.
        Told(0.0, ["a", "a", "bc"], [1.0, 2.5, 3.0], answer(1, 2, 3, text="abc")),
        Told(0.0, ["a"], [1.0], None, Unavailable("stage 1 is gone")),
    ]
    case = Case(7, SHAPES[1], "stage 1", Phase.DECODE, 4, Fault.KILL)
    outcome = Outcome(case, True, told, [alone] * 4, at=2.0)
    missed = Outcome(case, False, told, [alone] * 4, at=2.0)
    [row] = summarise([outcome, missed])
    assert (row.fault, row.phase, row.faults, row.answers, row.resumed) == ("kill", "decode", 1, 4, 1)
    assert (row.lost, row.different, row.damaged) == (1, 1, 2)
    assert not row.is_clean
    assert row.silence_longest_ms == 3500
    assert row.silence_median_ms == 1000
    lines = list(faulty(outcome))
    assert lines[0] == "case 7: kill stage 1 of 2 stages, decode, answer 1 of 4: other tokens from 2 on, ()"
    assert "the text 'aabc' should be 'abc'" in lines[1]
    assert lines[2].endswith("answer 3 of 4: stage 1 is gone")
    [row] = summarise([Outcome(case, True, told[:1], [alone], at=2.0)])
    assert row.is_clean


def test_what_is_left_behind(tmp_path: Path) -> None:
    """A process, a directory, a socket and shared memory are told; what was there before is not."""
    # What other tests left open is not to be closed meanwhile.
    gc.collect()
    watched = Watched()
    before = watched.traces()
    assert watched.traces().since(before) == []
    child = subprocess.Popen(["sleep", "60"])
    segment = os.memfd_create("flashsplit-payloads")
    with socket.socket():
        watched.directories.add(tmp_path)
        try:
            assert watched.traces().since(before) == [
                f"process {child.pid}",
                f"directory {tmp_path}",
                "1 open: /memfd:flashsplit-payloads (deleted)",
                "1 open: socket",
            ]
        finally:
            child.kill()
            child.wait()
            os.close(segment)
    tmp_path.rmdir()
    assert watched.traces().since(before) == []
