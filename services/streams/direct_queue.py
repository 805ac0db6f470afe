"""A queue whose items are handed over at once while its reader has done with those before.

To wake the task that reads takes longer than most of what it does with an item, and every token of every answer is one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DirectQueue(Generic[T]):
    """Items of one writer for one reader, in their order; everything runs on one event loop."""

    def __init__(self) -> None:
        self.take: Callable[[T], bool] | None = None
        """Set by the reader: called with an item as it is put, behind those that `get` has returned, and returns
        whether it is done with; otherwise `get` returns it."""
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        self._reading = False
        """Whether the reader is at an item that `get` has returned."""

    def put(self, item: T) -> None:
        """Add an item."""
        if self.take is None or self._reading or self._items or not self.take(item):
            self._items.append(item)
            self._filled.set()

    async def get(self) -> T:
        """Return the next item that was not handed over; the reader is at it until it asks for another one."""
        self._reading = False
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        self._reading = True
        return self._items.popleft()
