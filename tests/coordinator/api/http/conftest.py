"""The HTTP APIs over a scripted engine, called without a network or on a port of this host."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from coordinator.api.api_keys import ApiKeys
from coordinator.api.http.app import create_app
from coordinator.api.http.server import HttpServer
from coordinator.engine.engine import Engine
from coordinator.status.board import Board


@dataclass(frozen=True)
class Client:
    """A client of one server."""

    engine: Engine
    http: httpx2.AsyncClient

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The reply's status and JSON."""
        reply = await self.http.post(path, json=body, headers=headers)
        return reply.status_code, reply.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """All events of a streamed reply: each one's name ("message" without one) and its data, JSON where it is."""
        async with self.http.sse(path, method="POST", json={**body, "stream": True}) as source:
            return [(event.event, _json(event.data)) async for event in source]


def _json(data: str) -> Any:
    return data if data == "[DONE]" else json.loads(data)


Connect = Callable[..., Any]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Serve an engine and connect a client to it; both end with the test.

    network: over a port, so that a client can go; otherwise the application is called in this process, which is faster.
    options: further ones of `create_app`.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def serve(engine: Engine, *keys: str, network: bool = False, **options: Any) -> Client:
            board = await stack.enter_async_context(Board(engine))
            app = create_app(engine, ApiKeys(keys), board, **options)
            where: dict[str, Any] = {"base_url": "http://test", "transport": httpx2.ASGITransport(app)}
            if network:
                where = {"base_url": (await stack.enter_async_context(HttpServer(app, "127.0.0.1", 0, None))).url}
            http = httpx2.AsyncClient(**where, trust_env=False, timeout=30)
            return Client(engine, await stack.enter_async_context(http))

        yield serve
