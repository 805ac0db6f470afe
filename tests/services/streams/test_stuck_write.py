"""A stream to a worker that is lost while a message is handed to a socket that takes no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest

from services.errors import Unavailable
from services.streams.client_stream import ClientStream


class StuckCall:
    """A call whose writes gRPC does not give up, whoever ends the call: they are in the socket's hands."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()
        self.cancelled = False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Nobody hears of this call's end."""

    async def __aiter__(self) -> AsyncIterator[object]:
        raise asyncio.CancelledError
        yield

    async def write(self, message: object) -> None:
        self.writing.set()
        await asyncio.Event().wait()

    def done(self) -> bool:
        return self.cancelled

    def cancel(self) -> None:
        self.cancelled = True


async def test_who_writes_learns_of_the_loss_at_once() -> None:
    """And goes on, with the error that says how the worker was lost; who is cancelled meanwhile stays so."""
    call = StuckCall()
    stream = ClientStream(cast(grpc.aio.StreamStreamCall, call))
    sending = asyncio.create_task(stream.send(b"features"))
    await call.writing.wait()
    stream.fail(Unavailable("the worker is silent"))
    assert await asyncio.wait_for(sending, 10) is False
    assert sending.cancelling() == 0
    with pytest.raises(Unavailable, match="the worker is silent"):
        await stream.read()

    call = StuckCall()
    stream = ClientStream(cast(grpc.aio.StreamStreamCall, call))
    sending = asyncio.create_task(stream.send(b"features"))
    await call.writing.wait()
    stream.fail(Unavailable("the worker is silent"))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(sending, 10)
