"""What is to befall which worker of which cluster, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """When it does.

    PREFILL, DECODE, VERIFY: at a step of that kind. LOADING: at a step of an answer, and once more while the worker
    that takes the lost one's place loads. SAVE: while the state of prompts is being kept, in memory or on disk.
    RESTORE: while such state comes from the disk. HANDOVER: at a step of an answer, while the worker hands all that it
    has over to another one; one of both meets it.
    """

    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    SAVE = "save"
    RESTORE = "restore"
    HANDOVER = "hand-over"


class Site(StrEnum):
    """Where a cluster's workers run: as children of this process, apart from it and called at their sockets, or on
    hosts of their own, which are network namespaces."""

    CHILDREN = "children"
    APART = "apart"
    LINKED = "linked"


class Fault(StrEnum):
    """What befalls a worker.

    KILL, STOP: its process is killed (SIGKILL), or stopped and not continued (SIGSTOP). DRAIN: another one takes its
    place, and it ends. PAUSE: it is stopped, and goes on after a while. REBOOT: it is killed, and started again after
    a while. CUT: the link to it drops all packets for a while.
    """

    KILL = "kill"
    STOP = "stop"
    DRAIN = "drain"
    PAUSE = "pause"
    REBOOT = "reboot"
    CUT = "cut"

    @property
    def phases(self) -> list[Phase]:
        """When it can be: where nobody is started for a lost one, nobody loads for it, nor takes over from it."""
        ends = self in (Fault.KILL, Fault.STOP)
        return [phase for phase in Phase if ends or phase not in (Phase.LOADING, Phase.HANDOVER)]

    @property
    def site(self) -> Site:
        """Where the workers run that it befalls: who starts its own workers ends them too when they are silent."""
        sites = {Fault.PAUSE: Site.APART, Fault.REBOOT: Site.APART, Fault.CUT: Site.LINKED}
        return sites.get(self, Site.CHILDREN)

    @property
    def passes(self) -> bool:
        """Whether the worker is there again after a while, by itself."""
        return self.site is not Site.CHILDREN

    def befalls(self, worker: str, phase: Phase) -> bool:
        """Return whether it can befall a worker of this name then: one that stands by has no place to be taken, and
        nobody waits for it."""
        ends = self in (Fault.KILL, Fault.STOP) and phase is not Phase.HANDOVER
        return ends or not worker.startswith("stand-by")


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster: its number of stages, whether the draft has a worker of its own, how many workers stand by, and where
    all of them run."""

    stages: int
    draft_apart: bool
    standbys: int = 0
    site: Site = Site.CHILDREN

    @property
    def placed(self) -> list[str]:
        """The names of its workers that have a part."""
        return [*(f"stage {number}" for number in range(self.stages)), *(["draft worker"] if self.draft_apart else [])]

    @property
    def workers(self) -> list[str]:
        """The names of its workers, as `Cluster.processes` has them."""
        return [
            *self.placed,
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
        met = [phase for phase in phases if phase in fault.phases]
        for phase in met:
            kinds = [
                (shape, worker, many)
                for shape in shapes
                for worker in shape.workers
                for many in requests
                if fault.befalls(worker, phase) and shape.site is fault.site
            ]
            draw.shuffle(kinds)
            everything[phase] = itertools.cycle(kinds)
        for phase in itertools.islice(itertools.cycle(met), count):
            chosen.append((*next(everything[phase]), phase, fault))
    # Those that are drained last: the first of them has its place taken by who stands by, and nobody does from then on.
    chosen.sort(key=lambda case: (shapes.index(case[0]), case[-1] is Fault.DRAIN or case[-2] is Phase.HANDOVER))
    return [
        Case(number, shape, worker, phase, many, fault)
        for number, (shape, worker, many, phase, fault) in enumerate(chosen)
    ]
