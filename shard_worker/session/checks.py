"""Whether what comes in fits its stage and session: a request to open one, its steps, their answers, and prefixes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from services.errors import FailedPrecondition, InvalidArgument
from services.messages.steps import (
    Commit,
    Forward,
    OpenSession,
    SnapshotRestore,
    SnapshotSave,
    StageTiming,
    StepKind,
)
from services.records import record
from shard_worker.device.dtypes import dtype_to_name
from shard_worker.ops.deltanet import CHUNK_ROWS
from shard_worker.stage.stage import Stage


def check_route(request: OpenSession, stage: Stage) -> None:
    """Check that a session is for this stage, and that the stages behind it hold all layers that are left.

    Raises FailedPrecondition for other layers than the stage's, InvalidArgument for a route that leaves out layers or
    has some twice.
    """
    if stage.layers != request.layers:
        raise FailedPrecondition(
            f"this worker holds layers {stage.layers}, the session expects {request.layers}",
            reason="LAYER_MISMATCH",
            field="layers",
        )
    reached = stage.layers.last
    for hop in request.route:
        if hop.layers.first != reached:
            raise InvalidArgument(
                f"route has layers {hop.layers} behind layer {reached}: gapped or overlapping", field="route"
            )
        reached = hop.layers.last
    if reached != stage.config.num_layers:
        raise InvalidArgument(
            f"the route ends at layer {reached}, the model has {stage.config.num_layers}", field="route"
        )


def check_limits(request: OpenSession, stage: Stage, max_rows: int) -> None:
    """Check the sizes and token ids of a session that is to be opened.

    max_rows: most rows of a step that the worker takes. Raises InvalidArgument naming the field that is out of range.
    """
    limits = {"max_length": stage.config.max_position, "max_rows": max_rows, "block_rows": CHUNK_ROWS}
    for field, most in limits.items():
        value = getattr(request, field)
        if not 1 <= value <= most:
            raise InvalidArgument(f"{field} is {value}; it must be between 1 and {most}", field=field)
    vocabulary = stage.config.vocab_size
    sampling = request.sampling
    named: dict[str, Collection[int]] = {
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_token_sequences": [token for sequence in sampling.bad_token_sequences for token in sequence],
    }
    for field, tokens in named.items():
        if any(token >= vocabulary for token in tokens):
            raise InvalidArgument(f"{field} has token {max(tokens)}; they must be below {vocabulary}", field=field)


def check_rows(forward: Forward, length: int, request: OpenSession, vocab_size: int) -> None:
    """Check the position, number and tokens of a step's rows.

    length: committed tokens. Raises FailedPrecondition for another position than that, InvalidArgument for rows that do
    not fit the session or the vocabulary.
    """
    rows = len(forward.token_ids)
    if forward.base_position != length:
        raise FailedPrecondition(
            f"base_position is {forward.base_position}, {length} tokens are committed",
            reason="OUT_OF_STEP",
            field="base_position",
        )
    if forward.kind is StepKind.RESUME:
        if rows or not length or forward.step:
            raise InvalidArgument(
                f"a resume has {rows} rows as step {forward.step}; it has none, and comes first after a restore",
                field="kind",
            )
        return
    most = request.block_rows if forward.kind is StepKind.VERIFY else request.max_rows
    if not 1 <= rows <= most:
        raise InvalidArgument(f"token_ids has {rows} rows; a {forward.kind} takes 1 to {most}", field="token_ids")
    if forward.base_position + rows > request.max_length:
        raise InvalidArgument(
            f"the step ends at position {forward.base_position + rows}, the session holds {request.max_length} tokens",
            reason="CONTEXT_OVERFLOW",
            field="base_position",
        )
    if max(forward.token_ids) >= vocab_size:
        raise InvalidArgument(
            f"token id {max(forward.token_ids)} is not below the vocabulary's {vocab_size}", field="token_ids"
        )


def check_tensors(forward: Forward, stage: Stage, captures: Sequence[int | None]) -> None:
    """Check the activation and the features that come with a step.

    captures: the capture indices of the features, in order; None stands for their sum. Raises InvalidArgument for
    another shape, element type, number of tensors or position.
    """
    check_activation(forward, stage)
    if forward.activation is None:
        return
    shape, dtype = forward.activation.shape, forward.activation.dtype
    sent = [piece.capture_index for piece in forward.features]
    if sent != captures:
        raise InvalidArgument(f"capture_index of the features is {sent}, expected {captures}", field="features")
    for piece in forward.features:
        expected = "float32" if piece.capture_index is None else dtype
        if piece.features.shape != shape or piece.features.dtype != expected:
            raise InvalidArgument(
                f"features has shape {list(piece.features.shape)} of {piece.features.dtype}; "
                f"expected {list(shape)} of {expected}",
                field="features",
            )
        if piece.start_position != forward.base_position:
            raise InvalidArgument(
                f"features start at {piece.start_position}, the step at {forward.base_position}",
                field="start_position",
            )


def check_activation(forward: Forward, stage: Stage) -> None:
    """Check a step's activation, which all stages but the first need.

    Raises InvalidArgument where it is missing or not needed, and for another shape or element type.
    """
    shape = (len(forward.token_ids), stage.config.hidden_size)
    if (forward.activation is None) != (stage.embedding is not None):
        accepted = "token ids alone" if stage.embedding is not None else "an activation"
        raise InvalidArgument(f"this stage takes {accepted}", field="activation")
    if forward.activation is None:
        return
    dtype = dtype_to_name(stage.dtype)
    if forward.activation.shape != shape or forward.activation.dtype != dtype:
        raise InvalidArgument(
            f"activation has shape {list(forward.activation.shape)} of {forward.activation.dtype}; "
            f"expected {list(shape)} of {dtype}",
            field="activation",
        )


def check_held(forward: Forward, held_length: int) -> None:
    """Check that a step's rows are computed already or yet to be computed, all of them.

    held_length: how many tokens are computed already. Raises InvalidArgument for rows before that position and behind.
    """
    first, last = forward.base_position, forward.base_position + len(forward.token_ids)
    if first < held_length < last:
        raise InvalidArgument(
            f"the step has rows {first} to {last}, and {held_length} tokens are held: end it there, and begin another",
            field="token_ids",
        )


def check_save(save: SnapshotSave, length: int, held_length: int) -> None:
    """Check that a prefix to be kept ends where the session is.

    length: committed tokens. held_length: how many were computed already when the session was opened. Raises
    FailedPrecondition for another length, where no token is committed, and where no row is computed behind those.
    """
    if held_length and length <= held_length:
        raise FailedPrecondition(
            f"length is {save.length}, and {held_length} tokens are held: a prefix is kept behind the next step",
            reason="OUT_OF_STEP",
            field="length",
        )
    if save.length != length or not save.length:
        raise FailedPrecondition(
            f"length is {save.length}, {length} tokens are committed: a prefix is kept where the session is",
            reason="OUT_OF_STEP",
            field="length",
        )


def check_restore(restore: SnapshotRestore, request: OpenSession, vocab_size: int) -> None:
    """Check the prefix from which a session is to begin.

    Raises InvalidArgument for a length that the session does not hold, for another number of tokens, and where the
    session asked for the log-probabilities of its prompt, which a prefix does not keep.
    """
    if request.prompt_logprobs is not None:
        raise InvalidArgument(
            "the session asked for prompt_logprobs, and a kept prefix has none: begin at the first token",
            field="prompt_logprobs",
        )
    if not 1 <= restore.length <= request.max_length:
        raise InvalidArgument(
            f"length is {restore.length}; the session holds 1 to {request.max_length} tokens", field="length"
        )
    if len(restore.token_ids) != restore.length or max(restore.token_ids) >= vocab_size:
        raise InvalidArgument(f"token_ids must be {restore.length} ids below {vocab_size}", field="token_ids")


@record(frozen=True, slots=True)
class PassedStep:
    """A step that was passed on to the next stage and has not been answered.

    base: the position of its first row. arrived_ns: when it came, by `time.monotonic_ns`. forward_ns: how long this
    stage computed. queued_ns: how long it waited here beside that. size_bytes: what was passed on.
    """

    step: int
    base: int
    rows: int
    kind: StepKind
    arrived_ns: int
    forward_ns: int
    queued_ns: int
    size_bytes: int
    propose_tokens: int
    more: int
    least_accepted: int
    together: bool = False

    @classmethod
    def of(cls, passed: Forward, arrived_ns: int, forward_ns: int, *, together: bool = False) -> PassedStep:
        """Return what is kept of a step that goes on now. passed: the step as the next stage gets it."""
        rows = len(passed.token_ids)
        return cls(
            passed.step,
            passed.base_position,
            rows,
            passed.kind,
            arrived_ns,
            forward_ns,
            max(0, time.monotonic_ns() - arrived_ns - forward_ns),
            passed.size_bytes,
            passed.propose_tokens,
            passed.more,
            passed.least_accepted,
            together,
        )

    def asked_for(self, commit: Commit) -> int:
        """Return how many draft tokens come behind the step's answer. A last stage of a release that spares none may
        not say how many it was asked for."""
        return commit.propose_tokens if self.least_accepted else self.propose_tokens

    def timing(self) -> StageTiming:
        """Return where the step's time went on this stage; to be called when it is answered."""
        return StageTiming(self.forward_ns, time.monotonic_ns() - self.arrived_ns, self.size_bytes)


def check_commit(commit: Commit, passed: PassedStep | None) -> PassedStep:
    """Return the step that a commit from below answers.

    passed: the step that has waited longest for its answer, None where none does. Raises FailedPrecondition where the
    commit does not fit it.
    """
    verify = passed is not None and passed.kind is StepKind.VERIFY
    if (
        passed is None
        or commit.step != passed.step
        or not passed.base + min(passed.rows, 1) <= commit.length <= passed.base + passed.rows
        or (not verify and commit.length != passed.base + passed.rows)
    ):
        waiting = "no step" if passed is None else f"step {passed.step} from {passed.base}"
        raise FailedPrecondition(
            f"commit of step {commit.step} to length {commit.length} came while {waiting} was waiting",
            reason="OUT_OF_STEP",
        )
    return passed
