"""Bytes that are no message, to methods of every shape."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from services.errors import InvalidArgument, Unimplemented, rpc_failures_as_errors
from services.rpc import draft, stage, worker
from services.rpc.draft import DraftServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import WorkerServicer
from tests.services.conftest import Dial, Serve
from tests.services.fakes import FakeDraft, FakeStage, FakeWorker

GARBAGE = b"\xff\xff\xff\xff"


def parse(raw: bytes) -> str:
    return raw.decode("ascii")


async def shout(request: str, context: grpc.aio.ServicerContext) -> str:
    return request.upper()


async def spell(request: str, context: grpc.aio.ServicerContext) -> AsyncIterator[str]:
    for letter in request:
        yield letter
    if request == "stop":
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "stopped")


async def spell_by_writing(request: str, context: grpc.aio.ServicerContext) -> None:
    for letter in request:
        await context.write(letter)


async def count(requests: AsyncIterator[str], context: grpc.aio.ServicerContext) -> str:
    return str(len([request async for request in requests]))


def register(server: grpc.aio.Server) -> str:
    """A service with a method of every shape."""
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "test.Shapes",
                {
                    "Shout": grpc.unary_unary_rpc_method_handler(shout, parse),
                    "Spell": grpc.unary_stream_rpc_method_handler(spell, parse),
                    "Write": grpc.unary_stream_rpc_method_handler(spell_by_writing, parse),
                    "Count": grpc.stream_unary_rpc_method_handler(count, parse),
                    "Raw": grpc.unary_unary_rpc_method_handler(shout),
                },
            )
        ]
    )
    return "test.Shapes"


@pytest.fixture
async def channel(serve: Serve, dial: Dial) -> grpc.aio.Channel:
    server = await serve(
        register,
        WorkerServicer(FakeWorker()).register,
        StageServicer(FakeStage()).register,
        DraftServicer(FakeDraft()).register,
    )
    return await dial(server.address)


async def stream(channel: grpc.aio.Channel, method: str, request: bytes) -> list[bytes]:
    with rpc_failures_as_errors():
        return [response async for response in channel.unary_stream(method)(request)]


@pytest.mark.parametrize(
    "method",
    [
        "/test.Shapes/Shout",
        "/test.Shapes/Spell",
        "/test.Shapes/Write",
        f"/{worker.SERVICE}/Describe",
        f"/{worker.SERVICE}/Load",
        f"/{stage.SERVICE}/RunStage",
        f"/{draft.SERVICE}/RunDraft",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    ],
)
async def test_garbage_is_the_callers_fault(method: str, channel: grpc.aio.Channel) -> None:
    """Bytes that cannot be parsed are INVALID_ARGUMENT by method, whatever the method's shape."""
    with pytest.raises(InvalidArgument, match=f"a request of {method} could not be parsed") as raised:
        await stream(channel, method, GARBAGE)
    assert raised.value.reason == "GARBLED"


async def test_sound_requests_pass(channel: grpc.aio.Channel) -> None:
    """Handlers of every shape see their requests as if nothing stood in between."""
    assert await channel.unary_unary("/test.Shapes/Shout")(b"abc") == b"ABC"
    assert await channel.unary_unary("/test.Shapes/Raw")(GARBAGE) == GARBAGE.upper()
    assert await stream(channel, "/test.Shapes/Spell", b"abc") == [b"a", b"b", b"c"]
    assert await stream(channel, "/test.Shapes/Write", b"ab") == [b"a", b"b"]
    assert await channel.stream_unary("/test.Shapes/Count")(iter([b"a", b"b"])) == b"2"


async def test_a_generators_own_status_passes(channel: grpc.aio.Channel) -> None:
    """A handler that yields and then refuses keeps its own status."""
    with pytest.raises(Unimplemented, match="stopped"):
        await stream(channel, "/test.Shapes/Spell", b"stop")


async def test_unknown_methods_stay_unknown(channel: grpc.aio.Channel) -> None:
    """A method that nobody has is UNIMPLEMENTED as without the interceptor."""
    with pytest.raises(Unimplemented):
        await stream(channel, "/test.Shapes/Nothing", GARBAGE)
