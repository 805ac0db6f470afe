"""Sends answers whole or as server-sent events, and stops work whose client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coordinator.api.http.errors import logged
from coordinator.api.http.written_json import json_pieces

T = TypeVar("T")

SentEvent = dict[str, Any] | str | tuple[str, dict[str, Any]] | bytes
"""An event of a stream: an object or a text is its `data`, a pair its name and data; bytes are ready to be sent."""


@dataclass(frozen=True, slots=True)
class Identified:
    """An event with the id by which a client can say that it has it."""

    event: SentEvent
    event_id: str


KEEP_ALIVE_S = 10
"""Between comments that keep a connection open during a long prefill."""


CHUNK_CHARACTERS = 64 << 10
"""Of a large reply so much is sent at once."""


async def json_reply(value: dict[str, Any]) -> Response:
    """Return a reply that is an object, which may be a large one: it is written on a thread and sent bit by bit."""
    chunks = await asyncio.to_thread(_chunks, value)
    if len(chunks) == 1:
        return Response(chunks[0], media_type="application/json")
    return StreamingResponse(_each(chunks), media_type="application/json")


async def json_event(value: dict[str, Any]) -> bytes:
    """Return an event that is a large object, ready to be sent; it is written on a thread."""
    return await asyncio.to_thread(lambda: b"".join((b"data: ", *_chunks(value), b"\r\n\r\n")))


def _chunks(value: dict[str, Any]) -> list[bytes]:
    chunks: list[bytes] = []
    pieces: list[str] = []
    size = 0
    for piece in json_pieces(value):
        pieces.append(piece)
        size += len(piece)
        if size >= CHUNK_CHARACTERS:
            chunks.append("".join(pieces).encode())
            pieces, size = [], 0
    return [*chunks, "".join(pieces).encode()] if pieces else chunks


async def _each(chunks: list[bytes]) -> AsyncGenerator[bytes]:
    for chunk in chunks:
        yield chunk


class ClientGone(Exception):
    """The client has disconnected before the answer was there."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. When the client disconnects first, cancel the work and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def event_stream(request: Request, events: AsyncGenerator[SentEvent | Identified]) -> EventSourceResponse:
    """Return a reply that streams events.

    An error before the first event is raised, so that it gets a status; a later one becomes an event. Raises ClientGone
    when the client disconnects before the first event.
    """
    path = request.url.path

    async def first_event() -> SentEvent | Identified | None:
        return await anext(events, None)

    first = await unless_gone(request, first_event())

    async def frames() -> AsyncGenerator[dict[str, str] | bytes]:
        try:
            if first is not None:
                yield _frame(first)
            async for event in events:
                yield _frame(event)
        except Exception as error:
            known = logged(error, "http.stream_failed", path)
            body = json.dumps(known.body(path))
            yield {"event": "error", "data": body} if path.startswith("/v1/messages") else {"data": body}
        finally:
            await events.aclose()

    return EventSourceResponse(frames(), ping=KEEP_ALIVE_S, headers={"X-Accel-Buffering": "no"})


def _frame(event: SentEvent | Identified) -> dict[str, str] | bytes:
    if isinstance(event, Identified):
        frame = _frame(event.event)
        return (
            b"id: %b\r\n%b" % (event.event_id.encode(), frame)
            if isinstance(frame, bytes)
            else {**frame, "id": event.event_id}
        )
    if isinstance(event, bytes):
        return event
    if isinstance(event, tuple):
        return {"event": event[0], "data": json.dumps(event[1], ensure_ascii=False)}
    return {"data": event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}
