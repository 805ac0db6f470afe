"""Typed frames from either end of a stream."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import grpc

from services.errors import InvalidArgument
from services.messages.frames import FrameReader

FrameT = TypeVar("FrameT")


class MessageStream(Protocol):
    """Messages that come one after the other."""

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF behind the last one."""


async def read_frame(stream: MessageStream, reader: FrameReader[FrameT]) -> FrameT | None:
    """Return the stream's next frame with all its tensors, None behind the last one.

    Raises InvalidArgument as `FrameReader.read`, and where the stream ends in the midst of a frame.
    """
    while (message := await stream.read()) is not grpc.aio.EOF:
        if (frame := reader.read(message)) is not None:
            return frame
    if reader.unfinished:
        raise InvalidArgument("the pieces of a tensor are missing: expected a chunk", field="frame")
    return None
