"""Reads JSON that strangers wrote: strictly, and so that neither its size nor its shape holds up the other threads.

Python's own reader lets through what JSON does not have (NaN, infinity) and what UTF-8 cannot write (half of a
surrogate pair); both would break replies that repeat them. Its fast form also keeps the interpreter to itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from json.decoder import JSONArray, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn

MAX_COLLECTIONS = 1 << 14
"""Most arrays and objects of one text; whatever is made of them later takes some microseconds for each."""

MAX_MEMBERS = 1 << 12
"""Most members of one object."""

MAX_ITEMS = 1 << 20
"""Most items of all arrays of one text together."""


class TooMuchJson(ValueError):
    """A JSON text goes beyond one of the limits above."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for what is no JSON, TooMuchJson and UnicodeEncodeError, which are ValueErrors, for what goes
    beyond the limits and for half of a surrogate pair, and RecursionError for too deep a nesting.
    """
    # What is Unicode can spell half of a pair only as an escape.
    halves = "\\ud" in text or "\\uD" in text
    if halves or text.count(",") + text.count("[") + text.count("{") > MAX_MEMBERS:
        return _CountingDecoder().decode(text)
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


class _CountingDecoder(json.JSONDecoder):
    """Reads value by value in Python, so that other threads get their turn, and checks strings and the limits."""

    parse_array: Callable[..., Any]
    parse_string: Callable[..., Any]
    scan_once: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=self._object)
        self._collections = self._items = 0
        self.parse_array, self.parse_string = self._array, _string
        self.scan_once = py_make_scanner(self)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count()
        if len(pairs) > MAX_MEMBERS:
            raise TooMuchJson(f"an object has {len(pairs)} members; at most {MAX_MEMBERS} are taken")
        for key, _ in pairs:
            key.encode()
        return dict(pairs)

    def _array(self, *arguments: Any) -> tuple[list[Any], int]:
        self._count()
        items, end = JSONArray(*arguments)
        self._items += len(items)
        if self._items > MAX_ITEMS:
            raise TooMuchJson(f"its arrays have more than {MAX_ITEMS} items")
        return items, end

    def _count(self) -> None:
        self._collections += 1
        if self._collections > MAX_COLLECTIONS:
            raise TooMuchJson(f"it has more than {MAX_COLLECTIONS} arrays and objects")


def _string(*arguments: Any) -> tuple[str, int]:
    value, end = scanstring(*arguments)
    value.encode()
    return value, end


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it has no {constant}")
