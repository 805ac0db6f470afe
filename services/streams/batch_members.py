"""The sessions between two processes whose steps go together, whichever way: whose is what comes, and who takes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from flashsplit.shard.v1 import stage_pb2
from services.errors import FlashsplitError
from services.messages.batch_frames import BatchAnswer, BatchStep, BatchTokens, PreparedFrame, StepBatch
from services.messages.frames import NO_TENSORS, TensorLimits
from services.messages.steps import Forward
from services.messages.tensors import WireTensor

MemberT = TypeVar("MemberT")
MemberT_contra = TypeVar("MemberT_contra", contravariant=True)


class BatchListener(Protocol[MemberT_contra]):
    """Who takes what comes for sessions that were together, in the order in which it stands in the frame."""

    def before_reading(self) -> None:
        """Do what is to be done before a frame that has come is read."""

    def memory_for(self, size_bytes: int) -> bytearray | memoryview:
        """Return where a tensor of a batch is to go that comes through shared memory, as `PayloadReader` says."""

    def take_steps(
        self,
        steps: Iterable[tuple[MemberT_contra, Forward]],
        bare: Sequence[tuple[MemberT_contra, Forward]] = (),
        activation: WireTensor | None = None,
    ) -> None:
        """Take the steps of a batch, at the end below. They are made as they are asked for.

        bare: the same steps without tensors, by which single rows that need no others than `activation`, that of all
        of them, can be begun before; none where that cannot be.
        """

    def take_answers(self, answers: Sequence[tuple[MemberT_contra, BatchAnswer]]) -> None:
        """Take answers to steps of batches, at the end above."""

    def take_tokens(self, tokens: Sequence[tuple[MemberT_contra, int, int]]) -> None:
        """Take what steps came to whose answers are still to come, at the end above: of each its session, its number
        and its token."""

    def fail(self, members: Sequence[MemberT_contra], error: FlashsplitError) -> None:
        """End sessions of which something came that could not be read."""


class BatchMembers(ABC, Generic[MemberT]):
    """One end of a way of batches. MemberT: what a session is to who listens."""

    def __init__(self) -> None:
        self._members: dict[int, tuple[MemberT, BatchListener[MemberT]]] = {}
        self._largest = NO_TENSORS
        """The most that a step of any session so far might bring."""
        self.takes_tokens = False
        """Whether the other end takes tokens ahead of the answers to their steps."""

    def join(
        self,
        stream_id: int,
        member: MemberT,
        listener: BatchListener[MemberT],
        limits: TensorLimits = NO_TENSORS,
    ) -> None:
        """Begin a session's part; may be called on any thread. limits: what its steps may bring."""
        self._members[stream_id] = member, listener
        self._largest = TensorLimits(
            max(self._largest.max_tensor_bytes, limits.max_tensor_bytes),
            max(self._largest.max_feature_slices, limits.max_feature_slices),
        )

    def leave(self, stream_id: int) -> None:
        """Pass over what comes for a session from now on; on any thread. Safe to call twice."""
        self._members.pop(stream_id, None)

    def prepare_steps(self, steps: tuple[BatchStep, ...]) -> PreparedFrame:
        """Return what can be made of a batch's frame before its tensors are there, on the device thread."""
        return PreparedFrame(steps, None)

    @abstractmethod
    def send_steps(self, batch: StepBatch, prepared: PreparedFrame | None = None) -> bool:
        """Send a batch down the chain, on the device thread; return False where its steps have to go another way.
        prepared: what was made of its frame before, which is used for no other."""

    @abstractmethod
    def send_answers(self, answers: Sequence[BatchAnswer]) -> bool:
        """Send answers up the chain, on the device thread; return False where they could not be sent."""

    def send_tokens(self, tokens: BatchTokens) -> None:
        """Send tokens up the chain ahead of the answers to their steps, where the other end takes such, on the device
        thread. They may be lost."""

    # --- what came

    def limits(self, message: stage_pb2.StepBatch) -> TensorLimits:
        """Return what a batch may bring. The other side may still send steps of sessions that are over here."""
        largest = self._largest
        return TensorLimits(len(message.steps) * largest.max_tensor_bytes, largest.max_feature_slices)

    def before_reading(self) -> None:
        """Say that a frame has come and is about to be read."""
        for _, listener in [*self._members.values()][:1]:
            listener.before_reading()

    def memory_for(self, size_bytes: int) -> bytearray | memoryview:
        """Return where a tensor of a batch is to go that comes through shared memory."""
        for _, listener in [*self._members.values()][:1]:
            return listener.memory_for(size_bytes)
        return bytearray()

    def take_batch(self, batch: StepBatch) -> None:
        """Hand over the steps of a batch, but for those of sessions that are over here."""
        members = [self._members.get(step.stream_id) for step in batch.steps]
        known = [one for one in members if one is not None]
        if not known:
            return
        whole = zip(members, batch.whole_steps(), strict=True)
        steps = ((one[0], step.forward) for one, step in whole if one is not None)
        if len(known) < len(members) or batch.features:
            known[0][1].take_steps(steps)
            return
        # What is to be known of each takes as long as a layer.
        bare = [(member, step.forward) for (member, _), step in zip(known, batch.steps, strict=True)]
        known[0][1].take_steps(steps, bare, batch.activation)

    def take_answers(self, answers: Iterable[BatchAnswer]) -> None:
        """Hand over answers."""
        # Looked up once: another thread may let a session leave at any time.
        known = [(member, one) for one in answers if (member := self._members.get(one.stream_id))]
        for (_, listener), _ in known[:1]:
            listener.take_answers([(member, one) for (member, _), one in known])

    def take_tokens(self, tokens: BatchTokens) -> None:
        """Hand over tokens whose answers are still to come."""
        all_known = [*map(self._members.get, tokens.stream_ids)]
        came = zip(all_known, tokens.steps, tokens.token_ids, strict=True)
        known = [(one[0], step, token) for one, step, token in came if one is not None]
        for one in [one for one in all_known if one is not None][:1]:
            one[1].take_tokens(known)

    def fail(self, error: FlashsplitError) -> None:
        """End all sessions."""
        members = [*self._members.values()]
        for _, listener in members[:1]:
            listener.fail([member for member, _ in members], error)
