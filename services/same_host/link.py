"""A link: a pair of segments between two processes. Payloads go out through this process's own and come in through the
other's.

It owns both segments, the sockets beside them, and the list of what was read and not yet confirmed. A stream that sends
payloads through it holds a `LinkSender`, whose end frees what nobody will read any more.
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
from services.same_host.frame_socket import FrameLane, FrameSocket
from services.same_host.ring import Payload, RingWriter, read_payload
from services.same_host.segment import FIRST_OFFSET, OwnSegment, PeerSegment
from services.same_host.step_socket import StepSocket

RING_BYTES = 16 << 20
SEGMENT_BYTES = 4 * RING_BYTES
"""The first quarter of a segment is for payloads of streams, which the event loop writes; the others are for those of
steps that go past it, which the device thread writes: each stage has several batches on their way, of up to 12 MB with
the features of 512 rows, and what finds no room takes ten times as long within its frames."""

PIECE_BYTES = 4 << 20
"""Larger tensors go in pieces of this size, so that one side writes while the other reads."""

MIN_SHARED_BYTES = 64 << 10
"""Smaller tensors are as fast within their frame."""

_CONFIRM_BYTES = RING_BYTES // 8


@dataclass(slots=True)
class Consumed:
    """The payloads that were read, and the transfers of which no more will be read."""

    sequences: list[int] = field(default_factory=list)
    transfer_ids: list[int] = field(default_factory=list)


class PayloadSender(Protocol):
    """Puts large tensors elsewhere than into a frame."""

    def put(self, data: memoryview) -> pb.SharedPayload | None:
        """Write a tensor's piece and return its name, None where it should go within its frame."""


class PayloadReader(Protocol):
    """Finds the payloads that a frame names."""

    def memory_for(self, size_bytes: int) -> bytearray | memoryview:
        """Return where the payloads of a tensor are to go: memory of its size, or a bytearray to append them to."""

    def read_payload(self, message: pb.SharedPayload, into: bytearray | memoryview) -> None:
        """Append a payload to `into`, or fill it where that is memory of its size. Raises InvalidArgument for one that
        is not there as announced."""


class SharedLink:
    """One end of a link whose two processes have mapped each other's segment. Use `close`."""

    def __init__(self, link_id: int, own: OwnSegment, peer: PeerSegment) -> None:
        self.link_id, self.offer = link_id, own.offer
        self._own, self._peer = own, peer
        self._ring = RingWriter(own.view, FIRST_OFFSET, RING_BYTES)
        self._step_ring = RingWriter(own.view, RING_BYTES, SEGMENT_BYTES)
        self._consumed, self._consumed_bytes = Consumed(), 0
        self._transfers: dict[int, LinkSender] = {}
        self._transfer_ids = itertools.count(1)
        self._stream_ids = itertools.count(1)
        self._confirmation_due = asyncio.Event()
        self._frame_socket: FrameSocket | None = None
        self._step_socket: StepSocket | None = None
        self.closed = False

    def use_frame_socket(self, socket: FrameSocket) -> None:
        """Let frames of streams go through this socket from now on."""
        self._frame_socket = socket

    def use_step_socket(self, socket: StepSocket) -> None:
        """Let steps go through this socket from now on."""
        if self.closed:
            socket.close()
        else:
            self._step_socket = socket

    @property
    def frame_socket(self) -> FrameSocket | None:
        """The socket for frames of streams, None where there is none or it is closed."""
        socket = self._frame_socket
        return None if socket is None or socket.closed else socket

    @property
    def step_socket(self) -> StepSocket | None:
        """The socket for steps, None where there is none or it is closed."""
        socket = self._step_socket
        return None if socket is None or socket.closed else socket

    def begin_lane(self, message: pb.FrameLane) -> FrameLane | None:
        """Return a lane for a stream that this process begins, None where there is no socket.

        message: a field of the stream's first frame, which is filled with the lane's name.
        """
        socket = self.frame_socket
        if socket is None:
            return None
        message.link_id, message.stream_id = self.link_id, next(self._stream_ids)
        return socket.lane(message.stream_id)

    def lane(self, stream_id: int) -> FrameLane | None:
        """Return the lane of a stream that the other process begins, None where there is no socket.

        Raises InvalidArgument for a number that is in use.
        """
        socket = self.frame_socket
        return None if socket is None else socket.lane(stream_id)

    def sender(self) -> LinkSender:
        """Return a sender for one stream."""
        return LinkSender(self)

    def transfer(self, transfer_id: int) -> LinkSender:
        """Return a sender for what the other side asked for; the other side says when it is over."""
        self._transfers[transfer_id] = self.sender()
        return self._transfers[transfer_id]

    def begin_transfer(self) -> int:
        """Return a number under which to ask the other side for something."""
        return next(self._transfer_ids)

    def end_transfer(self, transfer_id: int) -> None:
        """Tell the other side that no more of a transfer will be read here."""
        self._consumed.transfer_ids.append(transfer_id)
        self._confirmation_due.set()

    def put(self, data: memoryview) -> Payload | None:
        """Write a payload and return where it lies, None where there is no room for it now."""
        return None if self.closed else self._ring.put(data)

    def name(self, payload: Payload) -> pb.SharedPayload:
        """Return the message by which the other side finds a payload."""
        return pb.SharedPayload(
            link_id=self.link_id, sequence=payload.sequence, offset=payload.offset, size_bytes=payload.size_bytes
        )

    def release(self, sequences: Iterable[int], transfer_ids: Iterable[int] = ()) -> None:
        """Free what the other side has read, or never will: payloads, and all payloads of transfers."""
        for sequence in sequences:
            self._ring.release(sequence)
        for transfer_id in transfer_ids:
            if (sender := self._transfers.pop(transfer_id, None)) is not None:
                sender.close()

    def holds(self, sequence: int) -> bool:
        """Return whether a payload is still unread, as far as this side knows."""
        return self._ring.holds(sequence)

    def read_payload(self, payload: Payload, into: bytearray | memoryview) -> None:
        """Copy a payload of the other side's into `into`, as `PayloadReader` says.

        Raises InvalidArgument as `ring.read_payload` does, and for a closed link.
        """
        if self.closed:
            raise InvalidArgument(f"link {self.link_id} is closed", field="shared.link_id")
        read_payload(self._peer.view, payload, into)
        self._consumed.sequences.append(payload.sequence)
        self._consumed_bytes += payload.size_bytes
        # Not each time: a confirmation is a message of its own, and room is needed only when the ring comes round.
        if self._consumed_bytes >= _CONFIRM_BYTES:
            self._confirmation_due.set()

    async def next_consumed(self) -> Consumed:
        """Wait until the other side should be told what was read, and return that."""
        await self._confirmation_due.wait()
        self._confirmation_due.clear()
        consumed, self._consumed, self._consumed_bytes = self._consumed, Consumed(), 0
        return consumed

    # --- called on the thread of steps; of these nothing is confirmed

    def put_step(self, data: memoryview) -> Payload | None:
        """Write a payload and return where it lies, None where there is no room for it now."""
        payload = self.reserve_step(len(data))
        return payload if payload is not None and self.write_step(payload, data) else None

    def reserve_step(self, size: int) -> Payload | None:
        """Keep room for a payload of `size` bytes and return where it will lie, None where there is no room now."""
        return None if self.closed else self._step_ring.reserve(size)

    def write_step(self, payload: Payload, data: memoryview) -> bool:
        """Copy bytes into reserved room; return False where the link is closed."""
        with contextlib.suppress(ValueError):
            # The event loop may unmap the segment meanwhile.
            if not self.closed:
                self._step_ring.write(payload, data)
                return True
        return False

    def release_step(self, sequence: int) -> None:
        """Free a payload that the other side has read, or never will."""
        self._step_ring.release(sequence)

    def read_step_payload(self, message: pb.SharedPayload, into: bytearray | memoryview) -> None:
        """Do as `read_payload`, with the same errors."""
        try:
            read_payload(self._peer.view, _payload(message), into)
        except ValueError:
            raise InvalidArgument(f"link {self.link_id} is closed", field="shared.link_id") from None

    # ---

    def close(self) -> None:
        """End the streams and unmap both segments. Safe to call twice."""
        self.closed = True
        if self._frame_socket is not None:
            self._frame_socket.close()
        if self._step_socket is not None:
            self._step_socket.close()
        self._own.close()
        self._peer.close()


class LinkSender:
    """Puts the payloads of one stream into a link, as a `PayloadSender`. Use `close` when the stream is over."""

    def __init__(self, link: SharedLink) -> None:
        self._link = link
        self._sent: deque[int] = deque()

    def put(self, data: memoryview) -> pb.SharedPayload | None:
        """Write a piece and return its name, None where it should go within its frame: it is small, or there is no
        room now."""
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
        """Free what was not read, which never will be."""
        self._link.release(self._sent)
        self._sent.clear()


class SharedLinks:
    """The links of a process, by their number."""

    def __init__(self, *links: SharedLink) -> None:
        self._links = {link.link_id: link for link in links}

    def add(self, link: SharedLink) -> None:
        self._links[link.link_id] = link

    def remove(self, link: SharedLink) -> None:
        self._links.pop(link.link_id, None)

    def get(self, link_id: int) -> SharedLink:
        """Return a link. Raises InvalidArgument for a number that is none of these."""
        if link_id not in self._links:
            raise InvalidArgument(f"link_id {link_id} is no open link of this process", field="link_id")
        return self._links[link_id]

    def step_socket(self, message: pb.FrameLane) -> tuple[SharedLink, StepSocket] | None:
        """Return where a caller sends steps that follow by themselves, or takes answers of several sessions at once;
        None where that cannot be had."""
        link = self._links.get(message.link_id) if message.steps or message.batches else None
        return None if link is None or link.step_socket is None else (link, link.step_socket)

    def lane(self, message: pb.FrameLane) -> FrameLane | None:
        """Return where a caller wants to send its frames, None where that cannot be had.

        Raises InvalidArgument for a stream's number that is in use.
        """
        link = self._links.get(message.link_id)
        return None if link is None else link.lane(message.stream_id)

    def memory_for(self, _: int) -> bytearray:
        """Have payloads appended, as `PayloadReader` says."""
        return bytearray()

    def read_payload(self, message: pb.SharedPayload, into: bytearray | memoryview) -> None:
        """Copy what a frame refers to, as `PayloadReader` says."""
        self.get(message.link_id).read_payload(_payload(message), into)


def _payload(message: pb.SharedPayload) -> Payload:
    if not 0 < message.size_bytes <= PIECE_BYTES:
        raise InvalidArgument(
            f"shared.size_bytes is {message.size_bytes}; pieces have 1 to {PIECE_BYTES}", field="shared.size_bytes"
        )
    return Payload(message.sequence, message.offset, message.size_bytes)


NO_LINKS = SharedLinks()
"""The links of a process that shares no memory."""
