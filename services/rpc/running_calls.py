"""Calls that run under a request id that their clients know: no two have the same at once, each can be ended by it.

Owns nothing but the ids; a call's work is cancelled in its own task and cleans up as when its client goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from services.errors import AlreadyExists, DeadlineExceeded, FlashsplitError, InvalidArgument, NotFound
from services.telemetry import trace_context

HEADER = "x-request-id"
"""The metadata in which clients give the id."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class _Call:
    task: asyncio.Task[object]
    ended_by: FlashsplitError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RunningCalls:
    """The calls of one servicer that run now."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    @contextlib.asynccontextmanager
    async def named(self, request_id: str) -> AsyncIterator[None]:
        """Run the block under an id. Raises AlreadyExists for one in use, and the error that `end` was given."""
        if request_id in self._calls:
            raise AlreadyExists(
                f"a request {request_id} runs already: give each its own {HEADER}, or none",
                reason="DUPLICATE_REQUEST",
                field=HEADER,
            )
        task = asyncio.current_task()
        assert task is not None
        call = self._calls[request_id] = _Call(task)
        cancelling = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            # Where the client has gone as well, there is nobody to send an error to.
            if call.ended_by is None or task.uncancel() > cancelling:
                raise
            raise call.ended_by from None
        finally:
            del self._calls[request_id]
            call.over.set()

    async def end(self, request_id: str, error: FlashsplitError) -> None:
        """End a call with an error and wait until it is over. Raises NotFound where no call has this id."""
        call = self._calls.get(request_id)
        if call is None:
            raise NotFound(
                f"no request {request_id[:128]!r} waits or runs here", reason="REQUEST_NOT_FOUND", field="request_id"
            )
        if call.ended_by is None:
            call.ended_by = error
            call.task.cancel()
        await call.over.wait()

    async def end_all(self, error: FlashsplitError) -> None:
        """End all calls with an error."""
        await asyncio.gather(*(self.end(request_id, error) for request_id in self._calls))


def request_id_of(context: grpc.aio.ServicerContext) -> str:
    """Return the id that the client gave, or a new one. Raises InvalidArgument for one that no log line could hold."""
    values = [value for key, value in context.invocation_metadata() or () if key == HEADER]
    if not values:
        return secrets.token_hex(12)
    if len(values) > 1 or _REQUEST_ID.fullmatch(str(values[0])) is None:
        raise InvalidArgument(
            f"{HEADER} must be one name of 1 to 128 visible ASCII characters without blanks", field=HEADER
        )
    return str(values[0])


def traceparents_of(context: grpc.aio.ServicerContext) -> list[str]:
    """Return the values of W3C's traceparent header, unchecked; `services.telemetry.trace_context` parses them."""
    return [str(value) for key, value in context.invocation_metadata() or () if key == trace_context.HEADER]


@contextlib.asynccontextmanager
async def within_deadline(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Give the block the time that the client allowed, by this host's clock. Raises DeadlineExceeded after it."""
    seconds = context.time_remaining()
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the answer was not done within the call's {seconds:.3g} s") from error
