"""The journal's records: lines of a checksum and a JSON object.

Lines stand for themselves, so that one that was damaged loses nothing behind it, and one that was being written when
its process ended is the last one. Nothing is known here of what the objects say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

_CHECKSUM_DIGITS = 16


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A line that is no record. offset: its first byte in the file. why: the end of a sentence."""

    offset: int
    why: str


def written(record: Mapping[str, Any]) -> bytes:
    """Return a record as its line: 16 hexadecimal digits of XXH3 over the JSON text, a space, the text."""
    # JSON writes line feeds inside of texts as \n. Halves of surrogate pairs cannot come here but from outside.
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"%016x %b\n" % (xxhash.xxh3_64_intdigest(text), text)


def read(content: bytes) -> Iterator[dict[str, Any] | DamagedRecord]:
    """Yield the records of a file in their order, and in the place of each line that is none a `DamagedRecord`."""
    offset = 0
    for line in _lines(content):
        yield _record(line, offset)
        offset += len(line)


def _lines(content: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin) + 1 or len(content)
        yield content[begin:end]
        begin = end


def _record(line: bytes, offset: int) -> dict[str, Any] | DamagedRecord:
    if not line.endswith(b"\n"):
        return DamagedRecord(offset, f"it ends behind {len(line)} bytes, in the middle of a line")
    checksum, _, text = line[:-1].partition(b" ")
    if len(checksum) != _CHECKSUM_DIGITS or checksum != b"%016x" % xxhash.xxh3_64_intdigest(text):
        return DamagedRecord(offset, "its checksum is another one")
    try:
        record = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        return DamagedRecord(offset, f"it is no JSON: {error}")
    return record if isinstance(record, dict) else DamagedRecord(offset, "it is no object")
