"""Frames of several sessions at once, between two stages: the steps that one of them computed together, and their
answers.

The one translation between the dataclasses here and the messages of `stage.proto`. Remote values are checked as far as
this is possible without knowing the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flashsplit.shard.v1 import stage_pb2, stage_service_pb2 as pb
from services.errors import InvalidArgument
from services.messages.frames import FrameKind, FrameKinds, TensorLimits
from services.messages.session_frames import (
    commit_from_message,
    commit_to_message,
    fill_step,
    forward_from_activation,
    proposal_from_message,
    proposal_to_message,
    slice_from_message,
    slice_to_message,
    step_tensors,
)
from services.messages.steps import Commit, FeatureSlice, Forward, Proposal
from services.messages.tensors import IncomingTensor, OutgoingTensors, WireTensor
from services.records import record
from services.same_host.link import PayloadReader, PayloadSender


class _RowsOf:
    """Cuts rows out of a tensor [rows, columns]."""

    def __init__(self, tensor: WireTensor) -> None:
        rows, self._columns = tensor.shape
        self._dtype, self._data = tensor.dtype, memoryview(tensor.data)
        self._row_bytes = len(self._data) // max(rows, 1)

    def cut(self, first: int, end: int) -> WireTensor:
        """Return rows [first, end), which are not copied."""
        data = self._data[first * self._row_bytes : end * self._row_bytes]
        return WireTensor(self._dtype, (end - first, self._columns), data)


@record(frozen=True, slots=True)
class BatchStep:
    """One session's step in a batch. stream_id: the session's number between the two processes."""

    stream_id: int
    forward: Forward


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Steps of several sessions that a stage computed together, for the next one to compute together.

    steps: without tensors. activation: the residual stream, [rows, hidden], one step's rows behind the other's.
    features: of the same rows.
    """

    steps: tuple[BatchStep, ...]
    activation: WireTensor
    features: tuple[FeatureSlice, ...] = ()

    def whole_steps(self) -> Iterator[BatchStep]:
        """Yield the steps with their own rows of the tensors, which are not copied."""
        activation = _RowsOf(self.activation)
        features = [(piece.capture_index, _RowsOf(piece.features)) for piece in self.features]
        end = 0
        for step in self.steps:
            forward = step.forward
            first, end = end, end + len(forward.token_ids)
            pieces = tuple(FeatureSlice(forward.base_position, rows.cut(first, end), index) for index, rows in features)
            yield BatchStep(step.stream_id, forward.with_rows(activation.cut(first, end), pieces))


@dataclass(frozen=True, slots=True)
class PreparedFrame:
    """A batch's frame before its tensors are there.

    steps: as of `StepBatch`. message: with the steps, and nothing else; None on a way that makes it of the whole batch.
    """

    steps: tuple[BatchStep, ...]
    message: pb.RunStageRequest | None


@record(frozen=True, slots=True)
class BatchAnswer:
    """What one session's step in a batch came to. proposal: where draft tokens were asked for, else None."""

    stream_id: int
    commit: Commit
    proposal: Proposal | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswers:
    """Answers to steps in batches. batches_read: how many of them their sender has read."""

    answers: tuple[BatchAnswer, ...]
    batches_read: int = 0


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """What single rows of a batch came to, ahead of the answers to their steps: of each row its session's number, its
    step, and the token."""

    stream_ids: Sequence[int]
    steps: Sequence[int]
    token_ids: Sequence[int]


RequestT = TypeVar("RequestT", pb.RunStageRequest, pb.RunBatchesRequest)


def steps_to_message(steps: Iterable[BatchStep], kind: type[RequestT]) -> RequestT:
    """Return the message of a batch without its tensors."""
    message = kind()
    for step in steps:
        one = message.step_batch.steps.add()
        one.stream_id = step.stream_id
        fill_step(step.forward, one.forward)
    return message


def batch_to_messages(
    batch: StepBatch, kind: type[RequestT], sender: PayloadSender | None = None, begun: RequestT | None = None
) -> Iterator[RequestT]:
    """Return the batch's message, and behind it the chunks of its tensors.

    kind: the messages of the way that it goes. sender: puts large tensors into memory that the other side shares.
    begun: what `steps_to_message` has returned for its steps, which is the message then.
    """
    message, tensors = steps_to_message(batch.steps, kind) if begun is None else begun, OutgoingTensors(sender)
    body = message.step_batch
    tensors.put(batch.activation, body.activation)
    for piece in batch.features:
        slice_to_message(piece, body.features.add(), tensors)
    yield message
    for chunk in tensors.chunks():
        yield kind(chunk=chunk)


def _batch_from_message(message: stage_pb2.StepBatch, activation: WireTensor, *features: WireTensor) -> StepBatch:
    steps = tuple(BatchStep(one.stream_id, forward_from_activation(one.forward, None)) for one in message.steps)
    if len({step.stream_id for step in steps}) < len(steps):
        raise InvalidArgument("a batch has one step of a session, and stream_id names one twice", field="stream_id")
    rows = sum(len(step.forward.token_ids) for step in steps)
    for field, tensor in (("activation", activation), *(("features", tensor) for tensor in features)):
        if len(tensor.shape) != 2 or tensor.shape[0] != rows:
            raise InvalidArgument(
                f"{field} has shape {list(tensor.shape)}; the batch's steps have {rows} rows", field=field
            )
    pieces = zip(message.features, features, strict=True)
    return StepBatch(steps, activation, tuple(slice_from_message(piece, tensor) for piece, tensor in pieces))


def _batch_tensors(message: stage_pb2.StepBatch, limits: TensorLimits, payloads: PayloadReader) -> list[IncomingTensor]:
    return step_tensors(message, limits, payloads)


BATCH_FRAMES: FrameKinds[StepBatch] = {"step_batch": FrameKind(_batch_from_message, _batch_tensors)}
"""What goes down the chain for several sessions at once."""


def tokens_to_message(tokens: BatchTokens) -> stage_pb2.BatchTokens:
    """Return the tokens' message."""
    return stage_pb2.BatchTokens(stream_ids=tokens.stream_ids, steps=tokens.steps, token_ids=tokens.token_ids)


def tokens_from_message(message: stage_pb2.BatchTokens) -> BatchTokens:
    """Return the tokens. Raises InvalidArgument where the lists are not equally long."""
    tokens = BatchTokens([*message.stream_ids], [*message.steps], [*message.token_ids])
    if not len(tokens.stream_ids) == len(tokens.steps) == len(tokens.token_ids):
        raise InvalidArgument(
            f"stream_ids, steps and token_ids have {len(tokens.stream_ids)}, {len(tokens.steps)} and "
            f"{len(tokens.token_ids)} items; they have equally many",
            field="batch_tokens",
        )
    return tokens


def answers_to_message(answers: Iterable[BatchAnswer], batches_read: int = 0) -> stage_pb2.BatchAnswers:
    """Return the answers' message."""
    message = stage_pb2.BatchAnswers(batches_read=batches_read)
    for answer in answers:
        one = message.answers.add()
        one.stream_id = answer.stream_id
        one.commit.CopyFrom(commit_to_message(answer.commit))
        if answer.proposal is not None:
            one.proposal.CopyFrom(proposal_to_message(answer.proposal))
    return message


def answers_from_message(message: stage_pb2.BatchAnswers) -> BatchAnswers:
    """Return the answers. Raises InvalidArgument for log-probabilities that make no sense."""
    return BatchAnswers(
        tuple(
            BatchAnswer(
                one.stream_id,
                commit_from_message(one.commit),
                proposal_from_message(one.proposal) if one.HasField("proposal") else None,
            )
            for one in message.answers
        ),
        message.batches_read,
    )
