"""Blocking work off the event loop, for files that must not be closed or removed under a thread's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it on a thread. One who is cancelled meanwhile still waits until the thread is done with it."""
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
            # Asked for, so that nobody complains that it was not.
            work.exception()
        raise
