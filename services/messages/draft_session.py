"""A session with a draft in a worker of its own: its frames as frozen dataclasses, and their one translation.

Snapshots and features are those of a session on stages, of which this is a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashsplit.shard.v1 import draft_pb2, draft_service_pb2 as pb, stage_pb2
from services.errors import InvalidArgument
from services.messages.frames import FrameKind, FrameKinds, TensorLimits
from services.messages.holder import holder_id_of
from services.messages.session_frames import (
    check_request_id,
    part_from_message,
    part_to_message,
    restore_from_message,
    restore_to_message,
    save_from_message,
    save_to_message,
    slice_from_message,
    slice_to_message,
    trace_from_message,
)
from services.messages.steps import FeatureSlice, SnapshotPart, SnapshotRestore, SnapshotSave
from services.messages.tensors import IncomingTensor, OutgoingTensors, WireTensor, incomplete
from services.same_host.link import PayloadReader, PayloadSender
from services.telemetry.trace_context import Trace


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """The first frame of a draft session.

    fingerprint: of the draft that the caller expects. max_length: the most tokens that the session will hold.
    holder_id: as in `OpenSession`.
    """

    request_id: str
    fingerprint: str
    max_length: int
    trace: Trace | None = None
    holder_id: str | None = None


@dataclass(frozen=True, slots=True)
class Propose:
    """Asks for draft tokens.

    tokens: how many of them, after the known token `token_id` at `position`. embed: embedding rows of the known and of
    the mask token, [2, hidden], for a draft with HeadPlace.PROJECTED, which has no embedding of its own.
    """

    step: int
    position: int
    token_id: int
    tokens: int
    embed: WireTensor | None = None


DraftAnswer = tuple[int, ...] | WireTensor
"""Draft tokens, or the draft's hidden rows, [tokens, hidden], of which the caller's lm_head makes them."""

DraftRequest = FeatureSlice | Propose | SnapshotSave | SnapshotRestore
"""What a draft gets in a session that is open."""


def open_to_message(request: OpenDraft) -> draft_pb2.DraftOpen:
    """Return the first frame's message."""
    return draft_pb2.DraftOpen(
        request_id=request.request_id,
        fingerprint=request.fingerprint,
        max_length=request.max_length,
        traceparent=request.trace.traceparent if request.trace is not None else None,
        holder_id=request.holder_id,
    )


def open_from_message(message: draft_pb2.DraftOpen) -> OpenDraft:
    """Return the first frame. Raises InvalidArgument for a name and a trace that make no sense."""
    return OpenDraft(
        check_request_id(message.request_id),
        message.fingerprint,
        message.max_length,
        trace_from_message(message),
        holder_id_of(message),
    )


def request_to_messages(request: DraftRequest, sender: PayloadSender | None = None) -> Iterator[pb.RunDraftRequest]:
    """Return the frame's message, and behind it the chunks of its tensors.

    sender: puts large tensors into memory that the other side shares.
    """
    message, tensors = pb.RunDraftRequest(), OutgoingTensors(sender)
    match request:
        case FeatureSlice():
            slice_to_message(request, message.feature_slice, tensors)
        case Propose():
            message.propose.step, message.propose.position = request.step, request.position
            message.propose.token_id, message.propose.tokens = request.token_id, request.tokens
            if request.embed is not None:
                tensors.put(request.embed, message.propose.embed.rows)
        case SnapshotSave():
            message.snapshot_save.CopyFrom(save_to_message(request))
        case SnapshotRestore():
            message.snapshot_restore.CopyFrom(restore_to_message(request))
    yield message
    for chunk in tensors.chunks():
        yield pb.RunDraftRequest(chunk=chunk)


def answer_to_messages(step: int, answer: DraftAnswer) -> Iterator[pb.RunDraftResponse]:
    """Return the message of the answer to a `Propose`, and behind it the chunks of its hidden rows."""
    message, tensors = pb.RunDraftResponse(), OutgoingTensors()
    message.proposed.step = step
    if isinstance(answer, WireTensor):
        tensors.put(answer, message.proposed.project.hidden)
    else:
        # It says that it is the answer also where it holds no tokens.
        message.proposed.tokens.SetInParent()
        message.proposed.tokens.token_ids.extend(answer)
    yield message
    for chunk in tensors.chunks():
        yield pb.RunDraftResponse(chunk=chunk)


def part_to_response(part: SnapshotPart) -> pb.RunDraftResponse:
    """Return the message of the answer to a `SnapshotSave` or `SnapshotRestore`."""
    return pb.RunDraftResponse(snapshot_part=part_to_message(part))


def _slice_tensors(
    message: stage_pb2.FeatureSlice, limits: TensorLimits, payloads: PayloadReader
) -> list[IncomingTensor]:
    return [incomplete(message.features, "features", limits.max_tensor_bytes, payloads)]


def _propose_from_message(message: draft_pb2.Propose, embed: WireTensor | None = None) -> Propose:
    return Propose(message.step, message.position, message.token_id, message.tokens, embed)


def _propose_tensors(message: draft_pb2.Propose, limits: TensorLimits, payloads: PayloadReader) -> list[IncomingTensor]:
    if not message.HasField("embed"):
        return []
    return [incomplete(message.embed.rows, "embed.rows", limits.max_tensor_bytes, payloads)]


def _answer_from_message(message: draft_pb2.Proposed, hidden: WireTensor | None = None) -> DraftAnswer:
    return tuple(message.tokens.token_ids) if hidden is None else hidden


def _answer_tensors(message: draft_pb2.Proposed, limits: TensorLimits, payloads: PayloadReader) -> list[IncomingTensor]:
    match message.WhichOneof("result"):
        case "tokens":
            return []
        case None:
            raise InvalidArgument("proposed.result is missing: expected tokens or project", field="proposed.result")
    return [incomplete(message.project.hidden, "project.hidden", limits.max_tensor_bytes, payloads)]


DRAFT_FRAMES: FrameKinds[DraftRequest] = {
    "feature_slice": FrameKind(slice_from_message, _slice_tensors),
    "propose": FrameKind(_propose_from_message, _propose_tensors),
    "snapshot_save": FrameKind(save_from_message),
    "snapshot_restore": FrameKind(restore_from_message),
}
"""What a draft's caller sends behind `open`."""

PROPOSED_FRAMES: FrameKinds[DraftAnswer] = {"proposed": FrameKind(_answer_from_message, _answer_tensors)}
"""What a draft answers to a `Propose`."""

PART_FRAMES: FrameKinds[SnapshotPart] = {"snapshot_part": FrameKind(part_from_message)}
"""What a draft answers to a `SnapshotSave` or `SnapshotRestore`."""
