"""The figures of faults, by their kind and phase, as rows and as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from coordinator.bench.faults.cases import Fault, Phase
from coordinator.bench.faults.drill import Outcome
from coordinator.bench.report import empty_table


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """What became of the answers around the faults of one kind in one phase.

    faults: how many workers met one. answers: all that were asked for; resumed: those of them that went on behind a
    lost chain; lost: that ended with an error; different: that have other tokens than undisturbed; damaged: whose text,
    as it came in pieces, is not that of the undisturbed answer. silence: the longest time without a new token that the
    client of an answer in flight saw from the fault on: its median over the answers, and the longest. noticed: how long
    the cluster took to know of faults that pass, at the longest; 0 for other faults. unnoticed: how many it never knew
    of.
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
    answered = [(told, told.answer, alone) for told, alone in pairs if told.answer is not None]
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
        resumed=sum(answer.stats.resumed > 0 for _, answer, _ in answered),
        lost=sum(told.answer is None for told, _ in pairs),
        different=sum(answer.token_ids != alone.token_ids for _, answer, alone in answered),
        damaged=sum("".join(told.texts) != alone.text for told, _, alone in answered),
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
