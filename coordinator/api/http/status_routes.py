"""/v1/status and /v1/events: how the server and its workers are doing, for the page and `flashsplit status`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.http.documented import EVENTS, QUERY_ERRORS
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.replies import event_stream
from coordinator.engine.engine import Engine
from coordinator.status.board import Board
from coordinator.status.report import Status

PATH = "/v1/status"
EVENTS_PATH = "/v1/events"

INTERVAL_S = 0.1
"""Between two events; the blocks that were answered meanwhile go out together."""


def routes(engine: Engine, board: Board) -> APIRouter:
    """Return the routes of status and events."""
    router = APIRouter(route_class=JsonRoute, tags=["Operations"])

    @router.get(PATH, responses=QUERY_ERRORS)
    async def status() -> Status:
        """The chain of workers now: what each holds, how busy it is, what travels between them, and what the draft and
        the prefix cache bring. A worker that doesn't answer within two seconds is told as such."""
        return await board.status()

    @router.get(EVENTS_PATH, response_model=None, responses={**QUERY_ERRORS, **EVENTS})
    async def events(http: Request) -> Response:
        """Server-sent events named `blocks`, until the client goes: decode steps of all requests as they are answered,
        each with its request's id, rows sent, rows kept and milliseconds."""
        return await event_stream(http, _blocks(engine, board))

    return router


async def _blocks(engine: Engine, board: Board) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    with board.figures.watched() as feed:
        # The first event tells the client that it is connected.
        yield "blocks", {"blocks": []}
        # A server that shuts down must not wait for those who only watch.
        while not engine.load.draining:
            await asyncio.sleep(INTERVAL_S)
            if feed:
                blocks = [asdict(feed.popleft()) for _ in range(len(feed))]
                yield "blocks", {"blocks": blocks}
