"""The event loop of every process, uvloop's where it is installed, and tasks in it that end together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result, as `asyncio.run`."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def first_done(*loops: Coroutine[Any, Any, None]) -> None:
    """Run loops together until the first one ends, cancel the others, and return or raise as that one did.

    Where several end at once, the one named first counts.
    """
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        # This also retrieves the errors that don't count, which would be logged otherwise.
        await asyncio.gather(*tasks, return_exceptions=True)
    first.result()
