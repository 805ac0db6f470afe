"""JSON that is written bit by bit, and lists of which only the text is kept.

`json.dumps` lets nothing else run until all of a value is written, as does freeing so many objects, and
log-probabilities of a long prompt are megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class WrittenList:
    """A list of a reply, of which each item is written as soon as it is there."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._texts: list[str] = []
        self.extend(items)

    def __len__(self) -> int:
        return len(self._texts)

    def extend(self, items: Iterable[Any]) -> None:
        """Add items, which must be plain JSON values."""
        self._texts += map(_ENCODER.encode, items)

    def pieces(self) -> Iterator[str]:
        """Return the list as JSON, item by item."""
        return _joined("[", ([text] for text in self._texts), "]")


def json_pieces(value: Any) -> Iterator[str]:
    """Return a value as JSON, in pieces. It may hold WrittenLists, and plain values otherwise."""
    if isinstance(value, WrittenList):
        return value.pieces()
    if isinstance(value, dict):
        members = ((_ENCODER.encode(name), ":", *json_pieces(member)) for name, member in value.items())
        return _joined("{", members, "}")
    if isinstance(value, list):
        return _joined("[", map(json_pieces, value), "]")
    return iter((_ENCODER.encode(value),))


def _joined(opening: str, parts: Iterable[Iterable[str]], closing: str) -> Iterator[str]:
    between = opening
    for part in parts:
        yield between
        yield from part
        between = ","
    yield opening + closing if between == opening else closing
