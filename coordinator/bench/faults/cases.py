"""What is to befall which worker of which cluster, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """What befalls a worker: its process is killed (SIGKILL), or stopped and not continued (SIGSTOP)."""

    KILL = "kill"
    STOP = "stop"


class Phase(StrEnum):
    """When it does.

    PREFILL, DECODE, VERIFY: at a step of that kind. LOADING: at a step of an answer, and once more while the worker
    that takes the lost one's place loads. SAVE: while the state of prompts is being kept, in memory or on disk.
    RESTORE: while such state comes from the disk.
    """

    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    SAVE = "save"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster: its number of stages, whether the draft has a worker of its own, and how many workers stand by."""

    stages: int
    draft_apart: bool
    standbys: int = 0

    @property
    def workers(self) -> list[str]:
        """The names of its workers, as `Cluster.processes` has them."""
        return [
            *(f"stage {number}" for number in range(self.stages)),
            *(["draft worker"] if self.draft_apart else []),
            *(f"stand-by {number}" for number in range(self.standbys)),
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault of one worker. number: of all cases, so that each has prompts of its own. requests: in flight."""

    number: int
    shape: Shape
    worker: str
    phase: Phase
    requests: int
    fault: Fault


def spread_cases(
    shapes: Sequence[Shape], phases: Sequence[Phase], requests: Sequence[int], counts: dict[Fault, int], seed: int
) -> list[Case]:
    """Return cases, those of one cluster together: of each fault as many as `counts` says, spread evenly over the
    phases, and within a phase over everything else in an order that follows from the seed."""
    draw = random.Random(seed)
    chosen = []
    for fault, count in counts.items():
        everything = {}
        for phase in phases:
            kinds = [(shape, worker, many) for shape in shapes for worker in shape.workers for many in requests]
            draw.shuffle(kinds)
            everything[phase] = itertools.cycle(kinds)
        for phase in itertools.islice(itertools.cycle(phases), count):
            chosen.append((*next(everything[phase]), phase, fault))
    chosen.sort(key=lambda case: shapes.index(case[0]))
    return [
        Case(number, shape, worker, phase, many, fault)
        for number, (shape, worker, many, phase, fault) in enumerate(chosen)
    ]
