"""A step whose answer is held back, so that what may not come before it can be tried."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.messages.steps import Forward
from shard_worker.session.target_session import TargetSession
from tests.shard_worker.chain import Client
from tests.shard_worker.session.session_memory import stages_of


@asynccontextmanager
async def unanswered(client: Client, frame: Forward) -> AsyncIterator[TargetSession]:
    """Within, the first stage has passed a step on and the last one's device is busy with something else."""
    first, *_, last = stages_of(client)
    release = threading.Event()
    busy = last._thread.submit(release.wait)
    sending = asyncio.ensure_future(client.send(frame))
    try:
        while not first._unanswered:
            await asyncio.sleep(0.001)
        yield first
    finally:
        release.set()
        await asyncio.gather(busy, sending)
