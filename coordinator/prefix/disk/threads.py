"""Blocking work off the event loop, on files that must not be closed or removed while a thread uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function on a thread and return its result. A caller that is cancelled waits until the thread is done."""
    work = asyncio.get_running_loop().run_in_executor(None, lambda: function(*args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            # Retrieved, because asyncio complains of exceptions that nobody retrieves.
            work.exception()
        raise
