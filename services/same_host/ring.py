"""A ring buffer in a segment: room for payloads, given out in turn and freed in any order.

Each payload lies behind a header of 64 bytes with its sequence number and size, so that a reader notices when another
payload lies where it looks for one.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

from services.errors import InvalidArgument
from services.same_host.segment import FIRST_OFFSET

HEADER = struct.Struct("=QQ")
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a payload lies in a segment. offset: its first byte, behind its header."""

    sequence: int
    offset: int
    size_bytes: int


@dataclass(slots=True)
class _Block:
    """The bytes [first, end) of the segment that one payload takes with its header."""

    sequence: int
    first: int
    end: int
    free: bool = False


class RingWriter:
    """Writes payloads into the bytes [first, end) of a segment of this process."""

    def __init__(self, view: memoryview, first: int, end: int) -> None:
        self._view, self._first, self._end = view, first, end
        self._blocks: deque[_Block] = deque()
        self._by_sequence: dict[int, _Block] = {}
        self._sequence = 0

    def put(self, data: memoryview) -> Payload | None:
        """Copy bytes into the ring and return where they lie, None while there is no room for them.

        Call `release` with the payload's sequence number when the room may be used again.
        """
        payload = self.reserve(len(data))
        if payload is not None:
            self.write(payload, data)
        return payload

    def reserve(self, size: int) -> Payload | None:
        """Keep room for a payload of `size` bytes and return where it will lie, None while there is no such room.

        Call `write` to copy the bytes, and `release` as behind `put`.
        """
        start = self._room(_aligned(_ALIGN + size))
        if start is None:
            return None
        self._sequence += 1
        offset = start + _ALIGN
        block = _Block(self._sequence, start, _aligned(offset + size))
        self._blocks.append(block)
        self._by_sequence[block.sequence] = block
        return Payload(block.sequence, offset, size)

    def write(self, payload: Payload, data: memoryview) -> None:
        """Copy bytes into room that was reserved for as many, and that was not released since."""
        self._view[payload.offset : payload.offset + payload.size_bytes] = data
        HEADER.pack_into(self._view, payload.offset - _ALIGN, payload.sequence, payload.size_bytes)

    def release(self, sequence: int) -> None:
        """Free a payload's room; numbers that were never given out, or are free already, are passed over."""
        block = self._by_sequence.pop(sequence, None)
        if block is None:
            return
        block.free = True
        while self._blocks and self._blocks[0].free:
            self._blocks.popleft()
        while self._blocks and self._blocks[-1].free:
            self._blocks.pop()

    def holds(self, sequence: int) -> bool:
        """Return whether a payload was not released yet."""
        return sequence in self._by_sequence

    def _room(self, size: int) -> int | None:
        """Return where so many bytes are free, None where they are not: behind the newest block or, past the end of
        the ring, before the oldest one."""
        first, end = self._first, self._end
        if not self._blocks:
            return first if first + size <= end else None
        oldest, newest_end = self._blocks[0].first, self._blocks[-1].end
        if newest_end <= oldest:
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= end:
            return newest_end
        return first if first + size <= oldest else None


def read_payload(view: memoryview, payload: Payload, into: bytearray | memoryview) -> None:
    """Append a payload of another process's segment to `into`, or fill it where that is memory of the payload's size.

    Raises InvalidArgument when the payload does not lie within the segment, and when another one lies there, before or
    after copying.
    """
    start = payload.offset - _ALIGN
    if start < FIRST_OFFSET or start % _ALIGN or payload.size_bytes > len(view) - payload.offset:
        raise InvalidArgument(
            f"shared.offset {payload.offset} with {payload.size_bytes} bytes is not within the segment's {len(view)}",
            field="shared.offset",
        )
    _check(view, start, payload)
    piece = view[payload.offset : payload.offset + payload.size_bytes]
    if isinstance(into, memoryview):
        into[:] = piece
    else:
        into += piece
    _check(view, start, payload)


def _check(view: memoryview, start: int, payload: Payload) -> None:
    sequence, size_bytes = HEADER.unpack_from(view, start)
    if (sequence, size_bytes) != (payload.sequence, payload.size_bytes) or not payload.sequence:
        raise InvalidArgument(
            f"payload {payload.sequence} of {payload.size_bytes} bytes was announced, and number {sequence} of "
            f"{size_bytes} lies there",
            field="shared.sequence",
        )


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
