"""Coroutines that a session begins and does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class BackgroundTasks:
    """The coroutines of one session that run in the background."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        """on_error: called with the error of each coroutine that raises one."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        """Run `work(*args)` as a task."""
        task = asyncio.ensure_future(self._guarded(work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __len__(self) -> int:
        """How many tasks run."""
        return len(self._tasks)

    async def settle(self, remaining: int = 0) -> None:
        """Wait until no more than `remaining` tasks run."""
        while len(self._tasks) > remaining:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def cancel(self) -> None:
        """Cancel all tasks, without waiting for their end."""
        for task in self._tasks:
            task.cancel()

    async def _guarded(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        try:
            await work(*args)
        except Exception as error:
            self._on_error(error)
