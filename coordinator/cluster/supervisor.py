"""Keeps a cluster whole while a server runs: a lost worker is replaced by one that stands by,
or else started or called again until it is back.

Requests that ran on a lost stage have failed by then, and none is taken meanwhile (`Cluster.alive`); without the
draft's own worker requests go on, one token a step. It owns one task and knows nothing of what the workers hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import structlog

from services.errors import FlashsplitError
from services.processes.worker_process import failure_fields
from services.rpc.liveness import DEVICE_HUNG, WORKER_SILENT

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before the first attempt to restore a cluster, and at most: after each failed attempt the pause is doubled."""

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

    async def restore(self) -> None:
        """Bring back the lost workers. Raises FlashsplitError when that fails; then it can be tried again."""


@contextlib.asynccontextmanager
async def supervised(
    cluster: Restorable, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> AsyncIterator[None]:
    """Watch over a started cluster within the context; what is lost and what is back stands in the log.

    sleep: waits for so many seconds.
    """
    task = asyncio.ensure_future(_keep(cluster, sleep))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep(cluster: Restorable, sleep: Callable[[float], Awaitable[object]]) -> None:
    while True:
        log.error("cluster.lost", **failure_fields(await cluster.lost()))
        if not await cluster.replace_lost():
            await _restore(cluster, sleep)
        log.warning("cluster.restored")


async def _restore(cluster: Restorable, sleep: Callable[[float], Awaitable[object]]) -> None:
    pause_s = FIRST_PAUSE_S
    while True:
        # At once would find a worker whose socket is already closed and whose process isn't gone yet.
        await sleep(pause_s)
        try:
            return await cluster.restore()
        except FlashsplitError as error:
            pause_s = min(2 * pause_s, AWAITED_PAUSE_S if error.reason in _AWAITED else LONGEST_PAUSE_S)
            log.warning("cluster.restore_failed", **failure_fields(error), again_in_s=pause_s)
