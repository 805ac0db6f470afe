"""The server's end of a stream: messages in, messages out, through gRPC or, once agreed, through a lane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from services.errors import InvalidArgument, Unavailable
from services.same_host.frame_socket import BROKEN_S, FrameLane


class ServerStream:
    """One bidirectional call. Use `close` when it is over."""

    def __init__(self, context: grpc.aio.ServicerContext, parse: Callable[[bytes], Any]) -> None:
        """parse: makes a caller's message of its bytes."""
        self._context, self._parse = context, parse
        self._lane: FrameLane | None = None

    def use_lane(self, lane: FrameLane) -> None:
        """Let messages go through a lane from now on, both ways."""
        self._lane = lane

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF behind the last one.

        Raises InvalidArgument for bytes that are none, Unavailable where the lane's socket broke and the call goes on.
        """
        if self._lane is not None and isinstance(frame := await self._lane.read(), bytes):
            try:
                return self._parse(frame)
            except Exception as error:
                raise InvalidArgument("a frame could not be parsed", reason="GARBLED") from error
        if self._lane is None or not self._lane.broken:
            return await self._context.read()
        try:
            async with asyncio.timeout(BROKEN_S):
                return await self._context.read()
        except TimeoutError:
            raise Unavailable("the socket for the session's frames broke", reason="LANE_BROKEN") from None

    async def write(self, message: Any) -> None:
        """Send a message; where the caller is gone it is dropped, and the call's own end says so."""
        if self._lane is None:
            await self._context.write(message)
        else:
            await self._lane.write(message.SerializeToString())

    def write_now(self, make: Callable[[], Any]) -> bool:
        """Send the message that `make` returns, where nothing needs to be waited for; return whether that was so."""
        if self._lane is None or not self._lane.has_room:
            return False
        self._lane.write_now(make().SerializeToString())
        return True

    def close(self) -> None:
        """End the lane. Comes before the call ends, so that no message arrives behind its status."""
        if self._lane is not None:
            self._lane.end()
            self._lane.close()
