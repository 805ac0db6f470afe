"""Who computes when the workers' memory for keys and values ends: the answer that came last is set aside, its session's
memory serves the others, and it is taken up again when one of them has ended.

One answer always goes on, so that all come to their end. It must not know what answers are made of.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from coordinator.engine.pause import Pause

GIVE_WAY_S = 2.0
"""How long an answer waits for the youngest one to give way, which does so behind its next step; one whose client does
not read has none."""


class Room:
    """The answers that run, and those of them that are set aside. pause: of all of them at once."""

    def __init__(self) -> None:
        self.pause = Pause()
        self._running: list[Place] = []
        """In the order in which they came."""
        self._entering: deque[asyncio.Future[None]] = deque()
        self.preemptions = 0
        """How often an answer was set aside so far."""

    @property
    def set_aside(self) -> int:
        """How many answers are set aside."""
        return sum(place.called is not None for place in self._running)

    async def enter(self, place: Place) -> None:
        """Let an answer begin, once nobody is set aside: it would take the memory that they wait for."""
        while self.set_aside:
            await _future_in(self._entering)
        self._running.append(place)

    def leave(self, place: Place) -> None:
        """End an answer; one that was set aside is called back."""
        self._running.remove(place)
        self._let_others_on(place)
        self.call_back()

    def call_back(self) -> None:
        """Let the answer go on that came first of those set aside, if there is one."""
        for place in self._running:
            if place.called is not None and not place.called.done():
                place.called.set_result(None)
                return
        if not self.set_aside:
            while self._entering:
                entering = self._entering.popleft()
                if not entering.done():
                    entering.set_result(None)

    async def wait(self, place: Place) -> bool:
        """Wait until there may be memory for an answer that found none.

        Another one that came later gives way to it; the youngest is set aside itself until it is called back. Where no
        other answer goes on, return at once: True the first time, since what others had may not have been free yet, and
        then False.
        """
        is_asked, place.is_asked = place.is_asked, False
        going_on = [one for one in self._running if one.called is None]
        if len(going_on) == 1:
            was_alone, place.was_alone = place.was_alone, True
            return not was_alone
        if not is_asked and going_on[-1] is not place and await self._gives_way(going_on[-1]):
            return True
        self.preemptions += 1
        place.is_back = True
        self._let_others_on(place)
        place.called = asyncio.get_running_loop().create_future()
        try:
            await place.called
        finally:
            place.called = None
        return True

    async def _gives_way(self, youngest: Place) -> bool:
        """Have an answer set aside in favour of another one. Returns whether it was, or has ended, in time."""
        youngest.is_asked = True
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        youngest.given_way.append(waiting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_WAY_S):
                await waiting
                return True
        youngest.is_asked = False
        return False

    @staticmethod
    def _let_others_on(place: Place) -> None:
        """Let those go on that wait for an answer to give way."""
        for waiting in place.given_way:
            if not waiting.done():
                waiting.set_result(None)
        place.given_way.clear()


class Place:
    """One answer's place among the others.

    called: done when it is called back; None while it is not set aside. was_alone: it has found no memory while no
    other answer went on, and has no new token since. is_asked: whether it is to be set aside behind its next step, for
    those that wait in given_way. is_back: whether it was set aside, and has no new token since. pause: of all answers
    at once.
    """

    def __init__(self, room: Room) -> None:
        self._room, self.pause = room, room.pause
        self.was_alone = self.is_asked = self.is_back = False
        self.called: asyncio.Future[None] | None = None
        self.given_way: list[asyncio.Future[None]] = []

    async def step_aside(self) -> bool:
        """Wait until memory may be there again. Returns False at once where waiting would bring none."""
        return await self._room.wait(self)

    def goes_on(self) -> None:
        """Say that the answer goes on behind having found no memory: there may be room for another one, or for new
        ones, unless one gave way to it."""
        calls_back = self.is_back or self.was_alone
        self.is_back = self.was_alone = False
        if calls_back:
            self._room.call_back()


async def _future_in(waiting: deque[asyncio.Future[None]]) -> None:
    """Wait for a future that others find in this queue."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.append(future)
    await future
