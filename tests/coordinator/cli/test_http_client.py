"""A running server as the terminal sees it: chunks of an answer, and in one sentence whatever goes wrong."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from coordinator.api.api_keys import ApiKeys
from coordinator.api.http.app import create_app
from coordinator.api.http.server import HttpServer
from coordinator.cli.http_client import Server, server_url
from coordinator.status.board import Board
from services.errors import FlashsplitError, InvalidArgument, Unauthenticated, Unavailable
from tests.coordinator.fakes import Script, engine, says

HI = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
Connect = Callable[..., Any]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Serve an application, or a scripted engine with these keys, and connect to it with a key."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            script: Script | None = None, keys: tuple[str, ...] = (), key: str | None = None, app: Any = None
        ):
            if app is None:
                served = engine(script)
                app = create_app(served, ApiKeys(keys), await stack.enter_async_context(Board(served)))
            server = await stack.enter_async_context(HttpServer(app, "127.0.0.1", 0, None))
            return await stack.enter_async_context(Server(server.url, key, ssl.create_default_context()))

        yield start


async def chunks(server: Server, body: dict[str, Any] = HI) -> list[dict[str, Any]]:
    return [chunk async for chunk in server.chat(body)]


def text(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_an_answer_comes_in_chunks(connect: Connect) -> None:
    """All chunks up to the end are there, whatever characters they hold."""
    server = await connect(Script(says("hé\r\n€")))
    assert text(await chunks(server)) == "hé\r\n€"
    assert await server.model() == "demo"


async def test_a_refusal_is_told_in_the_server_s_words(connect: Connect) -> None:
    """The message is the error object's, and a wrong key is a case of its own."""
    with pytest.raises(FlashsplitError, match="temperature: Input should be less than or equal to 100"):
        await chunks(await connect(), {**HI, "temperature": 101})
    with pytest.raises(Unauthenticated, match="wants an API key"):
        await chunks(await connect(keys=("secret",)))
    with pytest.raises(Unauthenticated, match="does not know that API key"):
        await chunks(await connect(keys=("secret",), key="wrong"))
    assert text(await chunks(await connect(keys=("secret",), key="secret"))) == "hello"


async def test_an_error_in_the_middle_of_an_answer(connect: Connect) -> None:
    """What came before it was given out; then it is raised."""
    server = await connect(Script(failures={2: Unavailable("stage 1 has died")}))
    received: list[dict[str, Any]] = []

    async def read() -> None:
        async for chunk in server.chat(HI):
            received.append(chunk)

    with pytest.raises(Unavailable, match="stage 1 has died"):
        await read()
    assert text(received) == "he"


async def test_servers_of_other_kinds(connect: Connect) -> None:
    """A reply that is no stream of chunks is refused by name, and so is a port on which nobody listens."""
    with pytest.raises(Unavailable, match="sent what is no chat completion"):
        await chunks(await connect(app=PlainTextResponse("hello")))
    with pytest.raises(Unavailable, match="sent what is no chat completion"):
        await chunks(await connect(app=PlainTextResponse("data: nonsense\n\n", media_type="text/event-stream")))
    async with Server("http://127.0.0.1:9", None, ssl.create_default_context()) as nobody:
        with pytest.raises(Unavailable, match="no server answers at http://127.0.0.1:9"):
            await chunks(nobody)


def test_urls() -> None:
    """What people copy along with a URL is taken off; what is none is refused."""
    assert server_url(" https://host.lan:8000/v1/ ") == "https://host.lan:8000"
    for wrong in ("host:8000", "ftp://host", ""):
        with pytest.raises(InvalidArgument, match="--url"):
            server_url(wrong)
