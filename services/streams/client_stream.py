"""The client's end of a session's stream: frames out, frames in, and why it ended.

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
from services.same_host.frame_socket import BROKEN_S, Lane

CLOSE_GRACE_S = 1.0
"""How long a client waits for the other side to free a session before it cancels the stream."""

_LANE_END_S = 0.25
_STATUS_WAIT_S = 1.0
_STATUS_POLL_S = 0.002
_STATUS_FORGOTTEN = "Internal error from Core"

_T = TypeVar("_T")


class ClientStream:
    """One bidirectional call. One task may write while another reads.

    where: what errors of this stream say of the place they come from, where the server doesn't say it.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall, **where: object) -> None:
        self.where = where
        self._call = call
        self._closed = False
        # Iterated, because read() gives up unread frames as soon as a write has failed.
        self._frames = aiter(call)
        self._reading = asyncio.Lock()
        self._first_status: grpc.aio.AioRpcError | None = None
        self._lane: Lane | None = None
        self._parse: Callable[[bytes], Any] | None = None
        call.add_done_callback(self._keep_status)

    def use(self, lane: Lane, parse: Callable[[bytes], Any]) -> None:
        """From now on frames go through a lane, both ways; the call stays for its end."""
        self._lane, self._parse = lane, parse
        # The other side ends a lane before its call; where it could not, as when it froze, the call's end is enough.
        loop = asyncio.get_running_loop()
        self._call.add_done_callback(lambda _: loop.call_later(_LANE_END_S, lane.close))

    def uses(self, lane: Lane) -> bool:
        return self._lane is lane

    async def send(self, *frames: Any) -> bool:
        """Write frames; False when the stream is over and read() has the reason."""
        return await self.send_all(frames)

    async def send_all(self, frames: Iterable[Any]) -> bool:
        """As `send`, taking one frame from the iterable when the one before is on its way."""
        if (lane := self._lane) is not None:
            for frame in frames:
                if self._call.done() or not await lane.write(frame.SerializeToString()):
                    return False
            return True
        try:
            for frame in frames:
                await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return False
        return True

    async def read(self) -> Any:
        """The next frame, or grpc.aio.EOF after close() and where the server ended the stream with OK.

        Raises the FlashsplitError with which the server ended it otherwise.
        """
        async with self._reading:
            if self._lane is not None and self._parse is not None:
                try:
                    frame = await self._lane.read()
                except asyncio.CancelledError:
                    # As gRPC does: nobody would read what comes.
                    self.cancel()
                    raise
                if frame is not None:
                    return self._parse(frame)
                if self._lane.broken and not self._closed:
                    await self._end_of_broken()
            try:
                return await anext(self._frames)
            except (StopAsyncIteration, grpc.RpcError):
                pass
            except asyncio.CancelledError:
                # Also what a call cancelled by another task's close() says to the task that reads.
                task = asyncio.current_task()
                if not self._closed or task is None or task.cancelling():
                    raise
        if self._closed:
            return grpc.aio.EOF
        status = await self._final_status()
        if status.code() == grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise from_rpc_error(status, **self.where)

    async def ended(self) -> FlashsplitError:
        """The reason why a stream that took no more frames is over, frames not yet read left aside."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except FlashsplitError as error:
            return error
        return Unavailable(f"{self.where.get('address', 'the worker')} ended the session").located(**self.where)

    async def close(self) -> None:
        """End the stream and give the other side a moment to free the session. Safe to call twice."""
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

    def cancel(self) -> None:
        """End the stream at once."""
        self._closed = True
        self._call.cancel()
        self._leave_lane()

    def _leave_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()

    async def _end_of_broken(self) -> None:
        """Wait until the call is over too. Raises Unavailable where it goes on, and ends it."""
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
        """Called when the call first has a status: a write that fails behind it would overwrite that of the server."""
        if self._first_status is None:
            self._first_status = _status_of(call)


def _status_of(call: grpc.aio.StreamStreamCall) -> grpc.aio.AioRpcError:
    """The status of a call that is done."""
    return grpc.aio.AioRpcError(
        _at_once(call.code()),
        grpc.aio.Metadata(),
        _at_once(call.trailing_metadata()),
        details=_at_once(call.details()),
    )


def _at_once(answer: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the call is not done")
