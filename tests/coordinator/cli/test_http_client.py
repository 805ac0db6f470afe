"""A running server as a client sees it, over connections to a small server that says what a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.cli.http_client import ClientOptions, RemoteServer, server_url
from services.errors import InvalidArgument, Unauthenticated, Unavailable

STREAM = "content-type: text/event-stream"


@asynccontextmanager
async def answering(
    pieces: Sequence[str | bytes], status: str = "200 OK", header: str = STREAM, key: str | None = None
) -> AsyncIterator[tuple[RemoteServer, list[bytes]]]:
    """Give a client of a server that answers every request with these pieces, each sent for itself, and then closes.

    The list holds the requests that have come.
    """
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the answer to one request."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b":0")
        requests.append(head + await reader.readexactly(int(length.partition(b":")[2])))
        writer.write(f"HTTP/1.1 {status}\r\n{header}\r\nconnection: close\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece.encode() if isinstance(piece, str) else piece)
            await writer.drain()
        writer.close()

    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = running.sockets[0].getsockname()[1]
    async with running, ClientOptions(url=f"http://127.0.0.1:{port}", api_key=key).connect() as server:
        yield server, requests


async def chunks(server: RemoteServer) -> list[dict[str, Any]]:
    """Return all chunks of a chat completion."""
    return [chunk async for chunk in server.chat({"messages": []})]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a:1", "http://a:1"),
        (" http://a:1/ ", "http://a:1"),
        ("https://a.lan/v1/", "https://a.lan"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_urls_as_people_copy_them(text: str, url: str) -> None:
    """Without the last slash and /v1."""
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["", "a:8000", "ftp://a", "http://", "http://a:port", "/v1"])
def test_what_is_no_url_is_refused(text: str) -> None:
    """With the value and the form of one."""
    with pytest.raises(InvalidArgument, match="--url '.*' must be like http://127.0.0.1:8000 or https://host.lan:8000"):
        ClientOptions(url=text or " ").connect()


async def test_a_stream_of_chunks() -> None:
    """However it is cut into packets: comments, other line ends and separators within a text don't matter."""
    texts = ["Hällo", "a\u2028b\u0085c", "\\n\n"]
    events = [": a comment\n\n", *(f"data: {json.dumps({'text': text}, ensure_ascii=False)}\r\n\r\n" for text in texts)]
    whole = "".join([*events, "data: [DONE]\n\n"]).encode()
    for size in (1, 7, len(whole)):
        pieces = [whole[first : first + size] for first in range(0, len(whole), size)]
        async with answering(pieces) as (server, requests):
            assert [chunk["text"] for chunk in await chunks(server)] == texts
            assert requests[0].startswith(b"POST /v1/chat/completions ")
            assert requests[0].endswith(b'{"messages":[]}')


async def test_events_without_data_are_no_chunks() -> None:
    """Servers that keep a connection open with them, or say when to try again, are understood."""
    pieces = ["retry: 3000\n\n", "event: ping\n\n", 'id: 1\ndata: {"text": "a"}\n\n', "id: 2\n\n", "data: [DONE]\n\n"]
    async with answering(pieces) as (server, _):
        assert await chunks(server) == [{"text": "a"}]


@pytest.mark.parametrize(
    ("pieces", "header", "words"),
    [
        (['data: {"error": {"message": "no room"}}\n\n'], STREAM, "no room"),
        (["data: {\n\n"], STREAM, "sent what is no chat completion"),
        (['data: {"error": 5}\n\n'], STREAM, "sent what is no chat completion"),
        (["<html>"], "content-type: text/html", "sent what is no chat completion"),
        (['data: {"a": 1}\n\n'], f"{STREAM}\r\ncontent-length: 500", "the connection to http://127.0.0.1:.* was lost"),
    ],
)
async def test_a_stream_that_fails(pieces: list[str], header: str, words: str) -> None:
    """An error within it, what is no stream of chunks, and one that breaks off."""
    async with answering(pieces, header=header) as (server, _):
        with pytest.raises(Unavailable, match=words):
            await chunks(server)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        ("404 Not Found", '{"error": {"message": "no such model"}}', InvalidArgument, "no such model"),
        ("503 Service Unavailable", '{"error": {"message": "it drains"}}', Unavailable, "it drains"),
        ("500 Oops", "<html>", Unavailable, "answered 500 Oops to /v1/"),
        ("401 Unauthorized", "", Unauthenticated, "wants an API key: give it in FLASHSPLIT_API_KEY"),
    ],
)
async def test_refusals_of_the_server(status: str, body: str, kind: type[Exception], words: str) -> None:
    """In the server's own words where it has some."""
    async with answering([body], status, "content-type: application/json") as (server, _):
        with pytest.raises(kind, match=words):
            await chunks(server)
        with pytest.raises(kind, match=words):
            await server.model()


async def test_a_wrong_key_is_told_from_a_missing_one() -> None:
    """It is sent, and refused."""
    async with answering([""], "401 Unauthorized", "content-length: 0", key="secret") as (server, requests):
        with pytest.raises(Unauthenticated, match="does not know that API key"):
            await server.model()
        assert b"authorization: bearer secret" in requests[0].lower()


async def test_other_servers_tell_a_model_but_no_status() -> None:
    """What is missing is named."""
    models = json.dumps({"data": [{"id": "m"}]})
    async with answering([models], header="content-type: application/json") as (server, _):
        assert await server.model() == "m"
        with pytest.raises(Unavailable, match="is no flashsplit server of this version: it tells no status"):
            await server.status()
    async with answering(["{}"], header="content-type: application/json") as (server, _):
        with pytest.raises(Unavailable, match="is no server of OpenAI's API: it names no model"):
            await server.model()


async def test_nobody_there() -> None:
    """How to start a server is part of the sentence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with ClientOptions(url=f"http://127.0.0.1:{port}").connect() as server:
        with pytest.raises(Unavailable, match="no server answers at .*: start one with flashsplit serve") as caught:
            await chunks(server)
    assert caught.value.reason == "SERVER_UNREACHABLE"


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Any) -> None:
    """By the flags that name them."""
    (tmp_path / "a.pem").write_text("none")
    with pytest.raises(InvalidArgument, match="--ssl-ca-certs, --ssl-certfile or --ssl-keyfile cannot be used"):
        ClientOptions(ssl_ca_certs=tmp_path / "a.pem").connect()
