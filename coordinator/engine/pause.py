"""Has all answers that run wait behind their next steps, with what they have come to kept, until they may go on.

It counts the attempts to compute answers, and knows nothing of what they are made of.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PAUSE_S = 30.0
"""How long to wait for the ends of steps: a chunk of a prompt takes seconds on a slow device. An answer whose client
does not read is not waited for longer, and computed anew where it has come to by then."""


class Pause:
    """A pause of all answers at once. asked: whether they are to wait."""

    def __init__(self) -> None:
        self._over, self._none_runs = asyncio.Event(), asyncio.Event()
        self._over.set()
        self._none_runs.set()
        self._running = 0

    @property
    def asked(self) -> bool:
        return not self._over.is_set()

    async def over(self) -> None:
        """Wait until answers may go on."""
        await self._over.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute an answer within the context, which is entered once there is no pause. Where one is asked for, the
        context is to be left behind the next step."""
        while self.asked:
            await self.over()
        self._running += 1
        self._none_runs.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()

    @contextlib.asynccontextmanager
    async def held(self, timeout_s: float) -> AsyncIterator[int]:
        """Have all answers wait within the context, which is entered once they do, or after so many seconds. Gives how
        many go on nevertheless: one whose client does not read comes to no end of a step."""
        self._over.clear()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._none_runs.wait()
            yield self._running
        finally:
            self._over.set()
