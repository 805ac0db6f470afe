"""Frames of a stage's session, to protobuf and back, and what is refused before the engine sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashsplit.shard.v1 import draft_pb2, failure_pb2, snapshot_pb2, stage_pb2, stage_service_pb2 as pb
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.frames import FrameKinds, FrameReader, TensorLimits
from services.messages.sampling import SamplingParams
from services.messages.session_frames import (
    EVENT_FRAMES,
    LANE_FRAMES,
    STREAM_FRAMES,
    event_to_message,
    location_from_message,
    location_to_message,
    open_from_message,
    open_to_message,
    opened_from_message,
    opened_to_message,
    part_from_message,
    part_to_message,
    request_to_messages,
    restore_from_message,
    save_from_message,
    trace_from_message,
)
from services.messages.steps import (
    Commit,
    DraftRoute,
    Event,
    Failure,
    FailureReason,
    FeatureSlice,
    Forward,
    ForwardWithoutFeatures,
    Location,
    OpenSession,
    Proposal,
    SessionRequest,
    SessionRest,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageIdentity,
    StageTiming,
    StepFeatures,
    StepKind,
    StepLimit,
)
from services.telemetry.trace_context import Trace
from tests.services.fakes import OPEN, PARTS, tensor

HERE = Location(2, "alpha", "cuda:0", "h:1")
REST = SessionRest("0123456789abcdef", 120_000, (5, 0, 7), 3)


@pytest.mark.parametrize(
    "request_",
    [
        OPEN,
        replace(OPEN, draft=DraftRoute()),
        replace(OPEN, draft=DraftRoute("h:7")),
        replace(OPEN, route=(), sampling=SamplingParams(), stop_token_ids=frozenset()),
        replace(OPEN, stage=0, max_length=2**32 - 1, request_id="ü" * 100),
        replace(OPEN, trace=Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)),
        replace(OPEN, rest=REST),
        replace(OPEN, rest=SessionRest("0123456789abcdef" * 4, 1)),
    ],
)
def test_open_round_trip(request_: OpenSession) -> None:
    """Every field of Open survives the wire; absent and zero stay different."""
    raw = open_to_message(request_).SerializeToString()
    assert open_from_message(stage_pb2.Open.FromString(raw)) == request_


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"session_id": "short"}, "session_id has 5 characters; it must be 16 to 64"),
        ({"session_id": "a" * 65}, "session_id has 65 characters"),
        ({"session_id": "\n" * 20}, "all of them printable"),
        ({"rest_ms": 0}, "rest_ms is 0; it must be between 1 and 3600000"),
        ({"rest_ms": 3_600_001}, "rest_ms is 3600001"),
    ],
)
def test_a_rest_that_makes_no_sense_is_refused(fields: dict[str, Any], text: str) -> None:
    message = open_to_message(replace(OPEN, rest=replace(REST, **fields)))
    with pytest.raises(InvalidArgument, match=text):
        open_from_message(message)


def test_zero_penalties_are_not_absent() -> None:
    """A processor set to 0 is not one that is switched off."""
    sampling = SamplingParams(presence_penalty=0.0, frequency_penalty=0.0, min_p=0.0)
    message = open_to_message(replace(OPEN, sampling=sampling))
    assert open_from_message(message).sampling == sampling


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": -0.5}, "temperature is -0.5; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -1.0}, "min_p is -1.0; it must be between 0 and 1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be from 0.001 to 1000"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"repetition_penalty": 1024.0}, "repetition_penalty is 1024.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf; it must be from -1e+06 to 1e+06"),
        ({"presence_penalty": -(2.0**20)}, "presence_penalty is -1048576.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan; it must be from -1e+06 to 1e+06"),
        ({"logit_bias": {2: 1.0, 3: float("-inf")}}, "logit_bias[3] is -inf; it must be from -1e+06 to 1e+06"),
        ({"logit_bias": {3: 2.0**20}}, "logit_bias[3] is 1048576.0"),
    ],
)
def test_senseless_sampling_is_refused(fields: dict[str, Any], text: str) -> None:
    """Each number is refused with its name, its value and what would be accepted."""
    message = open_to_message(replace(OPEN, sampling=SamplingParams(**fields)))
    with pytest.raises(InvalidArgument) as refused:
        open_from_message(message)
    assert refused.value.message.startswith(text)


@pytest.mark.parametrize("text", ["", "x", "00-0af7651916cd43dd8448eb211c80319c", "0" * 70_000])
def test_senseless_traces_are_refused(text: str) -> None:
    """Only what has the form of W3C's header goes down the chain and to the draft."""
    for message in (stage_pb2.Open(traceparent=text), draft_pb2.DraftOpen(traceparent=text)):
        with pytest.raises(InvalidArgument, match="traceparent is") as refused:
            trace_from_message(message)
        assert len(refused.value.message) < 300


@pytest.mark.parametrize("name", ["a\nb", "\0", "x" * 257])
def test_names_that_cannot_stand_in_a_log_line_are_refused(name: str) -> None:
    """Whatever their length."""
    with pytest.raises(InvalidArgument, match=f"request_id has {len(name)} characters"):
        open_from_message(open_to_message(replace(OPEN, request_id=name)))


def test_senseless_routes_are_refused() -> None:
    """Endless chains, empty layer ranges and texts that are no addresses are refused by field."""
    message = open_to_message(replace(OPEN, stage=2**32 - 1))
    with pytest.raises(InvalidArgument, match="stage is 4294967295 with 1 behind it"):
        open_from_message(message)
    message = open_to_message(replace(OPEN, route=OPEN.route * 1023))
    with pytest.raises(InvalidArgument, match="stage is 1 with 1023 behind it"):
        open_from_message(message)
    message = open_to_message(OPEN)
    message.layers.last = 0
    with pytest.raises(InvalidArgument, match="layers is"):
        open_from_message(message)
    message = open_to_message(OPEN)
    message.route[0].address = "nowhere"
    with pytest.raises(InvalidArgument, match="route.address 'nowhere'"):
        open_from_message(message)
    message = open_to_message(OPEN)
    message.draft.address = ""
    with pytest.raises(InvalidArgument, match="draft.address"):
        open_from_message(message)


LIMITS = TensorLimits(max_tensor_bytes=1024, max_feature_slices=2)
FEATURES = (FeatureSlice(4, tensor(2, 8, dtype="float32")), FeatureSlice(4, tensor(2, 8), 0))


def through(kinds: FrameKinds[Any], frame: SessionRequest) -> Any:
    """Send a frame that is one message, and read it as one that may carry these frames."""
    [message] = request_to_messages(frame)
    return FrameReader(kinds, LIMITS).read(pb.RunStageRequest.FromString(message.SerializeToString()))


@pytest.mark.parametrize("kinds", [STREAM_FRAMES, LANE_FRAMES])
@pytest.mark.parametrize(
    "forward",
    [
        Forward(2**64 - 1, 2**32 - 1, (0, 2**32 - 1), StepKind.VERIFY, 15),
        Forward(0, 0, (), StepKind.PREFILL),
        Forward(0, 9, (), StepKind.RESUME, 7),
        Forward(4, 9, (1,), StepKind.DECODE, 7, more=2**32 - 1),
        Forward(3, 4, (7, 8), StepKind.DECODE, 0, tensor(2, 8), FEATURES, more=5),
        Forward(2, 9, (7, 8), StepKind.VERIFY, 15, least_accepted=2**32 - 1),
        Forward(2, 9, (7, 8), StepKind.VERIFY, 15, tensor(2, 8), least_accepted=3),
        Forward(0, 4, (), StepKind.RESUME, 3, tensor(0, 8)),
    ],
)
def test_steps_round_trip(kinds: FrameKinds[Any], forward: Forward) -> None:
    """A small step is one message, from tokens and with an activation, and comes back by either way."""
    assert through(kinds, forward) == forward


def test_a_step_and_its_features_apart_round_trip() -> None:
    """In a step lane both come back as what they are; a stream carries no features apart, and no step without any."""
    forward = Forward(3, 4, (7, 8), StepKind.DECODE, 0, tensor(2, 8), FEATURES, more=5)
    without = replace(forward, features=())
    assert through(LANE_FRAMES, ForwardWithoutFeatures(forward)) == ForwardWithoutFeatures(without)
    assert through(LANE_FRAMES, StepFeatures(3, FEATURES)) == StepFeatures(3, FEATURES)
    assert through(STREAM_FRAMES, ForwardWithoutFeatures(forward)) == without
    with pytest.raises(InvalidArgument, match="frame step_features is not expected here"):
        through(STREAM_FRAMES, StepFeatures(3, FEATURES))


def test_a_step_limit_round_trips() -> None:
    """It goes down a stream, and no step lane carries it."""
    for limit in (StepLimit(0), StepLimit(2**64 - 1, 15)):
        assert through(STREAM_FRAMES, limit) == limit
    with pytest.raises(InvalidArgument, match="frame step_limit is not expected here"):
        through(LANE_FRAMES, StepLimit(0))


@pytest.mark.parametrize(
    "request_",
    [
        SnapshotSave("a", 1),
        SnapshotSave("~" * 128, 2**32 - 1, "parent of it"),
        SnapshotSave("a", 0, "a"),
        SnapshotRestore("a", 0),
        SnapshotRestore("b", 4, (0, 2**32 - 1, 7, 7)),
    ],
)
def test_snapshot_requests_round_trip(request_: SnapshotSave | SnapshotRestore) -> None:
    """Every field survives the wire, no parent stays none; a step lane does not carry them."""
    assert through(STREAM_FRAMES, request_) == request_
    with pytest.raises(InvalidArgument, match="frame snapshot_.* is not expected here"):
        through(LANE_FRAMES, request_)


def test_surplus_slices_are_refused() -> None:
    """More feature slices than the stage captures blocks are refused before their sizes matter."""
    message = stage_pb2.ForwardFromActivation(features=[stage_pb2.FeatureSlice()] * 3)
    with pytest.raises(InvalidArgument, match="the frame has 3 feature slices, at most 2 are expected"):
        FrameReader(STREAM_FRAMES, LIMITS).read(pb.RunStageRequest(forward_from_activation=message))


@pytest.mark.parametrize("kind", [0, 5, -1])
def test_unknown_kinds_are_refused(kind: int) -> None:
    """A step of an unknown kind is refused, naming those that are known."""
    known = r"1 \(prefill\), 2 \(decode\), 3 \(verify\), 4 \(resume\)"
    with pytest.raises(InvalidArgument, match=rf"kind is {kind}, not one of {known}"):
        FrameReader(STREAM_FRAMES).read(pb.RunStageRequest(forward_from_tokens=stage_pb2.ForwardFromTokens(kind=kind)))


@pytest.mark.parametrize(
    "event",
    [
        Commit(2**64 - 1, 9, (1, 2), (StageTiming(1, 2, 3), StageTiming(4, 5, 2**64 - 1))),
        Commit(0, 0, (), ()),
        Commit(3, 9, (1,), (), more=7),
        Commit(3, 9, (1,), (), followed=True),
        Commit(3, 9, (1,), (), propose_tokens=15, batch_sessions=8, batch_rows=23, batch_proposing=2),
        Proposal(5, (7, 8, 9), 10),
        Proposal(5, (), 0, followed=True),
        *(Failure(reason, "a sentence", HERE, "UNAVAILABLE") for reason in FailureReason),
        Failure(FailureReason.DRAFT_LOST, "", Location(None, "", "", ""), ""),
        SnapshotSaved("a", 2**32 - 1, PARTS),
        SnapshotSaved("", 0, ()),
        SnapshotRestored("a", 7, PARTS),
        SnapshotRestored("", 0, ()),
    ],
)
def test_events_round_trip(event: Event) -> None:
    """Every answer survives the wire; stage 0 and no stage stay different."""
    raw = event_to_message(event).SerializeToString()
    assert FrameReader(EVENT_FRAMES).read(pb.RunStageResponse.FromString(raw)) == event


def test_unknown_reasons_end_the_session() -> None:
    """A failure for a reason of a newer version counts as one after which the session is over."""
    message = pb.RunStageResponse(failure=failure_pb2.Failure(reason=77, message="m"))
    event = FrameReader(EVENT_FRAMES).read(message)
    assert isinstance(event, Failure)
    assert event.reason is FailureReason.STAGE_FAILED


def test_unknown_answers_are_refused() -> None:
    """An answer without a known frame, or of the opening, is refused."""
    for message in (pb.RunStageResponse(), pb.RunStageResponse(opened=stage_pb2.Opened())):
        with pytest.raises(InvalidArgument, match="is not expected here"):
            FrameReader(EVENT_FRAMES).read(message)


def test_opened_round_trip() -> None:
    """The stages come back in order; an opening without any is refused."""
    stages = tuple(
        StageIdentity(replace(HERE, stage=index), LayerRange(index, index + 1), 7 * index) for index in range(3)
    )
    assert opened_from_message(opened_to_message(stages)) == stages
    with pytest.raises(InvalidArgument, match="opened names no stage"):
        opened_from_message(stage_pb2.Opened())


@pytest.mark.parametrize("part", [*PARTS, SnapshotPart(Location(0, "", "", ""), 2**64 - 1, 2**64 - 1)])
def test_parts_round_trip(part: SnapshotPart) -> None:
    """Every field survives the wire; stage 0 and no stage stay different."""
    assert part_from_message(snapshot_pb2.SnapshotPart.FromString(part_to_message(part).SerializeToString())) == part


def test_locations_round_trip() -> None:
    """A place comes back as it was, with a stage, with stage 0 and without one."""
    for stage in (None, 0, 7):
        location = Location(stage, "alpha", "cuda:0+cuda:1", "unix:/run/a.sock")
        raw = location_to_message(location).SerializeToString()
        assert location_from_message(failure_pb2.Location.FromString(raw)) == location


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (snapshot_pb2.SnapshotSave(snapshot_id="", length=1), "snapshot_id"),
        (snapshot_pb2.SnapshotSave(snapshot_id="a\n", length=1), "snapshot_id"),
        (snapshot_pb2.SnapshotSave(snapshot_id="a", length=1, parent_id=""), "parent_id"),
        (snapshot_pb2.SnapshotSave(snapshot_id="a", length=1, parent_id="ü"), "parent_id"),
        (snapshot_pb2.SnapshotSave(snapshot_id="a" * 129, length=1), "snapshot_id"),
    ],
)
def test_saves_under_no_name_are_refused(message: snapshot_pb2.SnapshotSave, field: str) -> None:
    """What is no name is refused, naming the field."""
    with pytest.raises(InvalidArgument) as refused:
        save_from_message(message)
    assert refused.value.where["field"] == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (snapshot_pb2.SnapshotRestore(snapshot_id="", length=1, token_ids=[1]), "snapshot_id"),
        (snapshot_pb2.SnapshotRestore(snapshot_id="\0", length=0), "snapshot_id"),
        (snapshot_pb2.SnapshotRestore(snapshot_id="a", length=2, token_ids=[1]), "token_ids"),
        (snapshot_pb2.SnapshotRestore(snapshot_id="a", length=1, token_ids=[1, 2]), "token_ids"),
        (snapshot_pb2.SnapshotRestore(snapshot_id="a", length=2**32 - 1), "token_ids"),
    ],
)
def test_restores_of_other_tokens_than_their_length_are_refused(
    message: snapshot_pb2.SnapshotRestore, field: str
) -> None:
    """A name that is none, and tokens that are more or fewer than `length`, are refused by field."""
    with pytest.raises(InvalidArgument) as refused:
        restore_from_message(message)
    assert refused.value.where["field"] == field
