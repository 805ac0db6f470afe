"""The answers that clients may ask for again, in memory and in the journal: by the `Idempotency-Key` of the request, by
the `Last-Event-ID` of an event, by the id of a background response."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import structlog

from coordinator.api.http.kept_answer import KeptAnswer
from coordinator.api.http.reply_form import ReplyForm
from coordinator.engine.engine import Engine
from coordinator.journal.answer_file import AnswerFile, Header, StoredAnswer
from coordinator.journal.directory import Journal
from coordinator.journal.plain import from_plain, to_plain
from services.errors import Unavailable
from services.telemetry.trace_context import calling

KEEP_S = 3600.0
"""How long answers are kept by default once they have ended."""

MOST_BYTES = 256 << 20
"""About how much memory answers that have ended may take; the oldest go first."""

_LOOK_S = 10.0
"""Between two looks for answers that have been kept long enough."""

log = structlog.get_logger()


class KeptAnswers:
    """All kept answers of a server. journal: where they are written; None to keep them in memory alone."""

    def __init__(
        self,
        engine: Engine,
        forms: Mapping[str, type[ReplyForm]],
        journal: Journal | None = None,
        *,
        keep_s: float = KEEP_S,
    ) -> None:
        """forms: how each API tells its answers, by its path. keep_s: how long answers are kept that have ended."""
        self.engine, self._forms, self.journal, self._keep_s = engine, forms, journal, keep_s
        self._answers: dict[str, KeptAnswer] = {}
        """By their ids, in the order in which they were asked for."""
        self._by_key: dict[tuple[str, str], KeptAnswer] = {}
        self._by_name: dict[tuple[str, str], KeptAnswer] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._cleaning: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Go on with what the journal has of answers that a process has begun which has ended."""
        self._cleaning = asyncio.create_task(self._clean())
        if self.journal is not None:
            for stored in await asyncio.to_thread(self.journal.read, time.time() - self._keep_s):
                self._take_up(self.journal, stored)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.wait([self._cleaning])
        for answer in self._answers.values():
            await answer.close()

    @contextlib.asynccontextmanager
    async def one_at_a_time(self, owner: str, key: str) -> AsyncIterator[None]:
        """Have requests of the same key wait for each other within the context, so that one of them asks the engine and
        the others find what it asked for. Nobody waits without a key."""
        lock = self._locks.setdefault((owner, key), asyncio.Lock()) if key else contextlib.nullcontext()
        async with lock:
            yield

    def of_key(self, owner: str, key: str) -> KeptAnswer | None:
        """Return the answers that a client asked for under this key, if they are kept."""
        found = self._by_key.get((owner, key)) if key else None
        return None if found is None or found.is_worthless else found

    def of_id(self, owner: str, answer_id: str) -> KeptAnswer | None:
        """Return the answers of this id if they are kept, and this client's."""
        found = self._answers.get(answer_id)
        return found if found is not None and found.header.owner == owner else None

    def of_name(self, owner: str, name: str) -> KeptAnswer | None:
        """Return the answers of a reply that the client knows by this id, if they are kept."""
        return self._by_name.get((owner, name))

    async def keep(
        self, form: ReplyForm, *, path: str, owner: str, key: str, body: str, background: bool = False
    ) -> KeptAnswer:
        """Begin the answers of a reply and keep them. The other arguments are fields of `Header`.

        Raises Unavailable for background answers that the journal cannot be told of: who asked will not be there when
        they are lost.
        """
        header = Header(
            secrets.token_hex(12),
            form.name,
            path,
            owner,
            key,
            body,
            self._model,
            background,
            time.time(),
            await asyncio.to_thread(to_plain, form),
        )
        answer = KeptAnswer(self.engine, form, StoredAnswer(header), await self._file(header))
        self._add(answer)
        answer.go_on(patient=background)
        return answer

    @property
    def _model(self) -> str:
        return self.engine.cluster.target.fingerprint

    async def _file(self, header: Header) -> AnswerFile | None:
        if self.journal is None:
            return None
        try:
            return await asyncio.to_thread(self.journal.begin, header)
        except Unavailable as error:
            if header.background:
                raise
            log.error("journal.write_failed", answer=header.answer_id, why=error.message, then="it is kept in memory")
            return None

    def _take_up(self, journal: Journal, stored: StoredAnswer) -> None:
        """Keep what a file tells, and go on with it where it was neither complete nor stopped."""
        header, names = stored.header, {"answer": stored.header.answer_id, "path": stored.header.path}
        if header.model != self._model:
            log.warning("journal.other_model", **names, model=header.model, served=self._model)
            return
        try:
            form: ReplyForm = from_plain(self._forms[header.path], header.form)
            file = journal.take_up(stored)
        except (KeyError, TypeError, ValueError, OSError) as error:
            log.warning("journal.answer_unreadable", **names, why=f"{type(error).__name__}: {error}")
            return
        answer = KeptAnswer(self.engine, form, stored, file)
        self._add(answer)
        if answer.is_whole or answer.stopped:
            return
        request = form.requests[0]
        log.warning("request.taken_up", **names, parts=len(stored.parts), request_id=request.request_id)
        with calling(request.request_id, [request.trace.traceparent]):
            answer.go_on(patient=True)

    def _add(self, answer: KeptAnswer) -> None:
        header = answer.header
        self._answers[header.answer_id] = self._by_name[header.owner, header.name] = answer
        if header.key:
            self._by_key[header.owner, header.key] = answer

    async def remove(self, answer: KeptAnswer) -> None:
        """Forget answers at once, and end them where they go on."""
        await answer.cancel()
        # Another one may have asked for that meanwhile.
        if self._answers.get(answer.header.answer_id) is answer:
            self._drop(answer)

    def _drop_old(self) -> None:
        """Forget answers that were kept long enough, and the oldest ones where they take too much memory."""
        for answer in [one for one in self._answers.values() if one.is_worthless]:
            self._drop(answer)
        ended = sorted((one for one in self._answers.values() if one.ended_at is not None), key=_ended_at)
        room, oldest = MOST_BYTES - sum(one.size for one in ended), time.time() - self._keep_s
        for answer in ended:
            if _ended_at(answer) > oldest and room >= 0:
                return
            room += answer.size
            self._drop(answer)

    def _drop(self, answer: KeptAnswer) -> None:
        header = answer.header
        del self._answers[header.answer_id]
        for index, name in ((self._by_name, header.name), (self._by_key, header.key)):
            if index.get((header.owner, name)) is answer:
                del index[header.owner, name]
        answer.forget()
        if self.journal is not None:
            self.journal.remove(header.answer_id)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(min(self._keep_s, _LOOK_S))
            self._drop_old()


def _ended_at(answer: KeptAnswer) -> float:
    return answer.ended_at or 0.0
