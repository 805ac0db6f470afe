"""What no SDK would send, and a worker that dies: an error in the form of each API, and a server that lives on."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest

from flashsplit.inference.v1 import inference_pb2, inference_pb2_grpc
from tests import forking
from tests.e2e.conftest import children, until
from tests.e2e.server import PAIR, Server, get, serving

CHAT = "/v1/chat/completions"
BODIES = (
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
JSON = {"content-type": "application/json"}
ASK: Any = [{"role": "user", "content": "Calculate 4729 + 3485."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--target-devices", "cpu,cpu", "--client-timeout", 3, "--allowed-hosts", "gpu.example", "--no-resume")
    with serving(tmp_path_factory.mktemp("serve"), *PAIR, *options) as running:
        yield running


def send(
    server: Server,
    method: str,
    path: str,
    body: str | bytes | Iterable[bytes] | None = None,
    headers: dict[str, str] = JSON,
) -> tuple[int, Any]:
    """Status and body, which must be JSON if there is one."""
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        text = reply.read()
        return reply.status, json.loads(text) if text else None
    finally:
        connection.close()


def told(path: str, reply: Any) -> tuple[str, str]:
    """Type and message of an error, in the form of the API that the path belongs to."""
    error = reply["error"]
    if path.startswith("/v1/messages"):
        assert reply["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"type", "message", "param", "code"}
    return error["type"], error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        ("{", JSON, "not JSON"),
        ("", JSON, "empty"),
        ("[]", JSON, "body"),
        ("null", JSON, "body"),
        (b'{"x": "\xff"}', JSON, "not UTF-8"),
        (b'{"x": "\xed\xa0\x80"}', JSON, "not UTF-8"),
        (r'{"x": "\ud800"}', JSON, "surrogate"),
        ('{"x": NaN}', JSON, "NaN"),
        ('{"x": 1e999}', JSON, "1e999"),
        ('{"x": ' + "9" * 5000 + "}", JSON, "not JSON"),
        ("[" * 100_000, JSON, "nested"),
        ("{}", {"content-type": "text/plain"}, "text/plain"),
        ("{}", {}, "content-type is missing"),
    ],
    ids=lambda value: None if not isinstance(value, str | bytes) else str(value)[:20],
)  # fmt: skip
def test_bodies(server: Server, path: str, body: str | bytes, headers: dict[str, str], says: str) -> None:
    status, reply = send(server, "POST", path, body, headers)
    kind, message = told(path, reply)
    assert (status, kind) == (400, "invalid_request_error")
    assert says in message


def test_methods_and_paths(server: Server) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
        for path in BODIES:
            status, reply = send(server, method, path, headers={})
            assert (status, told(path, reply)[0]) == (405, "invalid_request_error"), (method, path)
    assert send(server, "HEAD", CHAT) == (405, None)
    assert send(server, "POST", "/health", "{}")[0] == 405
    for path in (
        "/page",
        "/page/..",
        "/page/no.js",
        "/v1",
        "/v2/chat/completions",
        "/v1/messages/batches",
        "/v1/models/none",
        "/v1/models/%ff",
    ):
        status, reply = send(server, "GET", path, headers={})
        assert (status, told(path, reply)[0]) == (404, "not_found_error"), path


def test_sizes(server: Server) -> None:
    """A body beyond the limit, announced or not; a header that has no end."""
    status, reply = send(server, "POST", CHAT, b" " * (25 << 20))
    assert (status, reply["error"]["code"], reply["error"]["type"]) == (
        413,
        "request_too_large",
        "invalid_request_error",
    )
    status, reply = send(server, "POST", CHAT, iter([b" " * (1 << 20)] * 6))
    assert (status, reply["error"]["code"]) == (413, "request_too_large")
    status, reply = send(server, "POST", "/v1/messages", b"{}", {**JSON, "content-length": str(1 << 40)})
    assert (status, reply["error"]["type"]) == (413, "request_too_large")

    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (100 << 10))
        assert connection.recv(100).split()[1] in (b"400", b"431")
    assert get(f"{server.url}/health")[0] == 200


def test_only_its_own_names(server: Server) -> None:
    """A web site that makes its name mean this address (DNS rebinding) gets nothing, not even the page."""
    for path in ("/", "/health", "/v1/models", "/page/app.js", CHAT):
        status, reply = send(server, "GET", path, headers={"host": "evil.example"})
        assert (status, reply["error"]["code"]) == (403, "host_not_allowed")
        assert "--allowed-hosts evil.example" in reply["error"]["message"]
    for host in ("localhost", "gpu.example:8000", "10.1.2.3"):
        assert send(server, "GET", "/health", headers={"host": host})[0] == 200


def connected(server: Server) -> socket.socket:
    """A connection with a small window, on which what isn't read soon cannot be sent."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def test_a_client_that_never_reads(server: Server) -> None:
    """Its request ends when what was written to it is not taken in time, long before its answer would."""
    body = {"messages": ASK, "stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    content = json.dumps({**body, "max_tokens": 3500}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connected(server) as connection:
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        until(lambda: json.loads(get(f"{server.url}/ready")[1])["running"] == 1, 60)
        until(lambda: json.loads(get(f"{server.url}/ready")[1])["running"] == 0, 120)
        received = 0
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                received += len(piece)
                assert b"[DONE]" not in piece
        assert received < 4 << 20
    assert "http.client_does_not_read" in server.log.read_text()


def test_a_body_that_never_ends(server: Server) -> None:
    """Its client is told that it was too slow."""
    with connected(server) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head.encode() + b'content-length: 100\r\n\r\n{"messages": ')
        reply = b""
        while piece := connection.recv(1 << 16):
            reply += piece
    assert reply.split()[1] == b"408"
    assert b"request_timeout" in reply
    assert b"--client-timeout" in reply


async def test_a_grpc_client_that_never_reads(server: Server) -> None:
    """The same over gRPC, where the client is told when it reads on."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(server.grpc, options=options) as channel:
        request = inference_pb2.GenerateRequest(text="Calculate", logprobs=20)
        request.stopping.max_tokens, request.stopping.ignore_eos = 3500, True
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        await call.read()

        async def running() -> int:
            return int(json.loads((await asyncio.to_thread(get, f"{server.url}/ready"))[1])["running"])

        async with asyncio.timeout(120):
            while await running():
                await asyncio.sleep(0.1)

        async def read_on() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError, match="--client-timeout") as ended:
            await read_on()
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


WORDS = "the quick brown fox jumps over the lazy dog. " * 90_000


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/completions", {"prompt": WORDS}, "maximum context length"),
        ("/v1/completions", {"prompt": "x" * 4_000_000}, "maximum context length"),
        ("/v1/completions", {"prompt": [5] * 1_000_000}, "1000000 in the prompt"),
        (CHAT, {"messages": [{"role": "user", "content": WORDS}]}, "maximum context length"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}, "more than this server reads"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 10_000}, "maximum context length"),
        (CHAT, {"messages": [{}] * 10_000}, "messages.0.role"),
        ("/v1/messages", {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 1}, "prompt is too long"),
        ("/v1/responses", {"input": WORDS}, "maximum context length"),
        ("/tokenize", {"prompt": WORDS}, "maximum context length"),
        ("/detokenize", {"tokens": [5] * 1_000_000}, "at most 131072"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_one_oversized_request(server: Server, path: str, fields: dict[str, Any], says: str) -> None:
    """It is refused with the numbers, and takes little memory: nothing of its size was tokenised or rendered."""
    before = resident_bytes(server)
    status, reply = send(server, "POST", path, json.dumps(fields))
    assert status == 400
    assert says in told(path, reply)[1]
    assert resident_bytes(server) < before + (100 << 20)


def resident_bytes(server: Server) -> int:
    """How much memory the server's own process takes."""
    pages = Path(f"/proc/{forking.forked(server.process.pid)}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"stop": ["x", 5]}, "stop.1"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}},
         "response_format"),
        (CHAT, {"guided_json": '{"enum": [' + "[]," * 500_000 + "1]}"}, "guided_json"),
        (CHAT, {"guided_json": {"enum": [5] * 500_000}}, "guided_json"),
        (CHAT, {"structured_outputs": {"choice": ["ab"] * 500_000}}, "structured_outputs.choice"),
        (CHAT, {"max_tokens": 5000}, "max_tokens"),
        ("/v1/completions", {"prompt": "x " * 5000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "x", "suffix": "y", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [5] * 20_000}, "stop_token_ids"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 2000}, "prompt"),
        ("/v1/completions", {"prompt": {}}, "prompt"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
         "text.format"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [7, 8192]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    asked = {"messages": ASK, **fields} if path == CHAT else fields
    for stream in (False, True):
        status, reply = send(server, "POST", path, json.dumps({**asked, "stream": stream}))
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply
        assert reply["error"]["param"] == param, reply


def read_to_the_end(stream: Iterator[Any]) -> tuple[Any, Exception | None]:
    """Return a stream's last event, and what it was ended by."""
    last = None
    try:
        for event in stream:
            last = event
    except (openai.APIError, anthropic.APIError) as error:
        return last, error
    return last, None


def test_a_worker_dies_under_every_api(server: Server) -> None:
    """Streams of all four APIs end with an error event in its form; no request is taken, and /health answers, until
    another worker has taken the dead one's place."""
    openais = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    long: Any = {"temperature": 1, "stream": True}
    extra: Any = {"ignore_eos": True, "speculate": False}
    with openais, claude:
        chat = openais.chat.completions.create(model="target", messages=ASK, max_tokens=3500, extra_body=extra, **long)
        text = openais.completions.create(model="target", prompt="x", max_tokens=3500, extra_body=extra, **long)
        events = openais.responses.create(model="target", input="x", max_output_tokens=3500, extra_body=extra, **long)
        blocks = claude.messages.create(
            model="target", messages=ASK, max_tokens=3500, stream=True, extra_body={**extra, "temperature": 1}
        )
        streams = [iter(chat), iter(text), iter(events), iter(blocks)]
        for stream in streams:
            next(stream)
        with ThreadPoolExecutor() as readers:
            ends = [readers.submit(read_to_the_end, stream) for stream in streams]
            [_, last] = sorted(children(server.process.pid))
            os.kill(last, signal.SIGKILL)
            # At once: another worker takes the place within a second.
            until(lambda: get(f"{server.url}/ready")[0] == 503, 10)
            began = time.monotonic()
            with pytest.raises(openai.InternalServerError) as late:
                openais.chat.completions.create(model="target", messages=ASK)
            assert late.value.status_code == 503
            assert time.monotonic() - began < 2
            with pytest.raises(openai.InternalServerError):
                openais.completions.create(model="target", prompt="x", stream=True)
            read = [end.result() for end in ends]

    for _, failed in read[:2]:
        assert isinstance(failed, openai.APIError)
        assert failed.type == "server_error"
        assert failed.message.endswith("was killed by SIGKILL")
    event, failed = read[2]
    assert failed is None
    assert event.type == "response.failed"
    assert event.response.error.code == "server_error"
    _, failed = read[3]
    assert isinstance(failed, anthropic.APIStatusError)
    assert failed.body["error"]["type"] in ("overloaded_error", "api_error")  # type: ignore[index]
    assert get(f"{server.url}/health")[0] == 200
    assert get(f"{server.url}/metrics")[0] == 200
    assert '"running":0' in get(f"{server.url}/ready")[1]

    until(lambda: get(f"{server.url}/ready")[0] == 200, 30)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as openais:
        again = openais.chat.completions.create(model="target", messages=ASK)
    assert "8214" in (again.choices[0].message.content or "")
    assert len(children(server.process.pid)) == 2
