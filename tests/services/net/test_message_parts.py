"""Messages of very many parts: they are counted without being parsed, and refused by a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from flashsplit.inference.v1 import generation_pb2, inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from services.errors import InvalidArgument, rpc_failures_as_errors
from services.net.client_server import ClientServer
from services.net.message_parts import MAX_PARTS, check_parts
from services.rpc.inference import SERVICE, InferenceServicer
from tests.coordinator.text.other_threads import turns_of_another_thread
from tests.services.fake_inference import FakeInference

MANY = 1_000_000


def field(number: int, value: bytes) -> bytes:
    """A field of bytes, as protobuf writes it."""
    size, length = len(value), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


MESSAGES = field(1, field(1, b"") * MANY)
STOPS = field(4, field(2, b"") * MANY)
UNPACKED_IDS = field(2, b"\x08\x05" * MANY)
VARIABLES = field(1, field(3, field(1, field(1, b"a") + field(2, field(6, field(1, b"") * MANY)))))


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (pb.GenerateRequest(), 0),
        (pb.GenerateRequest(text="x" * 1000, model="m", speculate=False), 3),
        (pb.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=range(MANY))), 2),
        (pb.ChatRequest(conversation={"messages": [{"role": "user", "content": "x"}, {"role": "tool"}]}), 6),
        (pb.GenerateRequest(sampling={"temperature": 0.5, "seed": 2**64 - 1, "logit_bias": {5: -1.0}}), 6),
        (pb.GenerateRequest(sampling={"bad_token_sequences": [{"ids": range(9)}]}, stopping={"stop": ["", ""]}), 6),
        (generation_pb2.PromptToken(token_id=5, logprobs={"logprob": -1.0, "top_token_ids": [5], "rank": 1}), 5),
    ],
)
def test_parts(message: Any, parts: int) -> None:
    """As many as a message has pass, and one fewer allowed does not; numbers of a list are one."""
    check_parts(message.SerializeToString(), message.DESCRIPTOR, parts)
    if parts:
        with pytest.raises(InvalidArgument, match=f"more than {parts - 1} fields"):
            check_parts(message.SerializeToString(), message.DESCRIPTOR, parts - 1)


@pytest.mark.parametrize("raw", [b"\xff" * 100_000, b"\x0a\xff\xff\xff\xff\x07x", b"\x0a", field(1, b"\x0a\x09")])
def test_what_is_no_message_is_left_to_the_parser(raw: bytes) -> None:
    """The reading ends where the parser's does."""
    check_parts(raw, pb.ChatRequest.DESCRIPTOR)
    with pytest.raises(DecodeError):
        pb.ChatRequest.FromString(raw)


def test_other_threads_run_while_parts_are_counted() -> None:
    """The parser would give another thread no turn."""

    def check() -> None:
        with pytest.raises(InvalidArgument):
            check_parts(MESSAGES, pb.ChatRequest.DESCRIPTOR)

    assert turns_of_another_thread(check) > 2


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = ClientServer("127.0.0.1", 0, lambda *_: None)
    server.listen()
    await server.start([InferenceServicer(FakeInference()).register])
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel
    await server.stop(0)


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("Chat", MESSAGES),
        ("Chat", VARIABLES),
        ("Generate", STOPS),
        ("Generate", UNPACKED_IDS),
        ("Tokenize", field(2, field(1, b"") * MANY)),
        ("Detokenize", b"\x08\x05" * MANY),
        ("Abort", b"\xa0\x06\x01" * MANY),
    ],
)
async def test_too_many_parts_are_refused(channel: grpc.aio.Channel, method: str, raw: bytes) -> None:
    """By the server for clients, whatever the method; the connection lives on."""
    with pytest.raises(InvalidArgument, match=f"more than {MAX_PARTS} fields"), rpc_failures_as_errors():
        # A refusal is the same for a call with one answer as for one with several.
        await channel.unary_stream(f"/{SERVICE}/{method}")(raw).read()
    stub = pb_grpc.InferenceServiceStub(channel)
    assert [response async for response in stub.Generate(pb.GenerateRequest(text="x" * 100_000))]
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=range(100_000)))).text
