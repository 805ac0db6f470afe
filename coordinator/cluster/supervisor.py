"""Keeps a cluster whole while a server runs: a lost worker is replaced by one that stands by, or else started or called
again until it is back; where that takes long the others take over its layers until then.

Requests that ran on a lost stage have failed by then, and none is taken meanwhile (`Cluster.alive`); without the
draft's own worker requests go on, one token a step. It owns one task and knows nothing of what the workers hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.errors import FlashsplitError
from services.processes.worker_process import failure_fields
from services.rpc.liveness import DEVICE_HUNG, WORKER_SILENT

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Before the first attempt to restore a cluster, and at most: after each failed attempt the pause is doubled."""

LEAST_CALL_S = 1.0
"""How long a lost worker that runs elsewhere is called at least, however soon others are to take over its layers."""

REPLACE_AFTER_S = 10.0
"""How long a lost worker may take to come back by default, before the others take over its layers."""

REJOIN_LOOK_S = 1.0
"""Between two looks at whether a worker is back whose layers others have."""

AWAITED_PAUSE_S = 2.0
"""At most, where a worker that runs elsewhere is awaited: calling it costs little, and it may be back any moment."""

_AWAITED = {"WORKER_UNREACHABLE", WORKER_SILENT, DEVICE_HUNG}

log = structlog.get_logger()


class Restorable(Protocol):
    """What the supervisor needs of a cluster."""

    async def lost(self) -> FlashsplitError:
        """Wait until a worker is lost, and return the error that says which one and how."""

    async def replace_lost(self) -> bool:
        """Put workers that stand by in the place of lost ones, and return whether the cluster is whole by that."""

    async def restore(self, within_s: float | None = None) -> None:
        """Bring back the lost workers. within_s: how long one that runs elsewhere is called; None for as long as any.
        Raises FlashsplitError when that fails; then it can be tried again."""

    async def resplit(self) -> bool:
        """Split the layers anew over the workers that are left, and return whether the cluster is alive by that."""

    @property
    def degraded(self) -> str | None:
        """Why the layers are not where they should be, as a sentence; None while they are."""

    @property
    def can_rejoin(self) -> bool:
        """Whether there are as many workers again as before the layers were split anew."""

    async def rejoin(self) -> bool:
        """Give the layers back to them, while no session is open, and return whether the cluster is alive by that."""


Quiet = Callable[[], contextlib.AbstractAsyncContextManager[None]]
"""Returns a context that is entered once no session is open, and within which none is opened."""


@contextlib.asynccontextmanager
async def always_quiet() -> AsyncIterator[None]:
    """The context for a cluster of which nobody asks anything."""
    yield


@contextlib.asynccontextmanager
async def supervised(
    cluster: Restorable,
    *,
    replace_after_s: float = REPLACE_AFTER_S,
    quiet: Quiet = always_quiet,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[None]:
    """Watch over a started cluster within the context; what is lost and what is back stands in the log.

    replace_after_s: how long a lost worker may take to come back before the others take over its layers. quiet: within
    it layers go back. sleep: waits for so many seconds. clock: returns a time in seconds.
    """
    supervisor = _Supervisor(cluster, replace_after_s, quiet, sleep, clock)
    task = asyncio.ensure_future(supervisor.keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Supervisor:
    """The fields are the arguments of `supervised`."""

    cluster: Restorable
    replace_after_s: float
    quiet: Quiet
    sleep: Callable[[float], Awaitable[object]]
    clock: Callable[[], float]

    async def keep(self) -> None:
        """Keep the cluster whole until cancelled."""
        while True:
            if (lost := await self._loss()) is not None:
                log.error("cluster.lost", **failure_fields(lost))
                if await self.cluster.replace_lost():
                    log.warning("cluster.restored")
                    continue
            await self._restore()

    async def _loss(self) -> FlashsplitError | None:
        """Wait for the next loss, and return it; None where one was found while layers went back to their workers."""
        while True:
            async with contextlib.AsyncExitStack() as stack:
                lost = asyncio.ensure_future(self.cluster.lost())
                rejoining = asyncio.ensure_future(self._rejoinable(stack))
                try:
                    await asyncio.wait([lost, rejoining], return_when=asyncio.FIRST_COMPLETED)
                    if lost.done():
                        return lost.result()
                finally:
                    for task in (lost, rejoining):
                        task.cancel()
                    await asyncio.gather(lost, rejoining, return_exceptions=True)
                if not await self.cluster.rejoin():
                    return None

    async def _rejoinable(self, stack: contextlib.AsyncExitStack) -> None:
        """Wait until layers can go back to their workers, and no session is open until the stack is left."""
        while not (self.cluster.degraded and self.cluster.can_rejoin):
            await asyncio.sleep(REJOIN_LOOK_S)
        await stack.enter_async_context(self.quiet())

    async def _restore(self) -> None:
        pause_s, began = FIRST_PAUSE_S, self.clock()
        while True:
            # At once would find a worker whose socket is already closed and whose process isn't gone yet.
            await self.sleep(pause_s)
            left_s = self.replace_after_s - (self.clock() - began)
            try:
                await self.cluster.restore(max(left_s, LEAST_CALL_S))
            except FlashsplitError as error:
                pause_s = min(2 * pause_s, AWAITED_PAUSE_S if error.reason in _AWAITED else LONGEST_PAUSE_S)
                log.warning("cluster.restore_failed", **failure_fields(error), again_in_s=pause_s)
            else:
                log.warning("cluster.restored")
                return
            if self.clock() - began >= self.replace_after_s and await self.cluster.resplit():
                return
