"""The answers of one reply, kept apart from the connection of the client that asked for them: others may read them,
from the beginning or from where a reader before was, while they come and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from contextvars import copy_context
from dataclasses import dataclass

from coordinator.answer import Answer, ChoicePart
from coordinator.api.http.choices import answer_all
from coordinator.api.http.errors import logged
from coordinator.api.http.reply_form import ReplyForm
from coordinator.engine.engine import RETRY_AFTER_S, Engine
from coordinator.journal.answer_file import CANCELLED, FAILED, LEFT, AnswerFile, StoredAnswer
from services.errors import Cancelled, FlashsplitError, InvalidArgument

_PART_BYTES, _TOKEN_BYTES = 400, 40
"""About what a part and a token of it take in memory."""


@dataclass(slots=True)
class Place:
    """How far a reader is: how many parts it has taken."""

    taken: int = 0


class KeptAnswer:
    """One reply's answers. header: how they were asked for. form: how they are told. parts: what has come of them.

    boundaries: how many parts were known each time that a process took them up from a journal. begun: whether a turn
    has come. stopped: LEFT, CANCELLED or FAILED where they stopped before their end, the latter with an error.
    ended_at: when they ended or stopped, in Unix seconds; None while they go on. size: about how many bytes it takes.
    """

    def __init__(self, engine: Engine, form: ReplyForm, stored: StoredAnswer, file: AnswerFile | None) -> None:
        """stored: what is known of them. file: to write what comes; None to keep it in memory alone."""
        self.header, self.form, self.parts, self.boundaries = stored.header, form, stored.parts, stored.boundaries
        self.stopped = stored.stopped
        self.error: Exception | None = stored.error
        self._engine, self._file = engine, file
        self.begun = bool(self.parts)
        self._complete = sum(isinstance(part.content, Answer) for part in self.parts)
        """How many of the answers are."""
        self._count = len(form.requests)
        self.size = sum(_TOKEN_BYTES * len(request.prompt_ids) for request in form.requests)
        self.size += sum(map(_size, self.parts))
        self.ended_at = stored.written_at if self.stopped or self.is_whole else None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._readers = 0

    @property
    def is_whole(self) -> bool:
        """Whether all answers are complete."""
        return self._complete == self._count

    @property
    def is_worthless(self) -> bool:
        """Whether it stopped before anything came, and nobody would go on with it: the request makes no sense, or the
        client has neither a key nor the id of an event."""
        if self.parts or self.header.background or not self.stopped:
            return False
        return not self.header.key or isinstance(self.error, InvalidArgument)

    @property
    def outlives_readers(self) -> bool:
        """Whether the answers go on when nobody reads them: a client that gave a key will ask again, and one that had
        them computed in the background too."""
        return self.header.background or bool(self.header.key)

    def go_on(self, *, patient: bool = False) -> None:
        """Compute what is missing, unless that is being done. patient: wait where the engine's queue is full."""
        before = self._task
        if self.is_whole or self.stopped == CANCELLED or (before is not None and not self.stopped):
            return
        self.stopped, self.error, self.ended_at = "", None, None
        # A task of its own context: spans and log lines are those of the request that it goes on with.
        self._task = asyncio.get_running_loop().create_task(self._run(before, patient), context=copy_context())

    async def cancel(self) -> None:
        """End the answers before they are complete; no one goes on with them."""
        if not self.is_whole and self.stopped != CANCELLED:
            await self._stop(CANCELLED)

    async def close(self) -> None:
        """End the computing, of which the file says nothing: who opens it next goes on with it."""
        await self._end_task()
        self.forget()

    def forget(self) -> None:
        """Let the file of answers go on which nothing is computed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    async def read(self, place: Place) -> AsyncGenerator[ChoicePart]:
        """Yield all parts as they come, those that are there first. place: notes how many were taken.

        Closing the generator of the last reader stops answers that nobody else could ask for. Raises the error that
        stopped them.
        """
        self._readers += 1
        try:
            while True:
                news = self._news
                while place.taken < len(self.parts):
                    place.taken += 1
                    yield self.parts[place.taken - 1]
                if self.is_whole:
                    return
                if self.error is not None:
                    raise self.error
                if self.stopped == CANCELLED:
                    raise Cancelled("the answer was cancelled", reason="ANSWER_CANCELLED")
                await news.wait()
        finally:
            self._readers -= 1
            if not self._readers and not self.outlives_readers and not self.is_whole and not self.stopped:
                await self._stop(LEFT)

    async def _run(self, before: asyncio.Task[None] | None, patient: bool) -> None:
        """Compute what is missing. before: what has been told to end doing so, and may take a moment."""
        try:
            if before is not None:
                await asyncio.wait([before])
            while not await self._compute(patient):
                await asyncio.sleep(RETRY_AFTER_S)
            self.ended_at = time.time()
        except Exception as error:
            self._fail(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None
            self._tell()

    async def _compute(self, patient: bool) -> bool:
        """Return whether there was room for it."""
        parts = answer_all(self._engine, self.form.requests, tuple(self.parts), self._begin)
        try:
            async with contextlib.aclosing(parts):
                async for part in parts:
                    # A reader never has what the file has not.
                    if self._file is not None:
                        self._file.append(part)
                    self.parts.append(part)
                    self._complete += isinstance(part.content, Answer)
                    self.size += _size(part)
                    self._tell()
        except FlashsplitError as error:
            if not patient or error.reason != "QUEUE_FULL":
                raise
            return False
        return True

    def _begin(self) -> None:
        self.begun = True

    def _fail(self, error: Exception) -> None:
        self.stopped, self.error, self.ended_at = FAILED, error, time.time()
        if self._file is not None and not self._engine.load.draining:
            # Who opens the file behind a server that was shut down goes on.
            self._file.stop(FAILED, error)
        if not self._readers:
            logged(error, "http.kept_answer_failed", self.header.path)

    def _tell(self) -> None:
        """Let readers go on."""
        self._news.set()
        self._news = asyncio.Event()

    async def _stop(self, why: str) -> None:
        self.stopped, self.ended_at = why, time.time()
        # Where the server ends, readers have not left by themselves: who opens the file goes on.
        if self._file is not None and not (why == LEFT and self._engine.load.draining):
            self._file.stop(why)
        self._tell()
        await self._end_task()

    async def _end_task(self) -> None:
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])


def _size(part: ChoicePart) -> int:
    logprobs = part.content.logprobs or ()
    return _PART_BYTES + _TOKEN_BYTES * (len(part.content.token_ids) + 4 * len(logprobs))
