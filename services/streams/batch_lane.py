"""The way of steps that were computed together, between two processes of one host: one frame for all their sessions.

Down the chain goes a batch of steps with one activation, up the chain the answers to them, from one device thread to
the other. All sessions between the two processes share it. Everything here runs on the thread that reads the socket but
where it says otherwise.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flashsplit.shard.v1 import shared_memory_pb2, stage_service_pb2 as pb
from services.errors import FlashsplitError, InvalidArgument
from services.messages.batch_frames import (
    BATCH_FRAMES,
    BatchAnswer,
    BatchStep,
    BatchTokens,
    PreparedFrame,
    StepBatch,
    answers_from_message,
    answers_to_message,
    batch_to_messages,
    steps_to_message,
    tokens_from_message,
    tokens_to_message,
)
from services.messages.frames import FrameReader
from services.same_host.link import SharedLink
from services.same_host.step_socket import MAX_PACKET_BYTES, StepSocket
from services.streams.batch_members import BatchMembers, MemberT

STREAM_ID = 0
"""The number of this way among the streams of the socket; sessions have others."""

INLINE_BYTES = MAX_PACKET_BYTES // 4
"""The most bytes of a batch's tensors that go within its packet; the others go through shared memory."""

_ROOM_BYTES = 1 << 10
"""The packet's room for what is beside its message."""


class BatchLane(BatchMembers[MemberT]):
    """One end of the way."""

    def __init__(self, link: SharedLink, socket: StepSocket, *, above: bool) -> None:
        """above: whether this end sends steps and takes answers, and not the other way round."""
        super().__init__()
        self._link, self._socket, self._above = link, socket, above
        self._reader: FrameReader[StepBatch] | None = None
        """Of a batch whose tensors come in several packets."""
        self._unread: deque[tuple[int, Sequence[int]]] = deque()
        """Batches that were sent and maybe not read, by their number, with what they have in shared memory."""
        self._sent_count = self._read_count = 0
        socket.join(STREAM_ID, self._take)

    @classmethod
    def of(cls, link: SharedLink, socket: StepSocket, *, above: bool) -> BatchLane[MemberT]:
        """Return the end at this socket, which all sessions share; on the event loop."""
        return socket.shared(lambda: cls(link, socket, above=above))

    def prepare_steps(self, steps: tuple[BatchStep, ...]) -> PreparedFrame:
        return PreparedFrame(steps, steps_to_message(steps, pb.RunStageRequest))

    def send_steps(self, batch: StepBatch, prepared: PreparedFrame | None = None) -> bool:
        """Send a batch down the chain; return False where its steps have to go another way."""
        payloads, begun = _Payloads(self._link, self.memory_for), None if prepared is None else prepared.message
        messages = batch_to_messages(batch, pb.RunStageRequest, payloads, begun)
        packets = [message.SerializeToString() for message in messages]
        fit = max(map(len, packets)) <= MAX_PACKET_BYTES - _ROOM_BYTES
        sent = sum(1 for _ in itertools.takewhile(self._send, packets)) if fit else 0
        if sent == 0:
            self._free(payloads.sequences)
            return False
        # Of a part the other side makes nothing, but may be reading it, until it has the next batch.
        self._unread.append((self._sent_count + 1, payloads.sequences))
        self._sent_count += sent == len(packets)
        return sent == len(packets)

    def send_answers(self, answers: Sequence[BatchAnswer]) -> bool:
        """Send answers up the chain, in as many packets as they need; return False where one could not be sent."""
        message = answers_to_message(answers, self._read_count)
        packet = pb.RunStageResponse(batch_answers=message).SerializeToString()
        if len(packet) > MAX_PACKET_BYTES - _ROOM_BYTES and len(answers) > 1:
            half = len(answers) // 2
            return self.send_answers(answers[:half]) and self.send_answers(answers[half:])
        return self._send(packet)

    def send_tokens(self, tokens: BatchTokens) -> None:
        if self.takes_tokens:
            self._send(pb.RunStageResponse(batch_tokens=tokens_to_message(tokens)).SerializeToString())

    # ---

    def _send(self, packet: bytes) -> bool:
        return self._socket.send(STREAM_ID, packet)

    def _free(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._link.release_step(sequence)

    def _take(self, packet: memoryview) -> None:
        try:
            self.before_reading()
            if self._above:
                self._take_answers(_parsed(pb.RunStageResponse, packet))
            else:
                self._take_steps(_parsed(pb.RunStageRequest, packet))
        except FlashsplitError as error:
            self.fail(error)

    def _take_steps(self, message: pb.RunStageRequest) -> None:
        if self._reader is None or message.WhichOneof("frame") == "step_batch":
            # A batch that is not whole when the next one comes never will be.
            limits = self.limits(message.step_batch)
            self._reader = FrameReader(BATCH_FRAMES, limits, _Payloads(self._link, self.memory_for))
        batch = self._reader.read(message)
        if batch is None:
            return
        self._reader = None
        self._read_count += 1
        self.take_batch(batch)

    def _take_answers(self, message: pb.RunStageResponse) -> None:
        if message.WhichOneof("frame") == "batch_tokens":
            self.take_tokens(tokens_from_message(message.batch_tokens))
            return
        if message.WhichOneof("frame") != "batch_answers":
            raise InvalidArgument("frame is not batch_answers", field="frame")
        read = answers_from_message(message.batch_answers)
        while self._unread and self._unread[0][0] <= read.batches_read:
            self._free(self._unread.popleft()[1])
        self.take_answers(read.answers)


@dataclass(slots=True)
class _Payloads:
    """Puts a batch's tensors into shared memory, but for some small ones, and reads them.

    memory_for: as of `PayloadReader`.
    """

    link: SharedLink
    memory_for: Callable[[int], bytearray | memoryview]
    sequences: list[int] = field(default_factory=list)
    inline_bytes: int = 0

    def put(self, data: memoryview) -> shared_memory_pb2.SharedPayload | None:
        """Write a piece into shared memory and name it, as `PayloadSender` says."""
        if self.inline_bytes + len(data) <= INLINE_BYTES:
            self.inline_bytes += len(data)
            return None
        payload = self.link.put_step(data)
        if payload is None:
            return None
        self.sequences.append(payload.sequence)
        return self.link.name(payload)

    def read_payload(self, message: shared_memory_pb2.SharedPayload, into: bytearray | memoryview) -> None:
        """Copy a payload of the other side, as `PayloadReader` says."""
        self.link.read_step_payload(message, into)


MessageT = TypeVar("MessageT", pb.RunStageRequest, pb.RunStageResponse)


def _parsed(kind: type[MessageT], packet: memoryview) -> MessageT:
    try:
        return kind.FromString(bytes(packet))
    except Exception as error:
        raise InvalidArgument("steps that were together could not be parsed", reason="GARBLED") from error
