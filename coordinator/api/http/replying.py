"""Replies to requests, new ones and those that ask again for answers that are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.api.http.choices import answer_all
from coordinator.api.http.errors import HttpError, HttpRefusal
from coordinator.api.http.kept_answer import KeptAnswer, Place
from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.replies import Identified, SentEvent, event_stream, json_reply, unless_gone
from coordinator.api.http.reply_form import Parts, ReplyForm
from coordinator.engine.engine import Engine
from services.text_threads import on_text_thread

KEY_HEADER, LAST_EVENT_HEADER = "Idempotency-Key", "Last-Event-ID"

MOST_KEY_CHARACTERS = 255

_EVENT_ID = re.compile(r"([0-9a-f]{24})-(\d{1,9})-(\d{1,9})-(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of a streamed event.

    answer_id: of the kept answers. times: how often they were taken up from a journal when it was sent. parts: how many
    parts of them it follows from. number: which of the events it is that follow from so many.
    """

    answer_id: str
    times: int
    parts: int
    number: int

    def __str__(self) -> str:
        return f"{self.answer_id}-{self.times}-{self.parts}-{self.number}"


@dataclass(frozen=True, slots=True)
class Asked:
    """How a request asks for answers that may be kept.

    owner: whose it is, as `ApiKeys.check` says. key: its Idempotency-Key, "" without one. last: the event that it has.
    """

    owner: str
    key: str
    last: EventId | None


async def reply(
    http: HttpRequest,
    answers: KeptAnswers,
    form: Callable[[], Awaitable[ReplyForm]],
    *,
    stream: bool,
) -> Response:
    """Answer a request, or go on with the answers that it asks for again. form: makes the engine's requests.

    Raises HttpRefusal as `asked_of` and `kept_for` do, and what `form` and the engine raise.
    """
    engine, asked = answers.engine, asked_of(http)
    if asked.key or asked.last or (stream and answers.journal is not None):
        kept = await kept_for(http, answers, asked, form)
        if stream:
            return await kept_stream(http, engine, kept, asked.last)
        return await json_reply(await unless_gone(http, kept.form.whole(engine, kept.read(Place()))))
    made = await unless_gone(http, _awaited(form))
    parts = answer_all(engine, made.requests)
    if stream:
        return await event_stream(http, _closing(made.stream(engine, parts), parts))
    return await json_reply(await unless_gone(http, made.whole(engine, parts)))


async def kept_for(
    http: HttpRequest,
    answers: KeptAnswers,
    asked: Asked,
    form: Callable[[], Awaitable[ReplyForm]],
    *,
    background: bool = False,
) -> KeptAnswer:
    """Return the kept answers that a request asks for, which begin where there are none yet. What has stopped goes on.

    Raises what `form` and `Engine.check_room` raise, and HttpRefusal where the body is another one than that by which
    they were asked for, where the last event is not one of theirs, or where they are not kept any more.
    """
    path = http.url.path
    value = await http.json()
    body = await on_text_thread(int(http.headers.get("content-length", "0")), _digest, path, value)
    async with answers.one_at_a_time(asked.owner, asked.key):
        if asked.last is not None:
            found = answers.of_id(asked.owner, asked.last.answer_id)
            if found is None:
                raise _refusal(
                    404,
                    LAST_EVENT_HEADER,
                    f"is {asked.last}, and that answer is not kept here (any more): ask "
                    "without it, and all of the answer is computed",
                )
            check_last(found, asked.last)
        else:
            found = answers.of_key(asked.owner, asked.key)
        if found is None:
            made = await unless_gone(http, _awaited(form))
            # What would be turned away is not written first.
            await answers.engine.check_room()
            return await answers.keep(
                made, path=path, owner=asked.owner, key=asked.key, body=body, background=background
            )
    if found.header.key != asked.key and asked.key:
        raise _refusal(422, KEY_HEADER, f"is {asked.key!r}, and {LAST_EVENT_HEADER} is of an answer to another one")
    if found.header.body != body:
        name = KEY_HEADER if asked.key else LAST_EVENT_HEADER
        given = repr(asked.key) if asked.key else asked.last
        raise _refusal(
            422, name, f"is {given}, under which another body was sent: send that one again, or take a new key"
        )
    if not found.header.background:
        found.go_on()
    return found


async def kept_stream(
    http: HttpRequest,
    engine: Engine,
    kept: KeptAnswer,
    last: EventId | None = None,
    passed: Callable[[SentEvent], bool] = lambda event: False,
) -> Response:
    """Stream kept answers, behind the event that the client has. passed: which events it has besides."""
    place = Place()
    parts = kept.read(place)
    events = _closing(kept.form.stream(engine, parts), parts)

    async def identified() -> AsyncGenerator[SentEvent | Identified]:
        had = (-1, -1) if last is None else (last.parts, last.number)
        at, number = -1, 0
        async with contextlib.aclosing(events):
            async for event in events:
                at, number = place.taken, number + 1 if place.taken == at else 0
                if (at, number) > had and not passed(event):
                    yield Identified(event, str(EventId(kept.header.answer_id, len(kept.boundaries), at, number)))

    return await event_stream(http, identified())


def asked_of(http: HttpRequest) -> Asked:
    """Return how a request asks. Raises HttpRefusal for headers of another form."""
    headers = http.headers
    key, last = headers.get(KEY_HEADER), headers.get(LAST_EVENT_HEADER)
    if key is not None and not (0 < len(key) <= MOST_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        raise _refusal(
            400, KEY_HEADER, f"has {len(key)} characters; it must be 1 to {MOST_KEY_CHARACTERS} printable ASCII ones"
        )
    match = None if last is None else _EVENT_ID.fullmatch(last)
    if last is not None and match is None:
        raise _refusal(400, LAST_EVENT_HEADER, f"is {last[:80]!r}; it must be the id of an event that came from here")
    event = None if match is None else EventId(match[1], int(match[2]), int(match[3]), int(match[4]))
    return Asked(getattr(http.state, "owner", ""), key or "", event)


def check_last(kept: KeptAnswer, last: EventId) -> None:
    """Raises HttpRefusal for an event of other answers, and for one of a process that has ended which follows from
    parts that the journal lost."""
    if last.answer_id != kept.header.answer_id:
        raise _refusal(422, LAST_EVENT_HEADER, f"is {last}, which is of another answer than the one asked for")
    known = kept.boundaries[last.times] if last.times < len(kept.boundaries) else None
    if known is not None and last.parts > known:
        raise _refusal(
            409,
            LAST_EVENT_HEADER,
            f"is {last}, and of that answer the journal has lost what came behind part {known}: ask without it for all "
            "of the answer",
        )


def _digest(path: str, value: Any) -> str:
    """Return a digest of a request's path and body, whatever white space and order of fields it was sent with."""
    text = json.dumps([path, value], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _refusal(status: int, header: str, why: str) -> HttpRefusal:
    return HttpRefusal(
        HttpError(status, f"{header} {why}", "invalid_request_error", "invalid_request_error", param=header)
    )


async def _awaited(form: Callable[[], Awaitable[ReplyForm]]) -> ReplyForm:
    return await form()


async def _closing(events: AsyncGenerator[SentEvent], parts: Parts) -> AsyncGenerator[SentEvent]:
    """Yield the events; closing the generator closes theirs, and that of the parts which they tell."""
    async with contextlib.aclosing(parts), contextlib.aclosing(events):
        async for event in events:
            yield event
