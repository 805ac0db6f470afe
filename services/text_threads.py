"""The threads on which texts are parsed, rendered and tokenised, so that no text keeps the event loop from its clients.

Work on short texts and work on large ones have threads of their own: nobody's short prompt waits behind a large one. Of
large ones one is in work at a time, few wait, and their memory goes back to the system when they are done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from services.errors import ResourceExhausted
from services.freed_memory import return_freed_memory

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 256 << 10
"""From this size on a text counts as large: to work on it takes tens of milliseconds or more."""

MAX_LARGE_WAITING = 32
"""Large texts that may wait; each of them takes memory."""

RETRY_AFTER_S = 2
"""When a client whose large text was turned away should try again."""

_short = ThreadPoolExecutor(2, thread_name_prefix="short-text")
_large = ThreadPoolExecutor(1, thread_name_prefix="large-text")
_large_waiting = 0


async def on_text_thread(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of work on a text of `size` bytes or characters, done on one of the threads.

    Raises what the work raises, and ResourceExhausted where too many large texts wait already.
    """
    global _large_waiting
    loop = asyncio.get_running_loop()
    if size < LARGE_BYTES:
        return await loop.run_in_executor(_short, partial(work, *args, **kwargs))
    if _large_waiting >= MAX_LARGE_WAITING:
        raise ResourceExhausted(
            f"{_large_waiting} requests of more than {LARGE_BYTES} bytes wait to be read: try again in "
            f"{RETRY_AFTER_S} s, or send a shorter one",
            reason="QUEUE_FULL",
            retry_after_s=RETRY_AFTER_S,
        )
    _large_waiting += 1
    try:
        return await loop.run_in_executor(_large, partial(work, *args, **kwargs))
    finally:
        _large_waiting -= 1
        loop.run_in_executor(_large, return_freed_memory)
