"""The client's end of a stream: messages out, messages in, and why it ended.

grpc.aio alone does not tell that reliably. When a write fails because the server has ended the stream, it forgets the
server's status and the frames not yet read, and reports INTERNAL (https://github.com/grpc/grpc/issues/36066).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc

from services.errors import FlashsplitError, Unavailable, from_rpc_error
from services.same_host.frame_socket import BROKEN_S, FrameLane

CLOSE_GRACE_S = 1.0
"""How long a client waits for the other side to free a session before it cancels the stream, in seconds."""

_LANE_END_S = 0.25
_STATUS_WAIT_S = 1.0
_STATUS_POLL_S = 0.002
_STATUS_FORGOTTEN = "Internal error from Core"

_T = TypeVar("_T")


class ClientStream:
    """One call, whose messages may go through a lane. One task may write while another reads.

    where: the place that errors of this stream name (stage, address, ...), where the server doesn't name it.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall | grpc.aio.UnaryStreamCall, **where: object) -> None:
        self.where = where
        self._call = call
        self._closed = False
        self._failure: FlashsplitError | None = None
        # Iterated, because read() gives up unread frames as soon as a write has failed.
        self._frames = aiter(call)
        self._reading = asyncio.Lock()
        self._writer: asyncio.Task[Any] | None = None
        """The task that waits until gRPC has taken a message."""
        self._interrupted = False
        self._first_status: grpc.aio.AioRpcError | None = None
        self._lane: FrameLane | None = None
        self._parse: Callable[[bytes], Any] | None = None
        call.add_done_callback(self._keep_status)

    def use_lane(self, lane: FrameLane, parse: Callable[[bytes], Any]) -> None:
        """Let messages go through a lane from now on, both ways; the call stays, for the stream's end.

        parse: makes an answer of its bytes.
        """
        self._lane, self._parse = lane, parse
        # The other side ends a lane before its call; where it could not, as when it froze, the call's end is enough.
        loop = asyncio.get_running_loop()
        self._call.add_done_callback(lambda _: loop.call_later(_LANE_END_S, lane.close))

    def uses_lane(self, lane: FrameLane) -> bool:
        """Return whether messages go through this lane."""
        return self._lane is lane

    async def send(self, *messages: Any) -> bool:
        """Write messages; return False when the stream is over and read() has the reason."""
        return await self.send_all(messages)

    async def send_all(self, messages: Iterable[Any]) -> bool:
        """Write messages as `send` does, and ask for each only when the one before is on its way."""
        if (lane := self._lane) is not None:
            for message in messages:
                if self._call.done() or not await lane.write(message.SerializeToString()):
                    return False
            return True
        self._writer = writer = asyncio.current_task()
        try:
            for message in messages:
                await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return False
        except asyncio.CancelledError:
            if self._interrupted and writer is not None:
                writer.uncancel()
            # Also what a call that `fail` ended says to the task that writes.
            if self._failure is None or _is_cancelled():
                raise
            return False
        finally:
            self._writer = None
        return True

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF after close() and where the server ended the stream with OK.

        Raises the FlashsplitError with which the server ended it otherwise.
        """
        async with self._reading:
            if self._lane is not None and self._parse is not None:
                try:
                    frame = await self._lane.read()
                except asyncio.CancelledError:
                    # gRPC does the same with a call whose reader is cancelled: nobody would read what comes.
                    self.cancel()
                    raise
                if isinstance(frame, bytes):
                    return self._parse(frame)
                if frame is not None:
                    return frame
                if self._lane.broken and not self._closed:
                    await self._end_of_broken()
            try:
                return await anext(self._frames)
            except (StopAsyncIteration, grpc.RpcError):
                pass
            except asyncio.CancelledError:
                # Also what a call cancelled by another task's close() says to the task that reads.
                if not self._closed or _is_cancelled():
                    raise
        if self._failure is not None:
            raise self._failure
        if self._closed:
            return grpc.aio.EOF
        status = await self._final_status()
        if status.code() == grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise from_rpc_error(status, **self.where)

    def hand_over(self, message: object) -> None:
        """Have `read` return a message that came another way, behind those that came before; with a lane only."""
        assert self._lane is not None
        self._lane.put(message)

    async def ended(self) -> FlashsplitError:
        """Return the reason why a stream that took no more messages is over; messages not yet read are passed over."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except FlashsplitError as error:
            return error
        return Unavailable(f"{self.where.get('address', 'the worker')} ended the session").located(**self.where)

    async def close(self) -> None:
        """End the stream, and give the other side CLOSE_GRACE_S to free the session. Safe to call twice."""
        if self._call.done():
            self._leave_lane()
            return
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                if self._lane is not None:
                    self._lane.end()
                await self._call.done_writing()
                while await self.read() is not grpc.aio.EOF:
                    pass
        except (TimeoutError, FlashsplitError, grpc.aio.BaseError):
            pass
        finally:
            self.cancel()

    def fail(self, error: FlashsplitError) -> None:
        """End the stream at once; `read` raises this error then, unless the stream was over."""
        if not self._closed and not self._call.done():
            self._failure = error.copied().located(**self.where)
            self.cancel()
            if self._writer is not None:
                # What has been handed to the socket of a link that passes nothing stays under way though the call ends.
                self._interrupted = True
                self._writer.cancel()

    def cancel(self) -> None:
        """End the stream at once."""
        self._closed = True
        self._call.cancel()
        self._leave_lane()

    def _leave_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()

    async def _end_of_broken(self) -> None:
        """Wait until the call is over too. Raises Unavailable where it goes on, after ending it."""
        try:
            async with asyncio.timeout(BROKEN_S):
                await self._call.code()
        except (TimeoutError, grpc.aio.BaseError):
            if not self._call.done():
                self.cancel()
                raise Unavailable("the socket for the session's frames broke", reason="LANE_BROKEN").located(
                    **self.where
                ) from None

    async def _final_status(self) -> grpc.aio.AioRpcError:
        await self._call.code()
        status = self._first_status or _status_of(self._call)
        # A write may have failed before the server's status was there: that comes in a moment.
        deadline = time.monotonic() + _STATUS_WAIT_S
        while status.details() == _STATUS_FORGOTTEN and time.monotonic() < deadline:
            await asyncio.sleep(_STATUS_POLL_S)
            status = _status_of(self._call)
        return status

    def _keep_status(self, call: grpc.aio.StreamStreamCall) -> None:
        """Keep the call's first status: a write that fails later would overwrite what the server said."""
        if self._first_status is None:
            self._first_status = _status_of(call)


Guard = Callable[[ClientStream], None]
"""Sees to it that a stream ends when the worker at its other end is known to be lost."""


def unguarded(_: ClientStream) -> None:
    """Leave a stream to itself: gRPC alone notices that nobody is there."""


def _is_cancelled() -> bool:
    """Return whether somebody has cancelled the task that runs."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


def _status_of(call: grpc.aio.StreamStreamCall) -> grpc.aio.AioRpcError:
    """Return the status of a call that is done."""
    return grpc.aio.AioRpcError(
        _result_of(call.code()),
        grpc.aio.Metadata(),
        _result_of(call.trailing_metadata()),
        details=_result_of(call.details()),
    )


def _result_of(answer: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the call is not done")
