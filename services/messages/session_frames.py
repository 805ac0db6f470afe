"""Between the dataclasses of `steps` and the messages of `stage.proto`.

Remote values are checked here as far as this is possible without knowing the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flashsplit.shard.v1 import draft_pb2, failure_pb2, snapshot_pb2, stage_pb2, stage_service_pb2 as pb
from services.addresses import parse_address
from services.errors import InvalidArgument
from services.messages import output_frames
from services.messages.description import range_from_message, range_to_message
from services.messages.sampling import check_sampling, sampling_from_message, sampling_to_message
from services.messages.snapshots import check_id
from services.messages.steps import (
    Commit,
    DraftRoute,
    Event,
    Failure,
    FailureReason,
    FeatureSlice,
    Forward,
    Hop,
    Location,
    OpenSession,
    Proposal,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageIdentity,
    StageTiming,
    StepKind,
)
from services.messages.tensors import IncomingTensor, OutgoingTensors, WireTensor, incomplete
from services.same_host.link import NO_LINKS, PayloadReader, PayloadSender
from services.telemetry.trace_context import Trace, parse_traceparent

MAX_STAGES = 1024
MAX_REQUEST_ID = 256

_KIND_NUMBERS = {
    StepKind.PREFILL: stage_pb2.STEP_KIND_PREFILL,
    StepKind.DECODE: stage_pb2.STEP_KIND_DECODE,
    StepKind.VERIFY: stage_pb2.STEP_KIND_VERIFY,
    StepKind.RESUME: stage_pb2.STEP_KIND_RESUME,
}
_KINDS: Mapping[int, StepKind] = {number: kind for kind, number in _KIND_NUMBERS.items()}
_REASON_NUMBERS = {
    FailureReason.LINK_BROKEN: failure_pb2.FAILURE_REASON_LINK_BROKEN,
    FailureReason.STAGE_FAILED: failure_pb2.FAILURE_REASON_STAGE_FAILED,
    FailureReason.DRAFT_LOST: failure_pb2.FAILURE_REASON_DRAFT_LOST,
}
_REASONS: Mapping[int, FailureReason] = {number: reason for reason, number in _REASON_NUMBERS.items()}


# --- open


def open_to_message(request: OpenSession) -> stage_pb2.Open:
    message = stage_pb2.Open(
        request_id=request.request_id,
        fingerprint=request.fingerprint,
        stage=request.stage,
        layers=range_to_message(request.layers),
        route=[stage_pb2.Hop(address=hop.address, layers=range_to_message(hop.layers)) for hop in request.route],
        max_length=request.max_length,
        max_rows=request.max_rows,
        block_rows=request.block_rows,
        prompt_length=request.prompt_length,
        sampling=sampling_to_message(request.sampling, stage_pb2.Sampling),
        stop_token_ids=sorted(request.stop_token_ids),
        traceparent=request.trace.traceparent if request.trace is not None else None,
        exact_rows=request.batch_invariant_rows,
    )
    if request.draft is not None:
        message.draft.SetInParent()
        if request.draft.address is not None:
            message.draft.address = request.draft.address
    if request.logprobs is not None:
        message.logprobs = request.logprobs
    if request.grammar is not None:
        output_frames.grammar_to_message(request.grammar, message.grammar)
    return message


def open_from_message(message: stage_pb2.Open) -> OpenSession:
    """Raises InvalidArgument for names, places, ranges, addresses, sampling numbers and grammars that make no sense."""
    if message.stage + len(message.route) >= MAX_STAGES:
        raise InvalidArgument(
            f"stage is {message.stage} with {len(message.route)} behind it: a chain has at most {MAX_STAGES} stages",
            field="stage",
        )
    draft = None
    if message.HasField("draft"):
        here = not message.draft.HasField("address")
        draft = DraftRoute(None if here else parse_address(message.draft.address, "draft.address"))
    logprobs = message.logprobs if message.HasField("logprobs") else None
    output_frames.check_logprobs(logprobs)
    sampling = sampling_from_message(message.sampling)
    check_sampling(sampling)
    return OpenSession(
        request_id=check_request_id(message.request_id),
        fingerprint=message.fingerprint,
        stage=message.stage,
        layers=range_from_message(message.layers),
        route=tuple(
            Hop(parse_address(hop.address, "route.address"), range_from_message(hop.layers)) for hop in message.route
        ),
        max_length=message.max_length,
        max_rows=message.max_rows,
        block_rows=message.block_rows,
        prompt_length=message.prompt_length,
        sampling=sampling,
        stop_token_ids=frozenset(message.stop_token_ids),
        draft=draft,
        logprobs=logprobs,
        grammar=output_frames.grammar_from_message(message.grammar) if message.HasField("grammar") else None,
        trace=trace_from_message(message),
        batch_invariant_rows=message.exact_rows if message.HasField("exact_rows") else None,
    )


def check_request_id(text: str) -> str:
    """Raises InvalidArgument for what cannot stand in a log line."""
    if len(text) > MAX_REQUEST_ID or not text.isprintable():
        raise InvalidArgument(
            f"request_id has {len(text)} characters; it must be at most {MAX_REQUEST_ID}, all of them printable",
            field="request_id",
        )
    return text


def trace_from_message(message: stage_pb2.Open | draft_pb2.DraftOpen) -> Trace | None:
    """Where the caller stands in its trace; None where it doesn't say. Raises InvalidArgument for another form."""
    if not message.HasField("traceparent"):
        return None
    trace = parse_traceparent(message.traceparent)
    if trace is None:
        raise InvalidArgument(
            f"traceparent is {message.traceparent[:64]!r}; it must have the form 00-<32 hex digits>-<16>-<2>, in "
            "lower case",
            field="traceparent",
        )
    return trace


# --- forward


def forward_to_messages(
    forward: Forward, sender: PayloadSender | None = None, *, features: bool = True
) -> Iterator[pb.RunStageRequest]:
    """The frame, and the chunks of its tensors; large ones through the sender's shared memory. features: or else they
    follow by `features_to_messages`."""
    request, tensors = pb.RunStageRequest(), OutgoingTensors(sender)
    if forward.activation is None:
        _fill(request.forward_from_tokens, forward)
    else:
        message = request.forward_from_activation
        _fill(message, forward)
        tensors.put(forward.activation, message.activation)
        message.features_follow = not features
        for piece in forward.features if features else ():
            slice_to_message(piece, message.features.add(), tensors)
    yield request
    for chunk in tensors.chunks():
        yield pb.RunStageRequest(chunk=chunk)


def features_to_messages(forward: Forward, sender: PayloadSender | None = None) -> Iterator[pb.RunStageRequest]:
    """Of a step that was sent without them; otherwise as `forward_to_messages`."""
    request, tensors = pb.RunStageRequest(), OutgoingTensors(sender)
    request.step_features.step = forward.step
    for piece in forward.features:
        slice_to_message(piece, request.step_features.features.add(), tensors)
    yield request
    for chunk in tensors.chunks():
        yield pb.RunStageRequest(chunk=chunk)


def _fill(message: stage_pb2.ForwardFromTokens | stage_pb2.ForwardFromActivation, forward: Forward) -> None:
    message.step, message.base_position = forward.step, forward.base_position
    message.token_ids.extend(forward.token_ids)
    message.kind, message.propose_tokens = _KIND_NUMBERS[forward.kind], forward.propose_tokens
    message.more = forward.more


def from_tokens(message: stage_pb2.ForwardFromTokens) -> Forward:
    return Forward(
        step=message.step,
        base_position=message.base_position,
        token_ids=tuple(message.token_ids),
        kind=_kind(message.kind),
        propose_tokens=message.propose_tokens,
        more=message.more,
    )


def incoming_tensors(
    message: stage_pb2.ForwardFromActivation, max_bytes: int, max_slices: int, links: PayloadReader = NO_LINKS
) -> list[IncomingTensor]:
    """The frame's tensors in field order, announced sizes checked."""
    features = incoming_features(message, max_bytes, max_slices, links)
    return [incomplete(message.activation, "activation", max_bytes, links), *features]


def incoming_features(
    message: stage_pb2.ForwardFromActivation | stage_pb2.StepFeatures,
    max_bytes: int,
    max_slices: int,
    links: PayloadReader = NO_LINKS,
) -> list[IncomingTensor]:
    """As `incoming_tensors`, but for the activation."""
    if len(message.features) > max_slices:
        raise InvalidArgument(
            f"the frame has {len(message.features)} feature slices, at most {max_slices} are expected",
            field="features",
        )
    return [incomplete(piece.features, "features", max_bytes, links) for piece in message.features]


def from_activation(message: stage_pb2.ForwardFromActivation, tensors: list[WireTensor]) -> Forward:
    return Forward(
        step=message.step,
        base_position=message.base_position,
        token_ids=tuple(message.token_ids),
        kind=_kind(message.kind),
        propose_tokens=message.propose_tokens,
        activation=tensors[0],
        features=slices_from_messages(message, tensors[1:]),
        more=message.more,
    )


def slices_from_messages(
    message: stage_pb2.ForwardFromActivation | stage_pb2.StepFeatures, tensors: Sequence[WireTensor]
) -> tuple[FeatureSlice, ...]:
    return tuple(slice_from_message(piece, tensor) for piece, tensor in zip(message.features, tensors, strict=True))


def slice_to_message(piece: FeatureSlice, message: stage_pb2.FeatureSlice, tensors: OutgoingTensors) -> None:
    message.start_position = piece.start_position
    if piece.capture_index is not None:
        message.capture_index = piece.capture_index
    tensors.put(piece.features, message.features)


def slice_from_message(message: stage_pb2.FeatureSlice, tensor: WireTensor) -> FeatureSlice:
    return FeatureSlice(
        start_position=message.start_position,
        features=tensor,
        capture_index=message.capture_index if message.HasField("capture_index") else None,
    )


def _kind(number: int) -> StepKind:
    if number not in _KINDS:
        known = ", ".join(f"{key} ({kind})" for key, kind in _KINDS.items())
        raise InvalidArgument(f"kind is {number}, not one of {known}", field="kind")
    return _KINDS[number]


# --- answers


def opened(stages: tuple[StageIdentity, ...], *, lane: bool = False, step_lane: bool = False) -> stage_pb2.Opened:
    """lane: whether frames from now on go through the caller's lane; step_lane: and steps through the other one."""
    return stage_pb2.Opened(
        lane=lane,
        step_lane=step_lane,
        stages=[
            stage_pb2.StageIdentity(location=location_to_message(stage.location), layers=range_to_message(stage.layers))
            for stage in stages
        ],
    )


def opened_from_message(message: stage_pb2.Opened) -> tuple[StageIdentity, ...]:
    """Raises InvalidArgument when no stage presents itself."""
    if not message.stages:
        raise InvalidArgument("opened names no stage", field="opened.stages")
    return tuple(
        StageIdentity(location_from_message(stage.location), range_from_message(stage.layers))
        for stage in message.stages
    )


def event_to_message(event: Event) -> pb.RunStageResponse:
    if isinstance(event, Commit):
        commit = stage_pb2.Commit(step=event.step, length=event.length, token_ids=event.token_ids, more=event.more)
        commit.followed = event.followed
        for timing in event.timings:
            commit.timings.add(
                forward_ns=timing.forward_ns, elapsed_ns=timing.elapsed_ns, passed_bytes=timing.passed_bytes
            )
        for logprobs in event.logprobs:
            output_frames.logprobs_to_message(logprobs, commit.logprobs.add())
        return pb.RunStageResponse(commit=commit)
    if isinstance(event, Proposal):
        proposal = stage_pb2.Proposal(step=event.step, token_ids=event.token_ids, elapsed_ns=event.elapsed_ns)
        proposal.followed = event.followed
        return pb.RunStageResponse(proposal=proposal)
    if isinstance(event, SnapshotSaved):
        return pb.RunStageResponse(snapshot_saved=saved_to_message(event))
    if isinstance(event, SnapshotRestored):
        return pb.RunStageResponse(snapshot_restored=restored_to_message(event))
    failure = failure_pb2.Failure(
        reason=_REASON_NUMBERS[event.reason],
        message=event.message,
        location=location_to_message(event.location),
        code=event.code,
    )
    return pb.RunStageResponse(failure=failure)


def event_from_message(message: pb.RunStageResponse) -> Event:
    """Raises InvalidArgument for a frame that this version doesn't know and for log-probabilities that are none."""
    match message.WhichOneof("frame"):
        case "commit":
            commit = message.commit
            timings = tuple(
                StageTiming(timing.forward_ns, timing.elapsed_ns, timing.passed_bytes) for timing in commit.timings
            )
            logprobs = output_frames.logprobs_of_tokens(commit)
            return Commit(
                commit.step, commit.length, tuple(commit.token_ids), timings, logprobs, commit.more, commit.followed
            )
        case "proposal":
            proposal = message.proposal
            return Proposal(proposal.step, tuple(proposal.token_ids), proposal.elapsed_ns, proposal.followed)
        case "snapshot_saved":
            return saved_from_message(message.snapshot_saved)
        case "snapshot_restored":
            return restored_from_message(message.snapshot_restored)
        case "failure":
            failure = message.failure
            return Failure(
                reason=_REASONS.get(failure.reason, FailureReason.STAGE_FAILED),
                message=failure.message,
                location=location_from_message(failure.location),
                code=failure.code,
            )
        case other:
            raise InvalidArgument(f"answer {other} is not expected here", field="frame")


# --- snapshots


def save_to_message(save: SnapshotSave) -> snapshot_pb2.SnapshotSave:
    return snapshot_pb2.SnapshotSave(snapshot_id=save.snapshot_id, length=save.length, parent_id=save.parent_id)


def save_from_message(message: snapshot_pb2.SnapshotSave) -> SnapshotSave:
    """Raises InvalidArgument for names that are none."""
    return SnapshotSave(
        snapshot_id=check_id(message.snapshot_id),
        length=message.length,
        parent_id=check_id(message.parent_id, "parent_id") if message.HasField("parent_id") else None,
    )


def restore_to_message(restore: SnapshotRestore) -> snapshot_pb2.SnapshotRestore:
    return snapshot_pb2.SnapshotRestore(
        snapshot_id=restore.snapshot_id, length=restore.length, token_ids=restore.token_ids
    )


def restore_from_message(message: snapshot_pb2.SnapshotRestore) -> SnapshotRestore:
    """Raises InvalidArgument for a name that is none and for tokens that are not `length` many."""
    if len(message.token_ids) != message.length:
        raise InvalidArgument(
            f"token_ids has {len(message.token_ids)} tokens where length is {message.length}", field="token_ids"
        )
    return SnapshotRestore(check_id(message.snapshot_id), message.length, tuple(message.token_ids))


def part_to_message(part: SnapshotPart) -> snapshot_pb2.SnapshotPart:
    return snapshot_pb2.SnapshotPart(
        location=location_to_message(part.location),
        size_bytes=part.size_bytes,
        elapsed_ns=part.elapsed_ns,
        evicted_ids=part.evicted_ids,
        refusal=part.refusal,
    )


def part_from_message(message: snapshot_pb2.SnapshotPart) -> SnapshotPart:
    return SnapshotPart(
        location=location_from_message(message.location),
        size_bytes=message.size_bytes,
        elapsed_ns=message.elapsed_ns,
        evicted_ids=tuple(message.evicted_ids),
        refusal=message.refusal,
    )


def saved_to_message(saved: SnapshotSaved) -> snapshot_pb2.SnapshotSaved:
    parts = [part_to_message(part) for part in saved.parts]
    return snapshot_pb2.SnapshotSaved(snapshot_id=saved.snapshot_id, length=saved.length, parts=parts)


def saved_from_message(message: snapshot_pb2.SnapshotSaved) -> SnapshotSaved:
    parts = tuple(part_from_message(part) for part in message.parts)
    return SnapshotSaved(message.snapshot_id, message.length, parts)


def restored_to_message(restored: SnapshotRestored) -> snapshot_pb2.SnapshotRestored:
    parts = [part_to_message(part) for part in restored.parts]
    return snapshot_pb2.SnapshotRestored(snapshot_id=restored.snapshot_id, length=restored.length, parts=parts)


def restored_from_message(message: snapshot_pb2.SnapshotRestored) -> SnapshotRestored:
    parts = tuple(part_from_message(part) for part in message.parts)
    return SnapshotRestored(message.snapshot_id, message.length, parts)


# --- places


def location_to_message(location: Location) -> failure_pb2.Location:
    return failure_pb2.Location(
        stage=location.stage,
        host=location.host,
        device=location.device,
        address=location.address,
    )


def location_from_message(message: failure_pb2.Location) -> Location:
    return Location(
        stage=message.stage if message.HasField("stage") else None,
        host=message.host,
        device=message.device,
        address=message.address,
    )
