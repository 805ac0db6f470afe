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

from services.errors import DataLoss
from services.messages.tensors import FLOAT8, ITEM_BYTES

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_PREFIX_BYTES = 8
_ALIGNMENT = 8
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", FLOAT8: "F8_E4M3"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


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
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    offset = _PREFIX_BYTES + len(text)
    placed = []
    for name, dtype, shape in tensors:
        placed.append(PlacedTensor(name, dtype, shape, offset))
        offset = placed[-1].end
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text, tuple(placed)


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
    length = int.from_bytes(read(0, _PREFIX_BYTES), "little")
    if size_bytes < _PREFIX_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - _PREFIX_BYTES):
        raise DataLoss(f"a safetensors header of {length} bytes cannot be in a file of {size_bytes} bytes")
    text = read(_PREFIX_BYTES, length)
    try:
        header = json.loads(text)
        described = sorted(
            (_described(name, value) for name, value in header.items() if name != "__metadata__"),
            key=lambda found: (found[1], found[2]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataLoss(f"the safetensors header is not readable: {error}") from error
    start, position = _PREFIX_BYTES + length, 0
    placed = []
    for tensor, begin, end in described:
        if begin != position or end - begin != tensor.size_bytes:
            raise DataLoss(f"tensor {tensor.name!r} lies at [{begin}, {end}) where [{position}, …) was expected")
        placed.append(PlacedTensor(tensor.name, tensor.dtype, tensor.shape, start + begin))
        position = end
    if start + position != size_bytes:
        raise DataLoss(f"the file has {size_bytes} bytes where its header says {start + position}")
    return tuple(placed)


def _described(name: str, value: dict[str, object]) -> tuple[PlacedTensor, int, int]:
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"shape of {name!r} is {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"data_offsets of {name!r} is {offsets!r}")
    return PlacedTensor(name, _DTYPES[str(value["dtype"])], tuple(shape), 0), offsets[0], offsets[1]
