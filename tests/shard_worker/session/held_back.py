"""A step whose answer is held back, so that a test can try what must not come before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.messages.steps import Forward
from shard_worker.session.session import TargetSession
from tests.shard_worker.chain import Client
from tests.shard_worker.session.session_memory import stages_of


@asynccontextmanager
async def unanswered(client: Client, frame: Forward) -> AsyncIterator[TargetSession]:
    """Send a frame over a chain whose last device is busy until the context ends.

    Yields the session on the first stage, once the step waits at the last one.
    """
    first, *_, last = stages_of(client)
    release, began = threading.Event(), threading.Event()
    thread = last.host.thread
    busy = thread.submit(lambda: (began.set(), release.wait()))
    await asyncio.to_thread(began.wait)
    sending = asyncio.ensure_future(client.send(frame))
    try:
        async with asyncio.timeout(20):
            while not thread.busy:
                await asyncio.sleep(0.001)
        yield first
    finally:
        release.set()
        await asyncio.gather(busy, sending)
