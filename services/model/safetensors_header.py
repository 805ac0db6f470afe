"""The header of a safetensors file: 8 bytes hold its length, then comes JSON that describes every tensor behind it.

See https://huggingface.co/docs/safetensors. Nothing here reads a tensor's contents or knows what a file is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from services.dtypes import FLOAT8
from services.errors import DataLoss

LENGTH_BYTES = 8
"""How many bytes the header's length takes, before the header."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", FLOAT8: "F8_E4M3"}
"""The format's codes of the element types that are used here."""

CODE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Bytes of one element of the types whose elements are whole bytes, by the format's codes."""

DTYPE_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor as a header describes it.

    code: its element type in the format's words, like "BF16". begin, end: where its bytes lie, counted from the end of
    the header.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All tensors of a file by name. data_start: the offset in the file from which `begin` and `end` count."""

    tensors: dict[str, HeaderEntry]
    data_start: int


def read_header(read: Callable[[int, int], bytes], file_bytes: int) -> SafetensorsHeader:
    """Read the header of a file of `file_bytes` bytes.

    read: returns the bytes at (offset, size), fewer at the end of the file.

    Raises DataLoss when the header is too long for the format or the file, or is not what the format says.
    """
    length = int.from_bytes(read(0, LENGTH_BYTES), "little")
    if file_bytes < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise DataLoss(f"a safetensors header of {length} bytes cannot be in a file of {file_bytes} bytes")
    try:
        described = json.loads(read(LENGTH_BYTES, length), object_pairs_hook=_once)
        tensors = {name: _entry(name, value) for name, value in described.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataLoss(f"the safetensors header is not readable: {error}") from error
    return SafetensorsHeader(tensors, LENGTH_BYTES + length)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object of these pairs. Raises ValueError where a name stands twice, which JSON itself allows."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return made


def _entry(name: str, value: dict[str, object]) -> HeaderEntry:
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"shape of {name!r} is {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"data_offsets of {name!r} is {offsets!r}")
    return HeaderEntry(str(value["dtype"]), tuple(shape), offsets[0], offsets[1])
