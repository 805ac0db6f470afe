"""The server's end of a session's stream: frames in, frames out, through gRPC or, once agreed, through a lane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from services.errors import InvalidArgument, Unavailable
from services.same_host.frame_socket import BROKEN_S, Lane


class ServerStream:
    """One call. Use `close` when it is over."""

    def __init__(self, context: grpc.aio.ServicerContext, parse: Callable[[bytes], Any]) -> None:
        """parse: a caller's frame from its bytes."""
        self._context, self._parse = context, parse
        self._lane: Lane | None = None

    def use(self, lane: Lane) -> None:
        """From now on frames go through a lane, both ways."""
        self._lane = lane

    async def read(self) -> Any:
        """The next frame, or grpc.aio.EOF. Raises InvalidArgument for bytes that are none."""
        if self._lane is not None and (frame := await self._lane.read()) is not None:
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

    async def write(self, frame: Any) -> None:
        if self._lane is None:
            await self._context.write(frame)
        else:
            # Where the caller is gone, the call's own end says so.
            await self._lane.write(frame.SerializeToString())

    def close(self) -> None:
        """All frames are sent: before the call ends, so that none comes behind its status."""
        if self._lane is not None:
            self._lane.end()
            self._lane.close()
