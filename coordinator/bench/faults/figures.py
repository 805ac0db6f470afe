"""The figures of faults, by their kind and phase, of how clusters came over them, and of hand-overs: rows, and tables
for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from coordinator.bench.faults.cases import Fault, Phase
from coordinator.bench.faults.drill import Outcome
from coordinator.bench.faults.recovery import Remedy
from coordinator.bench.report import empty_table


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """What became of the answers around the faults of one kind in one phase.

    faults: how many workers met one. answers: all that were asked for; resumed: those of them that went on behind a
    lost chain; lost: that ended with an error; different: that have other tokens than undisturbed; damaged: whose text,
    as it came in pieces, is not that of the undisturbed answer; both 0 where nothing is compared. silence: the longest
    time without a new token that the client of an answer in flight saw from the fault on: its median over the answers,
    and the longest. noticed: how long the cluster took to know of faults that pass, at the longest; 0 for other faults.
    unnoticed: how many it never knew of.
    """

    fault: str
    phase: str
    faults: int
    answers: int
    resumed: int
    lost: int
    different: int
    damaged: int
    silence_median_ms: float
    silence_longest_ms: float
    noticed_longest_ms: float
    unnoticed: int

    @property
    def is_clean(self) -> bool:
        """Whether no answer was lost or came out otherwise."""
        return not (self.lost or self.different or self.damaged)


def summarise(outcomes: Sequence[Outcome]) -> list[FaultFigures]:
    """Return the figures of all kinds of faults in all phases that there were."""
    return [
        _figures(fault, phase, chosen)
        for fault in Fault
        for phase in Phase
        if (chosen := [one for one in outcomes if one.befell and (one.case.fault, one.case.phase) == (fault, phase)])
    ]


def _figures(fault: Fault, phase: Phase, outcomes: Sequence[Outcome]) -> FaultFigures:
    pairs = [pair for outcome in outcomes for pair in zip(outcome.told, outcome.undisturbed, strict=True)]
    answered = [(told, told.answer) for told, _ in pairs if told.answer is not None]
    compared = [(told, told.answer, alone) for told, alone in pairs if told.answer is not None and alone is not None]
    silences = [
        1e3 * silence
        for outcome in outcomes
        for told in outcome.told[: outcome.case.requests]
        if (silence := told.silence_s(outcome.at))
    ]
    return FaultFigures(
        fault=str(fault),
        phase=str(phase),
        faults=len(outcomes) * (2 if phase is Phase.LOADING else 1),
        answers=len(pairs),
        resumed=sum(answer.stats.resumed > 0 for _, answer in answered),
        lost=sum(told.answer is None for told, _ in pairs),
        different=sum(answer.token_ids != alone.token_ids for _, answer, alone in compared),
        damaged=sum("".join(told.texts) != (alone.text or "") for told, _, alone in compared),
        silence_median_ms=statistics.median(silences or [0.0]),
        silence_longest_ms=max(silences, default=0.0),
        noticed_longest_ms=max(1e3 * (outcome.noticed_s or 0.0) for outcome in outcomes),
        unnoticed=sum(fault.passes and outcome.noticed_s is None for outcome in outcomes),
    )


def table(rows: Sequence[FaultFigures]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "",
        "",
        "faults",
        "answers",
        "resumed",
        "lost",
        "other tokens",
        "other text",
        "silence p50 ms",
        "longest ms",
        "noticed ms",
    )
    for row in rows:
        counts = (row.faults, row.answers, row.resumed, row.lost, row.different, row.damaged)
        silences = (row.silence_median_ms, row.silence_longest_ms)
        noticed = f"{row.noticed_longest_ms:.0f}" if row.noticed_longest_ms else ""
        figures.add_row(row.fault, row.phase, *map(str, counts), *(f"{silence:.0f}" for silence in silences), noticed)
    return figures


@dataclass(frozen=True, slots=True)
class RecoveryFigures:
    """What the silence behind faults of one kind was made of, where clusters came over them by one remedy. All times
    are medians over the answers that went on behind a lost chain.

    faults: how many workers were lost; answers: that many answers. known: from the fault until the cluster knew; whole:
    until all layers were there again. process, load: how much of that starting workers took, and loading what they did
    not hold. anew: restoring and computing anew what the answer was. silence: from the last token before the fault, or
    from the fault, to the next one. rest: of silence, what remains without process, load and anew.
    """

    fault: str
    remedy: str
    faults: int
    answers: int
    known_ms: float
    whole_ms: float
    process_ms: float
    load_ms: float
    anew_ms: float
    silence_ms: float
    rest_ms: float


def recoveries(outcomes: Sequence[Outcome]) -> list[RecoveryFigures]:
    """Return the figures of all remedies behind all kinds of faults that there were."""
    found = []
    for fault in Fault:
        for remedy in Remedy:
            chosen = [
                one
                for one in outcomes
                if one.case.fault is fault and one.recovery is not None and one.recovery.remedy is remedy
            ]
            if (figures := _recovery_figures(fault, remedy, chosen)) is not None:
                found.append(figures)
    return found


def _recovery_figures(fault: Fault, remedy: Remedy, outcomes: Sequence[Outcome]) -> RecoveryFigures | None:
    """Return the figures of one remedy; None where no answer waited for it."""
    times = []
    for outcome in outcomes:
        recovery = outcome.recovery
        assert recovery is not None
        for told in outcome.told[: outcome.case.requests]:
            silence_s = told.silence_s(outcome.at)
            if told.answer is not None and told.answer.stats.resumed and silence_s:
                process_s, load_s = recovery.times.processes_s, recovery.times.load_s
                anew_s = told.computed_anew_s(outcome.at)
                rest_s = silence_s - process_s - load_s - anew_s
                times.append((recovery.known_s, recovery.whole_s, process_s, load_s, anew_s, silence_s, rest_s))
    if not times:
        return None
    medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
    return RecoveryFigures(str(fault), str(remedy), len(outcomes), len(times), *medians)


def recovery_table(rows: Sequence[RecoveryFigures]) -> Table:
    """Return these figures for people."""
    headings = ("", "by", "faults", "answers", "known ms", "whole ms", "process ms", "load ms", "anew ms")
    figures = empty_table(*headings, "silence ms", "rest ms")
    for row in rows:
        times = (row.known_ms, row.whole_ms, row.process_ms, row.load_ms, row.anew_ms, row.silence_ms, row.rest_ms)
        figures.add_row(
            row.fault, row.remedy, str(row.faults), str(row.answers), *(f"{milliseconds:.0f}" for milliseconds in times)
        )
    return figures


@dataclass(frozen=True, slots=True)
class HandOverFigures:
    """Figures of one hand-over.

    prefixes: how many were copied; copied_mb, paused_mb: of them and of the answers' state, what was copied while
    answers went on and while they waited, in 10^6 bytes. pause: how long they did; silence: the longest time without a
    new token that a client saw. link_mb_per_s: how fast bytes pass to the worker that takes over. copying: how long
    paused_mb take at that rate.
    """

    worker: str
    phase: str
    answers: int
    prefixes: int
    copied_mb: float
    paused_mb: float
    pause_ms: float
    silence_ms: float
    link_mb_per_s: float
    copying_ms: float


def hand_overs(outcomes: Sequence[Outcome]) -> list[HandOverFigures]:
    """Return the figures of each hand-over that came to its end."""
    found = []
    for outcome in outcomes:
        if outcome.hand_over is None:
            continue
        handed, bytes_per_s = outcome.hand_over.handed, outcome.hand_over.bytes_per_s
        told = outcome.told[: outcome.case.requests]
        found.append(
            HandOverFigures(
                worker=f"{outcome.case.worker} of {outcome.case.shape.stages}",
                phase=str(outcome.case.phase),
                answers=len(told),
                prefixes=handed.prefixes,
                copied_mb=handed.copied_bytes / 1e6,
                paused_mb=handed.paused_bytes / 1e6,
                pause_ms=1e3 * handed.paused_s,
                silence_ms=1e3 * max(one.silence_s(outcome.at) for one in told),
                link_mb_per_s=bytes_per_s / 1e6,
                copying_ms=1e3 * handed.paused_bytes / bytes_per_s,
            )
        )
    return found


def hand_over_table(rows: Sequence[HandOverFigures]) -> Table:
    """Return these figures for people."""
    headings = ("handed over", "in", "answers", "prefixes", "copied before MB", "in the pause MB", "pause ms")
    figures = empty_table(*headings, "silence ms", "link MB/s", "copying ms")
    for row in rows:
        figures.add_row(
            *(row.worker, row.phase, str(row.answers), str(row.prefixes)),
            *(f"{megabytes:.1f}" for megabytes in (row.copied_mb, row.paused_mb)),
            *(f"{value:.0f}" for value in (row.pause_ms, row.silence_ms, row.link_mb_per_s, row.copying_ms)),
        )
    return figures
