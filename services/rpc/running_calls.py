"""Calls that run under a name that their clients know: no two alike at once, and each can be ended from outside.

Owns nothing but the names; a call's work is cancelled in its own task and cleans up as it does when its client goes.
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

_NAME = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class _Call:
    task: asyncio.Task[object]
    ended_by: FlashsplitError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RunningCalls:
    """The calls of one servicer."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    @contextlib.asynccontextmanager
    async def named(self, request_id: str) -> AsyncIterator[None]:
        """Run the block under a name. Raises AlreadyExists for one that runs, and what `end` was given."""
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
            # The client may have gone as well: then there is nobody to tell.
            if call.ended_by is None or task.uncancel() > cancelling:
                raise
            raise call.ended_by from None
        finally:
            del self._calls[request_id]
            call.over.set()

    async def end(self, request_id: str, error: FlashsplitError) -> None:
        """End a call with an error; returns when nothing is left of it. Raises NotFound."""
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
        """End whatever runs."""
        await asyncio.gather(*(self.end(request_id, error) for request_id in self._calls))


def request_id_of(context: grpc.aio.ServicerContext) -> str:
    """The name that the client gave, or a new one. Raises InvalidArgument for one that cannot stand in a log line."""
    names = [value for key, value in context.invocation_metadata() or () if key == HEADER]
    if not names:
        return secrets.token_hex(12)
    if len(names) > 1 or _NAME.fullmatch(str(names[0])) is None:
        raise InvalidArgument(
            f"{HEADER} must be one name of 1 to 128 visible ASCII characters without blanks", field=HEADER
        )
    return str(names[0])


def traceparents_of(context: grpc.aio.ServicerContext) -> list[str]:
    """What the client sent of W3C's header; whether it is one, `services.telemetry.trace_context` knows."""
    return [str(value) for key, value in context.invocation_metadata() or () if key == trace_context.HEADER]


@contextlib.asynccontextmanager
async def within_deadline(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """The block has the time that the client gave, on this host's clock. Raises DeadlineExceeded."""
    seconds = context.time_remaining()
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the answer was not done within the call's {seconds:.3g} s") from error
