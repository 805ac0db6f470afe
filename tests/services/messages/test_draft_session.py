"""Frames of a draft session, to protobuf and back."""

from __future__ import annotations

import pytest

from flashsplit.shard.v1 import draft_pb2, draft_service_pb2 as pb
from services.errors import InvalidArgument
from services.messages.draft_session import (
    DRAFT_FRAMES,
    PART_FRAMES,
    PROPOSED_FRAMES,
    DraftAnswer,
    DraftRequest,
    OpenDraft,
    Propose,
    answer_to_messages,
    open_from_message,
    open_to_message,
    part_to_response,
    request_to_messages,
)
from services.messages.frames import FrameReader, TensorLimits
from services.messages.steps import FeatureSlice, SnapshotRestore, SnapshotSave
from services.telemetry.trace_context import Trace
from tests.services.fakes import PARTS, tensor

LIMITS = TensorLimits(max_tensor_bytes=1024)


@pytest.mark.parametrize(
    "opening",
    [
        OpenDraft("", "", 0),
        OpenDraft("r", "f", 2**32 - 1, Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)),
    ],
)
def test_open_round_trip(opening: OpenDraft) -> None:
    """Every field survives the wire; no trace stays none."""
    raw = open_to_message(opening).SerializeToString()
    assert open_from_message(draft_pb2.DraftOpen.FromString(raw)) == opening


@pytest.mark.parametrize(
    "request_",
    [
        FeatureSlice(4, tensor(2, 8, dtype="float32")),
        FeatureSlice(4, tensor(2, 8), 0),
        Propose(2**64 - 1, 2**32 - 1, 7, 15),
        Propose(1, 2, 3, 4, tensor(2, 8)),
        SnapshotSave("a", 1, "b"),
        SnapshotRestore("a", 2, (1, 2)),
    ],
)
def test_requests_round_trip(request_: DraftRequest) -> None:
    """A small frame is one message, and comes back."""
    [message] = request_to_messages(request_)
    message = pb.RunDraftRequest.FromString(message.SerializeToString())
    assert FrameReader(DRAFT_FRAMES, LIMITS).read(message) == request_


@pytest.mark.parametrize("answer", [(), (1, 2**32 - 1), tensor(3, 8)])
def test_answers_round_trip(answer: DraftAnswer) -> None:
    """Draft tokens and hidden rows come back as what they are; neither is taken for the answer to a snapshot."""
    [message] = answer_to_messages(5, answer)
    message = pb.RunDraftResponse.FromString(message.SerializeToString())
    assert message.proposed.step == 5
    assert FrameReader(PROPOSED_FRAMES, LIMITS).read(message) == answer
    with pytest.raises(InvalidArgument, match="frame proposed is not expected here"):
        FrameReader(PART_FRAMES).read(message)


def test_snapshot_parts_round_trip() -> None:
    """What a draft did with a snapshot comes back with every field."""
    for part in PARTS:
        message = pb.RunDraftResponse.FromString(part_to_response(part).SerializeToString())
        assert FrameReader(PART_FRAMES).read(message) == part
