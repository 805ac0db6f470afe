"""Room for payloads within a segment, given out in turn and taken back in any order.

Each payload lies behind a header with its sequence number and size, so that a reader notices when what it was told of
is not what lies there.
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
    """Where one lies. offset: of its first byte."""

    sequence: int
    offset: int
    size_bytes: int


@dataclass(slots=True)
class _Block:
    sequence: int
    first: int
    behind: int
    free: bool = False


class RingWriter:
    """Writes payloads into bytes [first, end) of a segment of this process."""

    def __init__(self, view: memoryview, first: int, end: int) -> None:
        self._view, self._first, self._end = view, first, end
        self._blocks: deque[_Block] = deque()
        self._by_sequence: dict[int, _Block] = {}
        self._sequence = 0

    def put(self, data: memoryview) -> Payload | None:
        """Copy bytes in; None while there is no room. Room comes back by `release`."""
        payload = self.reserve(len(data))
        if payload is not None:
            self.write(payload, data)
        return payload

    def reserve(self, size: int) -> Payload | None:
        """Room for so many bytes, which `write` brings; as `put` else."""
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
        """Into room that was reserved for so many bytes, and not released since."""
        self._view[payload.offset : payload.offset + payload.size_bytes] = data
        HEADER.pack_into(self._view, payload.offset - _ALIGN, payload.sequence, payload.size_bytes)

    def release(self, sequence: int) -> None:
        """Take room back; numbers that were never given out, or are back already, are passed over."""
        block = self._by_sequence.pop(sequence, None)
        if block is None:
            return
        block.free = True
        while self._blocks and self._blocks[0].free:
            self._blocks.popleft()
        while self._blocks and self._blocks[-1].free:
            self._blocks.pop()

    def holds(self, sequence: int) -> bool:
        """Whether a payload was not released yet."""
        return sequence in self._by_sequence

    def _room(self, size: int) -> int | None:
        """Where so many bytes are free: behind the newest block or, past the end, before the oldest."""
        first, end = self._first, self._end
        if not self._blocks:
            return first if first + size <= end else None
        oldest, newest = self._blocks[0].first, self._blocks[-1].behind
        if newest <= oldest:
            return newest if newest + size <= oldest else None
        if newest + size <= end:
            return newest
        return first if first + size <= oldest else None


def take(view: memoryview, payload: Payload, into: bytearray) -> None:
    """Append a payload from another process's segment.

    Raises InvalidArgument when it does not lie within the segment, or something else lies there, before or after
    copying.
    """
    start = payload.offset - _ALIGN
    if start < FIRST_OFFSET or start % _ALIGN or payload.size_bytes > len(view) - payload.offset:
        raise InvalidArgument(
            f"shared.offset {payload.offset} with {payload.size_bytes} bytes is not within the segment's {len(view)}",
            field="shared.offset",
        )
    _check(view, start, payload)
    into += view[payload.offset : payload.offset + payload.size_bytes]
    _check(view, start, payload)


def _check(view: memoryview, start: int, payload: Payload) -> None:
    there = HEADER.unpack_from(view, start)
    if there != (payload.sequence, payload.size_bytes) or not payload.sequence:
        raise InvalidArgument(
            f"payload {payload.sequence} of {payload.size_bytes} bytes was announced, and number {there[0]} of "
            f"{there[1]} lies there",
            field="shared.sequence",
        )


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
