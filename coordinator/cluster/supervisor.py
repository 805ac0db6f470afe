"""Keeps a cluster whole while a server runs: a worker that is lost is started or called again until it is back.

Requests that ran on a lost stage have failed by then, and none is taken meanwhile (`Cluster.alive`); without the
draft's own worker they go on plainly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from coordinator.cluster.cluster import Cluster
from services.errors import FlashsplitError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def supervised(cluster: Cluster) -> AsyncIterator[None]:
    """Watch over a started cluster within the context; what is lost and what is back stands in the log."""
    task = asyncio.ensure_future(_keep(cluster))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep(cluster: Cluster) -> None:
    while True:
        error = await cluster.lost()
        log.error("cluster.lost", why=error.message)
        await _restore(cluster)
        log.warning("cluster.restored")


async def _restore(cluster: Cluster) -> None:
    pause_s = FIRST_PAUSE_S
    while True:
        # At once would find a worker whose socket is already closed and whose process isn't gone yet.
        await asyncio.sleep(pause_s)
        try:
            return await cluster.restore()
        except FlashsplitError as error:
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("cluster.restore_failed", why=error.message, again_in_s=pause_s)
