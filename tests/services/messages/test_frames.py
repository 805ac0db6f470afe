"""Typed frames from messages: tensors that come in pieces, and frames that a stream may not carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsplit.shard.v1 import stage_service_pb2 as pb
from services.errors import InvalidArgument
from services.messages.frames import FrameReader, TensorLimits
from services.messages.session_frames import STREAM_FRAMES, request_to_messages
from services.messages.steps import FeatureSlice, Forward, SnapshotSave, StepKind
from services.messages.tensors import CHUNK_BYTES
from tests.services.fakes import same_bytes, tensor

LIMITS = TensorLimits(max_tensor_bytes=8 * CHUNK_BYTES, max_feature_slices=1)
SMALL = Forward(1, 0, (7,), StepKind.DECODE)
LARGE = Forward(
    0,
    0,
    (1, 2),
    StepKind.PREFILL,
    activation=tensor(2, CHUNK_BYTES),
    features=(FeatureSlice(0, tensor(2, CHUNK_BYTES // 2, dtype="float32")),),
)


def reader() -> FrameReader[Forward | SnapshotSave]:
    """A reader of what a stage's caller sends."""
    return FrameReader(STREAM_FRAMES, LIMITS)


def test_a_frame_is_there_with_its_last_piece() -> None:
    """Its tensors are put together from all pieces; the frame behind it is read as ever."""
    frames = reader()
    *pieces, last = request_to_messages(LARGE)
    assert len(pieces) > 3
    for message in pieces:
        assert frames.read(message) is None
        assert frames.unfinished
    frame = frames.read(last)
    assert not frames.unfinished
    assert isinstance(frame, Forward)
    assert LARGE.activation is not None
    assert frame.activation is not None
    assert same_bytes(frame.activation, LARGE.activation)
    assert same_bytes(frame.features[0].features, LARGE.features[0].features)
    assert replace(frame, activation=None, features=()) == replace(LARGE, activation=None, features=())
    [small] = request_to_messages(SMALL)
    assert frames.read(small) == SMALL


def test_pieces_come_before_anything_else() -> None:
    """A frame between two pieces of another one is refused."""
    frames = reader()
    frames.read(next(request_to_messages(LARGE)))
    with pytest.raises(InvalidArgument, match="the pieces of a tensor are missing: expected a chunk"):
        frames.read(next(request_to_messages(SMALL)))


def test_a_piece_of_nothing_is_refused() -> None:
    """A chunk has to belong to the frame before it."""
    [_, chunk, *_] = request_to_messages(LARGE)
    with pytest.raises(InvalidArgument, match="frame chunk is not expected here"):
        reader().read(chunk)


@pytest.mark.parametrize("message", [pb.RunStageRequest(), pb.RunStageRequest(open={"request_id": "r"})])
def test_frames_that_a_stream_may_not_carry_are_refused(message: pb.RunStageRequest) -> None:
    """A message without a frame, and one with a frame that has no place here, are refused by the frame's name."""
    with pytest.raises(InvalidArgument, match=f"frame {message.WhichOneof('frame')} is not expected here") as refused:
        reader().read(message)
    assert refused.value.where["field"] == "frame"


def test_tensors_beyond_the_limit_are_refused() -> None:
    """The announced size counts, before any piece of it has come."""
    frames = FrameReader(STREAM_FRAMES, replace(LIMITS, max_tensor_bytes=CHUNK_BYTES))
    with pytest.raises(InvalidArgument, match="more than the 1048576 accepted here"):
        frames.read(next(request_to_messages(LARGE)))
