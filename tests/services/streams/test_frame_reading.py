"""Frames read from a stream: those with pieces, and streams that end."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from services.errors import InvalidArgument
from services.messages.frames import FrameReader, TensorLimits
from services.messages.session_frames import STREAM_FRAMES, request_to_messages
from services.messages.steps import Forward, StepKind
from services.messages.tensors import CHUNK_BYTES
from services.streams.frame_reading import read_frame
from tests.services.fakes import prefill, tensor

LARGE = Forward(1, 3, (4,), StepKind.DECODE, activation=tensor(1, CHUNK_BYTES))


class Messages:
    """A stream of these messages."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF


def new_reader() -> FrameReader[Any]:
    return FrameReader(STREAM_FRAMES, TensorLimits(max_tensor_bytes=4 * CHUNK_BYTES))


async def test_frames_come_whole_and_in_order() -> None:
    """One with pieces is one frame; behind the last one there is none, however often one asks."""
    stream = Messages(*request_to_messages(prefill()), *request_to_messages(LARGE), *request_to_messages(prefill(2)))
    reader = new_reader()
    assert await read_frame(stream, reader) == prefill()
    large = await read_frame(stream, reader)
    assert (large.step, bytes(large.activation.data)) == (1, LARGE.activation.data)
    assert await read_frame(stream, reader) == prefill(2)
    assert await read_frame(stream, reader) is None
    assert await read_frame(stream, reader) is None


async def test_a_stream_that_ends_in_the_midst_of_a_frame() -> None:
    """Missing pieces are refused and not taken for the stream's end."""
    first, *_ = request_to_messages(LARGE)
    with pytest.raises(InvalidArgument, match="the pieces of a tensor are missing"):
        await read_frame(Messages(first), new_reader())
