"""Notices which workers of a cluster are lost, by every sign that there is, and keeps the reasons until they are back.

It owns the waits for the ends of local processes and the watches over the connections between workers. It knows
nothing of what the workers hold and starts none again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.cluster.loading import with_name
from services.errors import FlashsplitError, Unavailable
from services.processes.worker_process import WorkerFailed, WorkerProcess
from services.rpc.liveness import DEVICE_HUNG, WORKER_SILENT, Edge
from services.rpc.peers import Peers

CAUSE_S = 0.5
"""How long the cause of a broken connection may take to show."""

STILL_THERE = (WORKER_SILENT, DEVICE_HUNG)
"""The reasons of losses behind which a worker's process goes on."""

Explain = Callable[[FlashsplitError], Awaitable[FlashsplitError]]
"""Returns the error behind an error, or the error itself."""


class Losses:
    """Which workers are lost, and how. Use `close`.

    Workers are known by an index: the stage's; that of the draft's own worker follows the last stage's.
    trouble: what is wrong with the stages, as far as `next_loss` has found out; None while nothing is.
    """

    def __init__(self, peers: Peers, stages: int) -> None:
        self._peers, self._stages = peers, stages
        self._trouble: FlashsplitError | None = None
        self._troubled = asyncio.Event()
        self._lost: dict[int, FlashsplitError] = {}
        self._unfit = set[int]()
        """The lost whose processes, where they are local, have not been ended yet."""
        self._deaths: dict[int, asyncio.Task[WorkerFailed]] = {}
        self._ended: dict[int, WorkerFailed] = {}
        """How processes ended that are watched no more, until all losses are forgotten."""
        self._edges: dict[int, Edge] = {}
        """The connections of the workers among each other, by the index of the worker to which they lead."""
        self._reports: dict[int, FlashsplitError] = {}
        """What sessions have found since `next_loss` heard of it last: that the draft's own worker does not answer, or
        that a stage's does not hold the stage."""
        self._reported = asyncio.Event()
        self._noted, self._noted_at = asyncio.Event(), -CAUSE_S
        """Tells those who wait for the cause of an error that a loss has just been noted, and when that was last."""

    def name(self, index: int) -> str:
        """Return what a worker is called in errors."""
        return f"stage {index}" if index < self._stages else "draft worker"

    # --- what is watched

    def watch_process(self, index: int, process: WorkerProcess) -> None:
        """Notice the end of a local worker's process."""
        self._deaths[index] = asyncio.ensure_future(process.died())

    def leave_process(self, index: int) -> None:
        """Watch the process of a local worker no more: it is about to be ended."""
        self._unfit.discard(index)
        death = self._deaths.pop(index, None)
        if death is None:
            return
        if death.done():
            self._lost[index] = self._ended[index] = death.result()
        death.cancel()

    async def watch_edge(self, index: int, before: str, address: str) -> None:
        """Have the worker before this one connect to it, and notice when that connection breaks.

        before, address: those of the two workers. Raises Unavailable, named after the worker, where it is not reached.
        """
        try:
            edge = await self._peers.edge(before, address)
        except FlashsplitError as error:
            raise with_name(error, self.name(index)) from error
        if edge is not None:
            self._edges[index] = edge

    def leave_edges(self) -> None:
        """Watch the connections between workers no more."""
        for edge in self._edges.values():
            edge.close()
        self._edges.clear()

    def close(self) -> None:
        """Watch nothing any more. Safe to call twice."""
        for death in self._deaths.values():
            death.cancel()
        self.leave_edges()

    # --- what is known now

    @property
    def trouble(self) -> FlashsplitError | None:
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: FlashsplitError | None) -> None:
        self._trouble = trouble
        if trouble is None:
            self._troubled.clear()
        else:
            self._troubled.set()

    async def in_trouble(self) -> FlashsplitError:
        """Wait until something is wrong with the stages, and return what it is."""
        while self._trouble is None:
            await self._troubled.wait()
        return self._trouble

    @property
    def deaths(self) -> list[asyncio.Task[WorkerFailed]]:
        """The waits for the ends of the local workers' processes."""
        return [*self._deaths.values()]

    def death(self, index: int) -> WorkerFailed | None:
        """Return how a local worker's process ended; None while it runs and for all others."""
        death = self._deaths.get(index)
        return death.result() if death is not None and death.done() and not death.cancelled() else None

    async def any_ended(self, indices: Iterable[int], timeout_s: float) -> bool:
        """Return whether one of these workers is local and its process ends within so many seconds."""
        deaths = [self._deaths[index] for index in indices if index in self._deaths]
        if deaths:
            await _first_done(deaths, timeout_s)
        return any(death.done() for death in deaths)

    async def first_death(self, timeout_s: float) -> tuple[int, WorkerFailed] | None:
        """Wait for so long until a local worker's process has ended, and return its index and how it ended. None as
        soon as a loss was noted that has another cause."""
        if self._deaths and not self._ended and time.monotonic() - self._noted_at > timeout_s:
            noted = asyncio.ensure_future(self._noted.wait())
            try:
                await _first_done([*self.deaths, noted], timeout_s)
            finally:
                noted.cancel()
        # A session may hear of its broken connection when the worker is about to be replaced already.
        found = ((index, self.death(index) or self._ended.get(index)) for index in {**self._deaths, **self._ended})
        return next(((index, death) for index, death in found if death is not None), None)

    def reason(self, index: int) -> FlashsplitError | None:
        """Return how a worker was lost that is not back yet; None for all others."""
        return self.death(index) or self._lost.get(index)

    def must_restart(self, index: int) -> bool:
        """Return whether the process of a local worker is of no use any more."""
        death = self._deaths.get(index)
        return death is None or death.done() or index in self._unfit

    @property
    def stages_run(self) -> bool:
        """Whether all stages are there, as far as is known."""
        return self.trouble is None and not any(self.death(index) for index in range(self._stages))

    # --- what is found out

    def report(self, index: int, error: FlashsplitError) -> None:
        """Hear from a session what is wrong with a worker; `next_loss` tells it. The draft's own worker is lost at
        once; a stage is until `restored`."""
        # Those who get this error add their own places to it.
        self._reports[index] = error.copied()
        if index < self._stages:
            self.trouble = error
        else:
            self._lost[index] = error
        self._reported.set()

    def restored(self) -> None:
        """Forget all losses: every worker is back."""
        # What sessions reported meanwhile was about the worker that was lost.
        self._reports.clear()
        self._reported.clear()
        self._lost.clear()
        self._ended.clear()
        self._unfit.clear()
        self.trouble = None

    async def next_loss(self, addresses: Sequence[str], explain: Explain) -> FlashsplitError:
        """Wait until one more worker is lost, and return the error that says which one and how.

        addresses: those of all workers, by index. explain: finds the error behind an error.
        """
        async with self._signs(addresses) as signs:
            at_workers = [*signs.connections.values(), *signs.deaths.values()]
            await _first_done([*at_workers, *signs.edges.values(), signs.reported])
            self._refuse_requests(signs)
            if not any(task.done() for task in (*at_workers, signs.reported)):
                # Where a worker is gone, the one before it may know that a moment sooner than this process.
                await _first_done(at_workers, CAUSE_S)
            gone = {**_results(signs.connections), **_results(signs.deaths)}
            return await self._note(gone, _results(signs.edges), explain)

    @contextlib.asynccontextmanager
    async def _signs(self, addresses: Sequence[str]) -> AsyncIterator[_Signs]:
        """Wait within the context for all signs that a worker is lost which is not yet."""
        watched = [index for index in range(len(addresses)) if index not in self._lost]
        edges = {index: self._edges[index] for index in watched if index in self._edges}
        signs = _Signs(
            connections={index: asyncio.ensure_future(self._peers.lost(addresses[index])) for index in watched},
            deaths={index: self._deaths[index] for index in watched if index in self._deaths},
            edges={index: asyncio.ensure_future(edge.lost()) for index, edge in edges.items()},
            reported=asyncio.ensure_future(self._reported.wait()),
        )
        # The waits for the ends of processes go on.
        own = [*signs.connections.values(), *signs.edges.values(), signs.reported]
        try:
            yield signs
        finally:
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)

    def _refuse_requests(self, signs: _Signs) -> None:
        """Note at the first sign of a lost stage that something is wrong, whatever is found out about the cause."""
        found = {**_results(signs.edges), **_results(signs.connections), **_results(signs.deaths)}
        if found and (index := min(found)) < self._stages:
            sign = found[index]
            self.trouble = Unavailable(f"{self.name(index)}: {sign.message}", reason=sign.reason)

    async def _note(
        self, gone: dict[int, FlashsplitError], broken: dict[int, FlashsplitError], explain: Explain
    ) -> FlashsplitError:
        """Note as lost who is gone, was reported by sessions, or is not reached by the worker before; return why."""
        self._reported.clear()
        reports, self._reports = self._reports, {}
        # A worker that was only found not to hold its stage need not be started again.
        unfit = gone.keys() | {index for index in reports if index >= self._stages}
        gone = {**reports, **gone}
        # A connection breaks with the worker at either of its ends.
        broken = {index: error for index, error in broken.items() if index - 1 not in gone}
        index, cause = next(iter((gone or broken).items()))
        # Who runs elsewhere, or is there and silent, has no process that is about to end.
        told = index in gone and (index not in self._deaths or cause.reason in STILL_THERE)
        error = cause if told else await explain(cause)
        if error is cause:
            error = with_name(error, self.name(index))
        self._lost |= dict.fromkeys({**gone, **broken}, error)
        self._unfit |= unfit
        self._noted_at = time.monotonic()
        self._noted.set()
        self._noted.clear()
        if min(self._lost) < self._stages:
            self.trouble = error
        return error


@dataclass(frozen=True, slots=True)
class _Signs:
    """Waits for what tells that a worker is lost, by the worker's index, and for reports of sessions.

    connections: for the loss of this process's connection to it, its silence, or what it says of itself. deaths: for
    the end of its process. edges: for a break of the connection that the worker before it has to it.
    """

    connections: dict[int, asyncio.Task[Unavailable]]
    deaths: dict[int, asyncio.Task[WorkerFailed]]
    edges: dict[int, asyncio.Task[FlashsplitError]]
    reported: asyncio.Task[Literal[True]]


def _results(tasks: Mapping[int, asyncio.Task[Any]]) -> dict[int, FlashsplitError]:
    """Return what the tasks that are done have found."""
    return {index: task.result() for index, task in tasks.items() if task.done()}


async def _first_done(tasks: Iterable[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
