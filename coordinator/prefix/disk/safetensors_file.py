"""The safetensors file format, written as bytes come and read in parts, so that a file is never in memory whole.

Eight bytes say how long the header is, the header is JSON padded to a multiple of eight, then come the tensors without
gaps (https://huggingface.co/docs/safetensors, "Format"). It knows nothing of snapshots and of where files lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.dtypes import ITEM_BYTES
from services.errors import DataLoss
from services.model.safetensors_header import DTYPE_CODES, DTYPE_OF_CODE, LENGTH_BYTES, read_header

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor as the header describes it. offset: where its first byte lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """The size of its content."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Where the byte behind its last one lies in the file."""
        return self.offset + self.size_bytes


class Output(Protocol):
    """What a file is written to."""

    def write(self, data: bytes | bytearray | memoryview) -> object:
        """Append the data, all of it."""


def place(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, tuple[PlacedTensor, ...]]:
    """Return the file's bytes before the first tensor, and where the tensors lie.

    tensors: (name, dtype, shape) in the order in which they are written. Raises ValueError when a name comes twice or
    is the format's own.
    """
    names = {name for name, _, _ in tensors}
    if len(names) < len(tensors) or "__metadata__" in names:
        raise ValueError("tensor names must be unique and not __metadata__")
    header: dict[str, object] = {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    offset = LENGTH_BYTES + len(text)
    placed = []
    for name, dtype, shape in tensors:
        placed.append(PlacedTensor(name, dtype, shape, offset))
        offset = placed[-1].end
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, tuple(placed)


class SafetensorsWriter:
    """Writes one file from front to back: the header at once, then the tensors' bytes in order, cut anywhere."""

    def __init__(self, output: Output, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """Write the header. Raises ValueError for names that the format cannot hold."""
        first, self.placed = place(tensors)
        self._output = output
        self._missing = sum(tensor.size_bytes for tensor in self.placed)
        output.write(first)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes of the tensors. Raises ValueError for more than were announced."""
        if len(data) > self._missing:
            raise ValueError(f"{len(data)} bytes came where {self._missing} were missing")
        self._missing -= len(data)
        self._output.write(data)

    def finish(self) -> None:
        """Check that the file is whole. Raises ValueError when bytes are missing."""
        if self._missing:
            raise ValueError(f"{self._missing} bytes are missing")


def read_placed(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[PlacedTensor, ...]:
    """Return the tensors of a file, in the order in which they lie there.

    read: returns the bytes at (offset, size_bytes), fewer at the file's end. size_bytes: the size of the file.

    Raises:
        DataLoss: it is no safetensors file, is cut off or goes on behind its tensors, has gaps, or holds element types
            that no snapshot has.
    """
    header = read_header(read, size_bytes)
    unknown = sorted({entry.code for entry in header.tensors.values()} - DTYPE_OF_CODE.keys())
    if unknown:
        raise DataLoss(f"the safetensors header is not readable: element type {unknown[0]!r} is unknown")
    position = 0
    placed = []
    for name, entry in sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        tensor = PlacedTensor(name, DTYPE_OF_CODE[entry.code], entry.shape, header.data_start + entry.begin)
        if entry.begin != position or entry.end - entry.begin != tensor.size_bytes:
            raise DataLoss(f"tensor {name!r} lies at [{entry.begin}, {entry.end}) where [{position}, …) was expected")
        placed.append(tensor)
        position = entry.end
    if header.data_start + position != size_bytes:
        raise DataLoss(f"the file has {size_bytes} bytes where its header says {header.data_start + position}")
    return tuple(placed)
