"""A coordinator's end of a session on a first stage of this process: answers to steps of several sessions come past the
session's own events, from the device thread, as they do through the socket between two processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from services.messages.batch_frames import BatchAnswer
from services.messages.steps import Event
from services.rpc.stage import StageSession
from services.streams.batch_stream import TogetherOnly
from services.streams.step_order import StepOrder


class CallerWay:
    """The way of answers to all sessions of a chain. sent: how many answers each frame that was taken had."""

    def __init__(self, takes: Callable[[Sequence[BatchAnswer]], bool]) -> None:
        """takes: says of each frame whether it can be sent."""
        self._takes, self._loop = takes, asyncio.get_running_loop()
        self._stream_ids = itertools.count(1)
        self.sessions: dict[int, CallerSession] = {}
        self.sent: list[int] = []

    def lane(self) -> TogetherOnly:
        """Return the lane of a session that is about to be opened."""
        return TogetherOnly(next(self._stream_ids), cast(Any, self))

    def opened(self, session: StageSession, lane: TogetherOnly) -> CallerSession:
        """Return the coordinator's end of it."""
        self.sessions[lane.stream_id] = CallerSession(session)
        return self.sessions[lane.stream_id]

    def send_answers(self, answers: Sequence[BatchAnswer]) -> bool:
        """Called on the device thread."""
        if not self._takes(answers):
            return False
        self.sent.append(len(answers))
        self._loop.call_soon_threadsafe(self._deliver, answers)
        return True

    def join(self, *_: object) -> None:
        raise AssertionError("no steps come on this way")

    def leave(self, stream_id: int) -> None:
        """Called for each session that is closed."""

    def _deliver(self, answers: Sequence[BatchAnswer]) -> None:
        for answer in answers:
            self.sessions[answer.stream_id].came.put_nowait(answer)


class CallerSession:
    """The session of a stage, but for its events."""

    def __init__(self, session: StageSession) -> None:
        self._session = session
        self.came: asyncio.Queue[Event | BatchAnswer | Exception | None] = asyncio.Queue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def events(self) -> AsyncIterator[Event]:
        """Yield all in the order of steps."""
        listening, order = asyncio.ensure_future(self._listen()), StepOrder()
        try:
            while (event := await self.came.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                for one in order.add(event):
                    yield one
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        try:
            async for event in self._session.events():
                self.came.put_nowait(event)
            self.came.put_nowait(None)
        except Exception as error:
            self.came.put_nowait(error)
