"""A pair of segments between two processes: payloads go out through this process's own, in through the other's.

Owns both, the socket for streams' frames beside them, and the list of what was read and not yet confirmed. A stream
that sends payloads through it holds a `Sender`, whose end frees what nobody will read any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from flashsplit.shard.v1 import shared_memory_pb2 as pb
from services.errors import InvalidArgument
from services.same_host.frame_socket import FrameSocket, Lane
from services.same_host.ring import Payload, RingWriter, take
from services.same_host.segment import FIRST_OFFSET, OwnSegment, PeerSegment
from services.same_host.step_socket import StepSocket

RING_BYTES = 16 << 20
SEGMENT_BYTES = 2 * RING_BYTES
"""The first half is for payloads of streams, the second for steps that go past the event loop: each has its thread."""

PIECE_BYTES = 4 << 20
"""Larger payloads go in pieces of this size, so that one side writes while the other reads."""

MIN_SHARED_BYTES = 64 << 10
"""Smaller payloads are as fast within their frame."""

_CONFIRM_BYTES = RING_BYTES // 8


@dataclass(slots=True)
class Read:
    """Payloads that were read, and transfers of which no more will be."""

    sequences: list[int] = field(default_factory=list)
    transfer_ids: list[int] = field(default_factory=list)


class PayloadSender(Protocol):
    """What puts large payloads elsewhere than into a frame."""

    def put(self, data: memoryview) -> pb.SharedPayload | None:
        """Write a piece and name it; None where it should go within its frame."""


class PayloadReader(Protocol):
    """What finds payloads that a frame names."""

    def take(self, message: pb.SharedPayload, into: bytearray) -> None:
        """Append one. Raises InvalidArgument for what is not there as announced."""


class SharedLink:
    """Made when both sides have mapped the other's segment."""

    def __init__(self, link_id: int, own: OwnSegment, peer: PeerSegment) -> None:
        self.link_id, self.offer = link_id, own.offer
        self._own, self._peer = own, peer
        self._ring = RingWriter(own.view, FIRST_OFFSET, RING_BYTES)
        self._step_ring = RingWriter(own.view, RING_BYTES, SEGMENT_BYTES)
        self._read, self._read_bytes = Read(), 0
        self._transfers: dict[int, Sender] = {}
        self._transfer_ids = itertools.count(1)
        self._stream_ids = itertools.count(1)
        self._due = asyncio.Event()
        self._socket: FrameSocket | None = None
        self._step_socket: StepSocket | None = None
        self.closed = False

    def use(self, socket: FrameSocket) -> None:
        """Frames of streams may go through this from now on."""
        self._socket = socket

    def use_steps(self, socket: StepSocket) -> None:
        """Steps may go through this from now on."""
        if self.closed:
            socket.close()
        else:
            self._step_socket = socket

    @property
    def step_socket(self) -> StepSocket | None:
        socket = self._step_socket
        return None if socket is None or socket.closed else socket

    def begin_lane(self, message: pb.FrameLane) -> Lane | None:
        """For a stream that this process begins, named in its first frame; None where there is no socket."""
        if self._socket is None or self._socket.closed:
            return None
        message.link_id, message.stream_id = self.link_id, next(self._stream_ids)
        return self._socket.lane(message.stream_id)

    def lane(self, stream_id: int) -> Lane | None:
        """For a stream that the other process begins. Raises InvalidArgument for a number that is in use."""
        return None if self._socket is None or self._socket.closed else self._socket.lane(stream_id)

    def sender(self) -> Sender:
        """For one stream."""
        return Sender(self)

    def transfer(self, transfer_id: int) -> Sender:
        """For what the other side asked for; it says when that is over."""
        self._transfers[transfer_id] = self.sender()
        return self._transfers[transfer_id]

    def begin_transfer(self) -> int:
        """A name under which to ask the other side for something."""
        return next(self._transfer_ids)

    def end_transfer(self, transfer_id: int) -> None:
        """No more of it will be read here: the other side is told."""
        self._read.transfer_ids.append(transfer_id)
        self._due.set()

    def put(self, data: memoryview) -> Payload | None:
        """Write a payload; None where there is no room for it now."""
        return None if self.closed else self._ring.put(data)

    def name(self, payload: Payload) -> pb.SharedPayload:
        """As the other side is told of it."""
        return pb.SharedPayload(
            link_id=self.link_id, sequence=payload.sequence, offset=payload.offset, size_bytes=payload.size_bytes
        )

    def release(self, sequences: Iterable[int], transfer_ids: Iterable[int] = ()) -> None:
        """The other side has read these, or never will."""
        for sequence in sequences:
            self._ring.release(sequence)
        for transfer_id in transfer_ids:
            if (sender := self._transfers.pop(transfer_id, None)) is not None:
                sender.close()

    def holds(self, sequence: int) -> bool:
        """Whether a payload is still unread, as far as is known."""
        return self._ring.holds(sequence)

    def take(self, payload: Payload, into: bytearray) -> None:
        """Append a payload of the other side's. Raises InvalidArgument as `ring.take` does, and for a closed link."""
        if self.closed:
            raise InvalidArgument(f"link {self.link_id} is closed", field="shared.link_id")
        take(self._peer.view, payload, into)
        self._read.sequences.append(payload.sequence)
        self._read_bytes += payload.size_bytes
        # Not each time: a confirmation is a message of its own, and room is needed only when the ring comes round.
        if self._read_bytes >= _CONFIRM_BYTES:
            self._due.set()

    def put_step(self, data: memoryview) -> Payload | None:
        """As `put`, and the next ones as `release` and `take`, on the thread of steps; nothing is confirmed."""
        payload = self.reserve_step(len(data))
        return payload if payload is not None and self.write_step(payload, data) else None

    def reserve_step(self, size: int) -> Payload | None:
        """Room for a payload of so many bytes; None where there is none."""
        return None if self.closed else self._step_ring.reserve(size)

    def write_step(self, payload: Payload, data: memoryview) -> bool:
        """Into that room; whether it could be."""
        with contextlib.suppress(ValueError):
            # The event loop may unmap it meanwhile.
            if not self.closed:
                self._step_ring.write(payload, data)
                return True
        return False

    def release_step(self, sequence: int) -> None:
        self._step_ring.release(sequence)

    def take_step(self, message: pb.SharedPayload, into: bytearray) -> None:
        try:
            take(self._peer.view, _payload(message), into)
        except ValueError:
            raise InvalidArgument(f"link {self.link_id} is closed", field="shared.link_id") from None

    async def read(self) -> Read:
        """Wait until the other side should be told what was read; that."""
        await self._due.wait()
        self._due.clear()
        read, self._read, self._read_bytes = self._read, Read(), 0
        return read

    def close(self) -> None:
        """Unmap both. Safe to call twice."""
        self.closed = True
        if self._socket is not None:
            self._socket.close()
        if self._step_socket is not None:
            self._step_socket.close()
        self._own.close()
        self._peer.close()


class Sender:
    """What one stream puts into a link. Use `close` when the stream is over."""

    def __init__(self, link: SharedLink) -> None:
        self._link = link
        self._sent: deque[int] = deque()

    def put(self, data: memoryview) -> pb.SharedPayload | None:
        """Write a piece and name it; None where it should go within its frame: small, or without room."""
        if len(data) < MIN_SHARED_BYTES:
            return None
        payload = self._link.put(data)
        if payload is None:
            return None
        while self._sent and not self._link.holds(self._sent[0]):
            self._sent.popleft()
        self._sent.append(payload.sequence)
        return self._link.name(payload)

    def close(self) -> None:
        """What was not read never will be."""
        self._link.release(self._sent)
        self._sent.clear()


class SharedLinks:
    """A process's links by id."""

    def __init__(self, *links: SharedLink) -> None:
        self._links = {link.link_id: link for link in links}

    def add(self, link: SharedLink) -> None:
        self._links[link.link_id] = link

    def remove(self, link: SharedLink) -> None:
        self._links.pop(link.link_id, None)

    def get(self, link_id: int) -> SharedLink:
        """Raises InvalidArgument for an id that is none of these."""
        if link_id not in self._links:
            raise InvalidArgument(f"link_id {link_id} is no open link of this process", field="link_id")
        return self._links[link_id]

    def step_socket(self, message: pb.FrameLane) -> tuple[SharedLink, StepSocket] | None:
        """Where a caller sends steps that follow by themselves; None where that cannot be had."""
        link = self._links.get(message.link_id) if message.steps else None
        return None if link is None or link.step_socket is None else (link, link.step_socket)

    def lane(self, message: pb.FrameLane) -> Lane | None:
        """Where a caller wants to send its frames; None where that cannot be had. Raises InvalidArgument for a stream's
        number that is in use."""
        link = self._links.get(message.link_id)
        return None if link is None else link.lane(message.stream_id)

    def take(self, message: pb.SharedPayload, into: bytearray) -> None:
        """Append what a frame refers to. Raises InvalidArgument for what is not there as announced."""
        self.get(message.link_id).take(_payload(message), into)


def _payload(message: pb.SharedPayload) -> Payload:
    if not 0 < message.size_bytes <= PIECE_BYTES:
        raise InvalidArgument(
            f"shared.size_bytes is {message.size_bytes}; pieces have 1 to {PIECE_BYTES}", field="shared.size_bytes"
        )
    return Payload(message.sequence, message.offset, message.size_bytes)


NO_LINKS = SharedLinks()
"""For who shares no memory."""
