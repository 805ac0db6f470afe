"""What `bench faults` does to whom, what it counts, and what it finds left behind."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.answer import Answer, Phase as Phased, Stats
from coordinator.bench.faults.cases import Case, Fault, Phase, Shape, Site, spread_cases
from coordinator.bench.faults.command import FaultOptions, faulty, while_undisturbed
from coordinator.bench.faults.drill import LinkedHandOver, Outcome, Told, Undisturbed
from coordinator.bench.faults.figures import RecoveryFigures, hand_overs, recoveries, summarise
from coordinator.bench.faults.recovery import Recovery, Remedy
from coordinator.bench.faults.switch import why_no_switch
from coordinator.bench.faults.traces import Watched
from coordinator.cluster.cluster import StartTimes
from coordinator.engine.handover import HandedOver
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
        assert met == {
            (shape, worker, many)
            for shape in SHAPES
            for worker in shape.workers
            for many in (1, 8)
            # Nobody takes the place of one that has none.
            if phase is not Phase.HANDOVER or worker != "stand-by 0"
        }
    assert SHAPES[2].workers == ["stage 0", "stage 1", "draft worker", "stand-by 0"]


def test_who_is_drained_and_when() -> None:
    """Every worker that has a place, in all phases but that of loading for a lost one; behind all other faults, as are
    kills in hand-overs, since the worker that stands by takes the first one's place."""
    counts = {Fault.KILL: 10, Fault.DRAIN: 50}
    cases = spread_cases(SHAPES[2:], list(Phase), (1,), counts, seed=3)
    assert Counter(case.fault for case in cases) == counts
    drained = [case for case in cases if case.fault is Fault.DRAIN]
    assert {case.phase for case in cases[10:] if case.fault is Fault.KILL} <= {Phase.HANDOVER}
    assert {case.fault for case in cases[:10]} == {Fault.KILL}
    assert {case.phase for case in drained} == set(Phase) - {Phase.LOADING, Phase.HANDOVER}
    assert {case.worker for case in drained} == {"stage 0", "stage 1", "draft worker"}
    killed = [case.phase for case in spread_cases(SHAPES[2:], list(Phase), (1,), {Fault.KILL: 21}, seed=3)]
    assert killed[-3:] == [Phase.HANDOVER] * 3
    assert Phase.HANDOVER not in killed[:-3]


def test_who_is_paused_or_cut_off() -> None:
    """Workers that run apart, and those on hosts of their own, but for one that stands by; the others meet the rest."""
    shapes = [Shape(2, True, 1, site) for site in Site]
    counts = {Fault.PAUSE: 30, Fault.REBOOT: 30, Fault.CUT: 30, Fault.KILL: 30}
    cases = spread_cases(shapes, list(Phase), (1,), counts, seed=3)
    assert Counter((case.fault, case.shape.site) for case in cases) == {
        (Fault.KILL, Site.CHILDREN): 30,
        (Fault.PAUSE, Site.APART): 30,
        (Fault.REBOOT, Site.APART): 30,
        (Fault.CUT, Site.LINKED): 30,
    }
    passing = [case for case in cases if case.fault.passes]
    assert {case.fault for case in passing} == {Fault.PAUSE, Fault.REBOOT, Fault.CUT}
    assert {case.worker for case in passing} == {"stage 0", "stage 1", "draft worker"}
    assert {case.phase for case in passing} == set(Phase) - {Phase.LOADING, Phase.HANDOVER}


def test_phases_are_chosen_by_name() -> None:
    """An unknown one is refused with the known ones, and drafts are verified only where there is one."""
    assert FaultOptions(phases="decode, save").chosen(has_draft=False) == [Phase.DECODE, Phase.SAVE]
    assert Phase.VERIFY not in FaultOptions().chosen(has_draft=False)
    with pytest.raises(
        InvalidArgument, match="'verify' is not one of loading, prefill, decode, save, restore, hand-over; drafts"
    ):
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
    assert (row.noticed_longest_ms, row.unnoticed) == (0, 0)
    paused = replace(case, fault=Fault.PAUSE)
    outcomes = [Outcome(paused, True, told[:1], [alone], at=2.0, noticed_s=one) for one in (1.5, None, 2.0)]
    [row] = summarise(outcomes)
    assert (row.noticed_longest_ms, row.unnoticed) == (2000, 1)


def test_what_silence_was_made_of() -> None:
    """Starting and loading, and what attempts behind the fault computed anew; the rest is what remains. Answers that
    did not wait are no part of it, nor are losses that nobody came over."""
    phases = [Phased("prefill", 0.0, 1.0), Phased("restore", 6.0, 6.25), Phased("prefill", 6.25, 6.5)]
    told = [
        Told(0.0, ["a", "bc"], [1.0, 7.0], answer(1, 2, 3, text="abc", resumed=1), phases=phases),
        Told(0.0, ["a", "bc"], [1.0, 9.0], answer(1, 2, 3, text="abc")),
    ]
    case = Case(7, SHAPES[1], "stage 1", Phase.DECODE, 2, Fault.KILL)
    recovery = Recovery(Remedy.RESTART, 0.25, 4.0, StartTimes(1.0, 2.0))
    outcomes = [
        Outcome(case, True, told, [None, None], at=2.0, recovery=recovery),
        Outcome(case, True, told, [None, None], at=2.0),
    ]
    [row] = recoveries(outcomes)
    assert row == RecoveryFigures("kill", "restart", 1, 1, 250.0, 4000.0, 1000.0, 2000.0, 500.0, 5000.0, 1500.0)
    [found] = summarise(outcomes)
    assert found.is_clean, "nothing is compared"
    handed = HandedOver("stage 1", "cpu", 3, 4_000_000, 2_000_000, 0.125, 0)
    [row] = hand_overs([*outcomes, replace(outcomes[1], hand_over=LinkedHandOver(handed, 1e9))])
    assert (row.worker, row.answers, row.prefixes) == ("stage 1 of 2", 2, 3)
    assert (row.copied_mb, row.paused_mb, row.pause_ms, row.silence_ms) == (4.0, 2.0, 125.0, 7000.0)
    assert (row.link_mb_per_s, row.copying_ms) == (1000.0, 2.0)


def test_what_is_counted_while_nothing_befalls_anybody() -> None:
    """A worker that is taken for lost, an answer that is lost, and other tokens are each a fault of its own."""
    clean = Undisturbed(
        stages=2,
        draft_apart=True,
        seconds=90.0,
        clients=4,
        answers=7,
        tokens=448,
        lost=0,
        different=0,
        doubts=3,
        alarms=0,
    )
    assert clean.is_clean
    assert while_undisturbed(clean) == (
        "undisturbed, 2 stages, draft apart: 1.5 minutes, 4 clients, 7 answers, 448 tokens; 0 lost, 0 with other "
        "tokens; workers were asked 3 times whether they live, and taken for lost 0 times"
    )
    for field in ("lost", "different", "alarms"):
        assert not replace(clean, **{field: 1}).is_clean


@pytest.mark.slow
def test_links_are_cut_in_a_network_of_its_own_alone(tmp_path: Path) -> None:
    """That of the machine is left alone, with what to do; where programs are missing, these are named."""
    asked = "from coordinator.bench.faults.switch import why_no_switch; print(why_no_switch())"
    spaces = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*spaces, "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    found = [
        subprocess.run([*before, sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
        for before in ([], spaces, [*spaces, "--net"])
    ]
    assert found[:2] == [f"{why_no_switch()}\n"] * 2
    assert "left alone: run it as `unshare --user" in found[0]
    assert found[2] == "None\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert (why_no_switch() or "").startswith("ip, nsenter, unshare is missing")


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
