"""What a cluster does behind a fault, by the clock: when it knows of the loss, when it is whole again, and by what.

It looks at a cluster from outside and changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum

from coordinator.cluster.cluster import Cluster, StartTimes

_LOOK_S = 0.002


class Remedy(StrEnum):
    """What made a cluster whole again: a worker that stood by, the worker started again, the layers split anew over the
    others, or the worker itself, which was called again."""

    STANDBY = "stand-by"
    RESTART = "restart"
    RESPLIT = "re-split"
    CALL = "called again"


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a cluster came over the loss of a worker. Times are in seconds behind the fault.

    known_s: when it was known. whole_s: when all layers were there again. times: how long starting and loading what was
    missing took within that.
    """

    remedy: Remedy
    known_s: float
    whole_s: float
    times: StartTimes


class Recovering:
    """Watches over a cluster from a fault of one worker on, within the context. Then `known_s` and `found`."""

    def __init__(self, cluster: Cluster, worker: str, index: int) -> None:
        """worker: what it is called. index: its place, as of `Cluster.loss`."""
        self._cluster, self._index, self._worker = cluster, index, worker
        self._began = time.monotonic()
        self._place, self._process = cluster.places.get(worker), self._process_id
        named = cluster.processes.items()
        self._standing_by = {process.process_id for name, process in named if name.startswith("stand-by")}
        self._times = cluster.start_times
        self.known_s: float | None = None
        """After how many seconds the cluster knew; None while it does not."""
        self.found: Recovery | None = None
        """None while the cluster is not whole again, and where it never knew."""
        self._task = asyncio.ensure_future(self._watch())

    def close(self) -> None:
        """Watch no more. Safe to call twice."""
        self._task.cancel()

    @property
    def _process_id(self) -> int | None:
        process = self._cluster.processes.get(self._worker)
        return None if process is None else process.process_id

    async def _watch(self) -> None:
        while True:
            cluster, now_s = self._cluster, time.monotonic() - self._began
            # Where another one has its place already, it was known before.
            moved = cluster.places.get(self._worker) != self._place or cluster.degraded is not None
            if self.known_s is None and (cluster.loss(self._index) is not None or not cluster.alive or moved):
                self.known_s = now_s
            if not cluster.alive or cluster.loss(self._index) is not None:
                self.found = None
            elif self.known_s is not None and self.found is None:
                times = cluster.start_times
                self.found = Recovery(
                    self._remedy(),
                    self.known_s,
                    now_s,
                    # Where nobody had to load anything, the last times are of an earlier start.
                    StartTimes() if times is self._times else times,
                )
            await asyncio.sleep(_LOOK_S)

    def _remedy(self) -> Remedy:
        if self._cluster.degraded is not None:
            return Remedy.RESPLIT
        if self._cluster.places.get(self._worker) != self._place or self._process_id in self._standing_by:
            return Remedy.STANDBY
        return Remedy.CALL if self._process is None or self._process == self._process_id else Remedy.RESTART
