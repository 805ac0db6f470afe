"""Hands all that a worker holds over to another one: weights, kept prefixes and the state of answers that run.

Answers wait between two steps meanwhile, and go on with no token lost and none computed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from coordinator.cluster.successor import Successor
from coordinator.engine.engine import Engine
from coordinator.engine.pause import PAUSE_S
from services.errors import FailedPrecondition, FlashsplitError
from services.messages.snapshots import SnapshotOwner

AGAIN_S = 2.0
"""Before another look at a worker that was told to stop and could not be drained."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What a hand-over came to.

    worker: what the worker was called that another one has the place of; place: where that one is. prefixes: how many
    were copied; copied_bytes: while answers went on, and paused_bytes: while they waited. paused_s: how long they did.
    anew: how many are computed anew, since they came to no end of a step.
    """

    worker: str
    place: str
    prefixes: int
    copied_bytes: int
    paused_bytes: int
    paused_s: float
    anew: int


class Handover:
    """The hand-overs of one engine, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: asyncio.Task[HandedOver] | None = None

    async def drain(self, worker: str, to: str) -> HandedOver:
        """Have another worker take the place of one, which then has no part any more; a local one ends.

        worker, to: as of `Cluster.prepare`. Raises what that raises, FailedPrecondition while another worker is
        drained, and what goes wrong with the other worker; then all is as it was. It goes on where the caller is
        cancelled.
        """
        return await self._drain(worker, to, comes_back=False)

    async def _drain(self, worker: str, to: str, *, comes_back: bool) -> HandedOver:
        """Do what `drain` says. comes_back: the worker stands by once it is there again."""
        if self._running is not None and not self._running.done():
            raise FailedPrecondition("a worker is being drained: wait until that is done", reason="DRAINING_WORKER")

        async def prepare_and_hand_over() -> HandedOver:
            return await self.hand_over(await self._engine.cluster.prepare(worker, to), comes_back=comes_back)

        self._running = asyncio.ensure_future(prepare_and_hand_over())
        return await asyncio.shield(self._running)

    async def keep(self) -> None:
        """Drain every worker that is told to stop, where one stands by for it, until cancelled.

        It stands by in its turn once it is started again, as by a rolling update.
        """
        while True:
            leaving = await self._engine.cluster.leaving()
            log.warning("worker.leaves", worker=leaving.name)
            with leaving.heartbeats.taking_over():
                try:
                    await self._drain(leaving.name, leaving.to, comes_back=True)
                except FlashsplitError as error:
                    # Then it is lost, and replaced as such.
                    log.warning("worker.not_drained", worker=leaving.name, why=error.message)
                    await asyncio.sleep(AGAIN_S)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Drain workers that are told to stop within the context, as `keep` does."""
        keeping = asyncio.ensure_future(self.keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def hand_over(self, successor: Successor, *, comes_back: bool = False) -> HandedOver:
        """Put a worker that was prepared in the other one's place, as `drain` does, with what that one keeps.
        comes_back: as of `Cluster.retire`."""
        engine, cluster, prefixes = self._engine, self._engine.cluster, self._engine.prefixes
        copied: set[tuple[SnapshotOwner, str]] = set()
        copied_bytes = paused_bytes = 0
        try:
            if prefixes is not None:
                # While answers go on, so that little is left for their pause.
                copied_bytes = await prefixes.copy(successor, copied)
            async with engine.paused(PAUSE_S) as anew:
                began = time.monotonic()
                if prefixes is not None:
                    paused_bytes = await prefixes.copy(successor, copied)
                    prefixes.let_inherit(successor)
                await cluster.exchange(successor)
                paused_s = time.monotonic() - began
        except BaseException:
            await cluster.dismiss(successor)
            raise
        await cluster.retire(successor, comes_back=comes_back)
        place = str(successor.member.place)
        handed = HandedOver(successor.name, place, len(copied), copied_bytes, paused_bytes, paused_s, anew)
        log.warning(
            "worker.drained",
            worker=handed.worker,
            to=handed.place,
            prefixes=handed.prefixes,
            copied_bytes=copied_bytes,
            paused_bytes=paused_bytes,
            paused_ms=round(1e3 * paused_s),
            anew=anew,
        )
        return handed
