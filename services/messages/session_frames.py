"""A session's frames: the one translation between the dataclasses of `steps` and the messages of `stage.proto`.

Whichever way a message comes, `frames.FrameReader` reads it by the tables at the end of this file. Remote values are
checked here as far as this is possible without knowing the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashsplit.shard.v1 import draft_pb2, failure_pb2, snapshot_pb2, stage_pb2, stage_service_pb2 as pb
from services.addresses import parse_address
from services.errors import InvalidArgument
from services.messages import output_frames
from services.messages.description import range_from_message, range_to_message
from services.messages.enums import EnumNumbers
from services.messages.frames import FrameKind, FrameKinds, TensorLimits
from services.messages.holder import holder_id_of
from services.messages.sampling import check_sampling, sampling_from_message, sampling_to_message
from services.messages.snapshots import check_id
from services.messages.steps import (
    LONGEST_REST_MS,
    Commit,
    DraftRoute,
    Event,
    Failure,
    FailureReason,
    FeatureSlice,
    Forward,
    ForwardWithoutFeatures,
    Hop,
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
    TokenLogprobs,
)
from services.messages.tensors import IncomingTensor, OutgoingTensors, WireTensor, incomplete
from services.same_host.link import PayloadReader, PayloadSender
from services.telemetry.trace_context import Trace, parse_traceparent

MAX_STAGES = 1024
"""The most stages of a chain."""

MAX_REQUEST_ID = 256
"""The most characters of a request's name."""

SESSION_ID_CHARACTERS = range(16, 65)
"""How long the name of a session that may rest is."""

_KINDS = EnumNumbers(
    {
        StepKind.PREFILL: stage_pb2.STEP_KIND_PREFILL,
        StepKind.DECODE: stage_pb2.STEP_KIND_DECODE,
        StepKind.VERIFY: stage_pb2.STEP_KIND_VERIFY,
        StepKind.RESUME: stage_pb2.STEP_KIND_RESUME,
    }
)
_REASONS = EnumNumbers(
    {
        FailureReason.LINK_BROKEN: failure_pb2.FAILURE_REASON_LINK_BROKEN,
        FailureReason.STAGE_FAILED: failure_pb2.FAILURE_REASON_STAGE_FAILED,
        FailureReason.DRAFT_LOST: failure_pb2.FAILURE_REASON_DRAFT_LOST,
    }
)


# --- open


def open_to_message(request: OpenSession) -> stage_pb2.Open:
    """Return the first frame's message."""
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
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        holder_id=request.holder_id,
    )
    if request.draft is not None:
        message.draft.SetInParent()
        if request.draft.address is not None:
            message.draft.address = request.draft.address
    if request.grammar is not None:
        output_frames.grammar_to_message(request.grammar, message.grammar)
    if (rest := request.rest) is not None:
        message.rest.session_id, message.rest.rest_ms = rest.session_id, rest.rest_ms
        message.rest.first_position = rest.first_position
        message.rest.token_ids.extend(rest.token_ids)
    return message


def open_from_message(message: stage_pb2.Open) -> OpenSession:
    """Return the first frame.

    Raises InvalidArgument for names, places, ranges, addresses, sampling parameters and grammars that make no sense.
    """
    if message.stage + len(message.route) >= MAX_STAGES:
        raise InvalidArgument(
            f"stage is {message.stage} with {len(message.route)} behind it: a chain has at most {MAX_STAGES} stages",
            field="stage",
        )
    draft = None
    if message.HasField("draft"):
        elsewhere = message.draft.HasField("address")
        draft = DraftRoute(parse_address(message.draft.address, "draft.address") if elsewhere else None)
    logprobs = message.logprobs if message.HasField("logprobs") else None
    output_frames.check_logprobs(logprobs)
    prompt_logprobs = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    output_frames.check_logprobs(prompt_logprobs, "prompt_logprobs")
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
        holder_id=holder_id_of(message),
        prompt_logprobs=prompt_logprobs,
        rest=_rest_from_message(message.rest) if message.HasField("rest") else None,
    )


def _rest_from_message(message: stage_pb2.SessionRest) -> SessionRest:
    """Return how a session's state rests. Raises InvalidArgument for a name or a time out of range."""
    name, least, most = message.session_id, SESSION_ID_CHARACTERS[0], SESSION_ID_CHARACTERS[-1]
    if len(name) not in SESSION_ID_CHARACTERS or not name.isprintable():
        raise InvalidArgument(
            f"session_id has {len(name)} characters; it must be {least} to {most}, all of them printable",
            field="rest.session_id",
        )
    if not 1 <= message.rest_ms <= LONGEST_REST_MS:
        raise InvalidArgument(
            f"rest_ms is {message.rest_ms}; it must be between 1 and {LONGEST_REST_MS}", field="rest.rest_ms"
        )
    return SessionRest(name, message.rest_ms, tuple(message.token_ids), message.first_position)


def check_request_id(text: str) -> str:
    """Return a request's name. Raises InvalidArgument for one that cannot stand in a log line."""
    if len(text) > MAX_REQUEST_ID or not text.isprintable():
        raise InvalidArgument(
            f"request_id has {len(text)} characters; it must be at most {MAX_REQUEST_ID}, all of them printable",
            field="request_id",
        )
    return text


def trace_from_message(message: stage_pb2.Open | draft_pb2.DraftOpen) -> Trace | None:
    """Return the caller's place in its trace, None where it names none. Raises InvalidArgument for another form."""
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


# --- what goes down the chain


def request_to_messages(request: SessionRequest, sender: PayloadSender | None = None) -> Iterator[pb.RunStageRequest]:
    """Return the frame's message, and behind it the chunks of its tensors.

    sender: puts large tensors into memory that the other side shares.
    """
    message, tensors = pb.RunStageRequest(), OutgoingTensors(sender)
    match request:
        case Forward():
            _fill_forward(request, message, tensors, features=True)
        case ForwardWithoutFeatures(forward):
            _fill_forward(forward, message, tensors, features=False)
        case StepFeatures():
            message.step_features.step = request.step
            for piece in request.features:
                slice_to_message(piece, message.step_features.features.add(), tensors)
        case StepLimit():
            message.step_limit.last_step = request.last_step
            message.step_limit.propose_tokens = request.propose_tokens
        case SnapshotSave():
            message.snapshot_save.CopyFrom(save_to_message(request))
        case SnapshotRestore():
            message.snapshot_restore.CopyFrom(restore_to_message(request))
    yield message
    for chunk in tensors.chunks():
        yield pb.RunStageRequest(chunk=chunk)


def _fill_forward(forward: Forward, message: pb.RunStageRequest, tensors: OutgoingTensors, *, features: bool) -> None:
    """Fill the message with a step. features: whether with those, or else they follow; without an activation there are
    none."""
    step: stage_pb2.ForwardFromTokens | stage_pb2.ForwardFromActivation
    if forward.activation is None:
        step = message.forward_from_tokens
    else:
        step = message.forward_from_activation
        tensors.put(forward.activation, step.activation)
        step.features_follow = not features
        for piece in forward.features if features else ():
            slice_to_message(piece, step.features.add(), tensors)
    fill_step(forward, step)


def fill_step(forward: Forward, message: stage_pb2.ForwardFromTokens | stage_pb2.ForwardFromActivation) -> None:
    """Fill the message with all of a step but its tensors."""
    message.step, message.base_position = forward.step, forward.base_position
    message.token_ids.extend(forward.token_ids)
    message.kind, message.propose_tokens = _KINDS.number(forward.kind), forward.propose_tokens
    message.more, message.least_accepted = forward.more, forward.least_accepted


def _forward_from_tokens(message: stage_pb2.ForwardFromTokens) -> Forward:
    return Forward(
        step=message.step,
        base_position=message.base_position,
        token_ids=tuple(message.token_ids),
        kind=_KINDS.value(message.kind, "kind"),
        propose_tokens=message.propose_tokens,
        more=message.more,
        least_accepted=message.least_accepted,
    )


def forward_from_activation(
    message: stage_pb2.ForwardFromActivation, activation: WireTensor | None, *features: WireTensor
) -> Forward:
    """Return the step with its tensors, which were read apart from the message; of a batch's step there are none."""
    return Forward(
        step=message.step,
        base_position=message.base_position,
        token_ids=tuple(message.token_ids),
        kind=_KINDS.value(message.kind, "kind"),
        propose_tokens=message.propose_tokens,
        activation=activation,
        features=_slices_from_message(message, features),
        more=message.more,
        least_accepted=message.least_accepted,
    )


def _lane_forward_from_activation(
    message: stage_pb2.ForwardFromActivation, activation: WireTensor, *features: WireTensor
) -> Forward | ForwardWithoutFeatures:
    forward = forward_from_activation(message, activation, *features)
    return ForwardWithoutFeatures(forward) if message.features_follow else forward


def _limit_from_message(message: stage_pb2.StepLimit) -> StepLimit:
    return StepLimit(message.last_step, message.propose_tokens)


def _step_features_from_message(message: stage_pb2.StepFeatures, *features: WireTensor) -> StepFeatures:
    return StepFeatures(message.step, _slices_from_message(message, features))


def step_tensors(
    message: stage_pb2.ForwardFromActivation | stage_pb2.StepBatch, limits: TensorLimits, payloads: PayloadReader
) -> list[IncomingTensor]:
    """Return the tensors that the message of one step, or of several, announces."""
    features = _feature_tensors(message, limits, payloads)
    return [incomplete(message.activation, "activation", limits.max_tensor_bytes, payloads), *features]


def _feature_tensors(
    message: stage_pb2.ForwardFromActivation | stage_pb2.StepFeatures | stage_pb2.StepBatch,
    limits: TensorLimits,
    payloads: PayloadReader,
) -> list[IncomingTensor]:
    if len(message.features) > limits.max_feature_slices:
        raise InvalidArgument(
            f"the frame has {len(message.features)} feature slices, at most {limits.max_feature_slices} are expected",
            field="features",
        )
    max_bytes = limits.max_tensor_bytes
    return [incomplete(piece.features, "features", max_bytes, payloads) for piece in message.features]


def _slices_from_message(
    message: stage_pb2.ForwardFromActivation | stage_pb2.StepFeatures, tensors: Sequence[WireTensor]
) -> tuple[FeatureSlice, ...]:
    return tuple(slice_from_message(piece, tensor) for piece, tensor in zip(message.features, tensors, strict=True))


def slice_to_message(piece: FeatureSlice, message: stage_pb2.FeatureSlice, tensors: OutgoingTensors) -> None:
    """Fill the message; the slice's tensor goes the way of the frame's tensors."""
    message.start_position = piece.start_position
    if piece.capture_index is not None:
        message.capture_index = piece.capture_index
    tensors.put(piece.features, message.features)


def slice_from_message(message: stage_pb2.FeatureSlice, tensor: WireTensor) -> FeatureSlice:
    """Return the slice with its tensor, which was read apart from the message."""
    return FeatureSlice(
        start_position=message.start_position,
        features=tensor,
        capture_index=message.capture_index if message.HasField("capture_index") else None,
    )


# --- what comes back


def opened_to_message(
    stages: tuple[StageIdentity, ...], *, lane: bool = False, step_lane: bool = False, batches: bool = False
) -> stage_pb2.Opened:
    """Return the answer to the first frame.

    lane: whether frames from now on go through the caller's lane. step_lane: whether steps go through its other one.
    batches: whether steps may come together with those of other sessions.
    """
    return stage_pb2.Opened(
        lane=lane,
        step_lane=step_lane,
        batches=batches,
        stages=[
            stage_pb2.StageIdentity(
                location=location_to_message(stage.location),
                layers=range_to_message(stage.layers),
                held_length=stage.held_length,
            )
            for stage in stages
        ],
    )


def opened_from_message(message: stage_pb2.Opened) -> tuple[StageIdentity, ...]:
    """Return the stages from the one that answers on. Raises InvalidArgument when none presents itself."""
    if not message.stages:
        raise InvalidArgument("opened names no stage", field="opened.stages")
    return tuple(
        StageIdentity(location_from_message(stage.location), range_from_message(stage.layers), stage.held_length)
        for stage in message.stages
    )


def event_to_message(event: Event) -> pb.RunStageResponse:
    """Return the answer's message."""
    match event:
        case Commit():
            message = pb.RunStageResponse()
            _fill_commit(event, message.commit)
            return message
        case Proposal():
            return pb.RunStageResponse(proposal=proposal_to_message(event))
        case SnapshotSaved():
            return pb.RunStageResponse(snapshot_saved=_saved_to_message(event))
        case SnapshotRestored():
            return pb.RunStageResponse(snapshot_restored=_restored_to_message(event))
        case Failure():
            return pb.RunStageResponse(failure=_failure_to_message(event))


def commit_to_message(commit: Commit) -> stage_pb2.Commit:
    """Return a step's answer as a message."""
    message = stage_pb2.Commit()
    _fill_commit(commit, message)
    return message


def _fill_commit(commit: Commit, message: stage_pb2.Commit) -> None:
    """Fill an empty message, field by field and only where there is something: each step of each session has one, and
    that takes half as long as to make a message of arguments and put it into another one."""
    message.step, message.length = commit.step, commit.length
    message.token_ids.extend(commit.token_ids)
    if commit.more:
        message.more = commit.more
    if commit.followed:
        message.followed = True
    if commit.batch_sessions:
        message.batch_sessions = commit.batch_sessions
    if commit.batch_rows:
        message.batch_rows = commit.batch_rows
    if commit.propose_tokens:
        message.propose_tokens = commit.propose_tokens
    if commit.batch_proposing:
        message.batch_proposing = commit.batch_proposing
    for timing in commit.timings:
        message.timings.add(
            forward_ns=timing.forward_ns, elapsed_ns=timing.elapsed_ns, passed_bytes=timing.passed_bytes
        )
    for logprobs in commit.logprobs:
        output_frames.logprobs_to_message(logprobs, message.logprobs.add())
    for logprobs in commit.prompt_logprobs:
        output_frames.logprobs_to_message(logprobs, message.prompt_logprobs.add())


def commit_from_message(message: stage_pb2.Commit) -> Commit:
    """Return a step's answer. Raises InvalidArgument for log-probabilities that make no sense."""
    timings = tuple(
        StageTiming(timing.forward_ns, timing.elapsed_ns, timing.passed_bytes) for timing in message.timings
    )
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if message.logprobs or message.prompt_logprobs:
        logprobs = output_frames.logprobs_of_tokens(message)
        prompt_logprobs = tuple(map(output_frames.logprobs_from_message, message.prompt_logprobs))
    return Commit(
        message.step,
        message.length,
        tuple(message.token_ids),
        timings,
        logprobs,
        message.more,
        message.followed,
        prompt_logprobs,
        message.batch_sessions,
        message.batch_rows,
        message.propose_tokens,
        message.batch_proposing,
    )


def proposal_to_message(proposal: Proposal) -> stage_pb2.Proposal:
    """Return the draft tokens for a step as a message."""
    return stage_pb2.Proposal(
        step=proposal.step,
        token_ids=proposal.token_ids,
        elapsed_ns=proposal.elapsed_ns,
        followed=proposal.followed,
    )


def proposal_from_message(message: stage_pb2.Proposal) -> Proposal:
    """Return the draft tokens for a step."""
    return Proposal(message.step, tuple(message.token_ids), message.elapsed_ns, message.followed)


def _failure_to_message(failure: Failure) -> failure_pb2.Failure:
    return failure_pb2.Failure(
        reason=_REASONS.number(failure.reason),
        message=failure.message,
        location=location_to_message(failure.location),
        code=failure.code,
        cause=failure.cause,
    )


def _failure_from_message(message: failure_pb2.Failure) -> Failure:
    # After a reason of a later version nothing is known of the session, so that it is over.
    return Failure(
        reason=_REASONS.get(message.reason) or FailureReason.STAGE_FAILED,
        message=message.message,
        location=location_from_message(message.location),
        code=message.code,
        cause=message.cause,
    )


# --- snapshots, of a session with stages and of one with a draft


def save_to_message(save: SnapshotSave) -> snapshot_pb2.SnapshotSave:
    """Return the request's message."""
    return snapshot_pb2.SnapshotSave(snapshot_id=save.snapshot_id, length=save.length, parent_id=save.parent_id)


def save_from_message(message: snapshot_pb2.SnapshotSave) -> SnapshotSave:
    """Return the request. Raises InvalidArgument for names that are none."""
    return SnapshotSave(
        snapshot_id=check_id(message.snapshot_id),
        length=message.length,
        parent_id=check_id(message.parent_id, "parent_id") if message.HasField("parent_id") else None,
    )


def restore_to_message(restore: SnapshotRestore) -> snapshot_pb2.SnapshotRestore:
    """Return the request's message."""
    return snapshot_pb2.SnapshotRestore(
        snapshot_id=restore.snapshot_id, length=restore.length, token_ids=restore.token_ids
    )


def restore_from_message(message: snapshot_pb2.SnapshotRestore) -> SnapshotRestore:
    """Return the request. Raises InvalidArgument for a name that is none and for tokens that are not `length` many."""
    if len(message.token_ids) != message.length:
        raise InvalidArgument(
            f"token_ids has {len(message.token_ids)} tokens where length is {message.length}", field="token_ids"
        )
    return SnapshotRestore(check_id(message.snapshot_id), message.length, tuple(message.token_ids))


def part_to_message(part: SnapshotPart) -> snapshot_pb2.SnapshotPart:
    """Return the message of what one worker did."""
    return snapshot_pb2.SnapshotPart(
        location=location_to_message(part.location),
        size_bytes=part.size_bytes,
        elapsed_ns=part.elapsed_ns,
        evicted_ids=part.evicted_ids,
        refusal=part.refusal,
    )


def part_from_message(message: snapshot_pb2.SnapshotPart) -> SnapshotPart:
    """Return what one worker did."""
    return SnapshotPart(
        location=location_from_message(message.location),
        size_bytes=message.size_bytes,
        elapsed_ns=message.elapsed_ns,
        evicted_ids=tuple(message.evicted_ids),
        refusal=message.refusal,
    )


def _saved_to_message(saved: SnapshotSaved) -> snapshot_pb2.SnapshotSaved:
    parts = [part_to_message(part) for part in saved.parts]
    return snapshot_pb2.SnapshotSaved(snapshot_id=saved.snapshot_id, length=saved.length, parts=parts)


def _saved_from_message(message: snapshot_pb2.SnapshotSaved) -> SnapshotSaved:
    return SnapshotSaved(message.snapshot_id, message.length, tuple(map(part_from_message, message.parts)))


def _restored_to_message(restored: SnapshotRestored) -> snapshot_pb2.SnapshotRestored:
    parts = [part_to_message(part) for part in restored.parts]
    return snapshot_pb2.SnapshotRestored(snapshot_id=restored.snapshot_id, length=restored.length, parts=parts)


def _restored_from_message(message: snapshot_pb2.SnapshotRestored) -> SnapshotRestored:
    return SnapshotRestored(message.snapshot_id, message.length, tuple(map(part_from_message, message.parts)))


# --- places


def location_to_message(location: Location) -> failure_pb2.Location:
    """Return the worker's place as a message."""
    return failure_pb2.Location(
        stage=location.stage,
        host=location.host,
        device=location.device,
        address=location.address,
    )


def location_from_message(message: failure_pb2.Location) -> Location:
    """Return the worker's place."""
    return Location(
        stage=message.stage if message.HasField("stage") else None,
        host=message.host,
        device=message.device,
        address=message.address,
    )


# --- which frames come which way

STREAM_FRAMES: FrameKinds[Forward | StepLimit | SnapshotSave | SnapshotRestore] = {
    "forward_from_tokens": FrameKind(_forward_from_tokens),
    "forward_from_activation": FrameKind(forward_from_activation, step_tensors),
    "step_limit": FrameKind(_limit_from_message),
    "snapshot_save": FrameKind(save_from_message),
    "snapshot_restore": FrameKind(restore_from_message),
}
"""What a stage's caller sends behind `open`, through gRPC or a frame socket."""

LANE_FRAMES: FrameKinds[Forward | ForwardWithoutFeatures | StepFeatures] = {
    "forward_from_tokens": FrameKind(_forward_from_tokens),
    "forward_from_activation": FrameKind(_lane_forward_from_activation, step_tensors),
    "step_features": FrameKind(_step_features_from_message, _feature_tensors),
}
"""What goes through a step socket, in either direction."""

EVENT_FRAMES: FrameKinds[Event] = {
    "commit": FrameKind(commit_from_message),
    "proposal": FrameKind(proposal_from_message),
    "snapshot_saved": FrameKind(_saved_from_message),
    "snapshot_restored": FrameKind(_restored_from_message),
    "failure": FrameKind(_failure_from_message),
}
"""What a stage answers behind `opened`."""
