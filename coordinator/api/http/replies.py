"""Sends answers whole or as server-sent events, and stops work whose client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.http.errors import logged

T = TypeVar("T")

KEEP_ALIVE_S = 10
"""Between comments that keep a connection open during a long prefill."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def json_text(value: dict[str, Any]) -> str:
    """Return an object as JSON, written on a thread and bit by bit: `json.dumps` lets nothing else run until all of it
    is written, and log-probabilities of a long prompt are megabytes."""
    return await asyncio.to_thread(lambda: "".join(_ENCODER.iterencode(value)))


async def json_reply(value: dict[str, Any]) -> Response:
    """Return a reply that is an object, which may be a large one."""
    return Response(await json_text(value), media_type="application/json")


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


async def event_stream(
    request: Request, events: AsyncGenerator[dict[str, Any] | str | tuple[str, dict[str, Any]]]
) -> EventSourceResponse:
    """Return a reply that streams events: an object or a text as `data`, a pair as a named event and its data.

    An error before the first event is raised, so that it gets a status; a later one becomes an event. Raises ClientGone
    when the client disconnects before the first event.
    """
    path = request.url.path

    async def first_event() -> dict[str, Any] | str | tuple[str, dict[str, Any]] | None:
        return await anext(events, None)

    first = await unless_gone(request, first_event())

    async def frames() -> AsyncGenerator[dict[str, str]]:
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


def _frame(event: dict[str, Any] | str | tuple[str, dict[str, Any]]) -> dict[str, str]:
    if isinstance(event, tuple):
        return {"event": event[0], "data": json.dumps(event[1], ensure_ascii=False)}
    return {"data": event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}
