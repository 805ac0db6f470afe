"""Reads a JSON object field by field: each must be there, of its type and in its range, and no other may be there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from services.errors import FlashsplitError


class JsonFields:
    """One JSON object; each method reads a field once and returns its value.

    Every method raises `error` naming the field, its value and what is accepted. where: how errors call the object.
    """

    def __init__(self, value: object, where: str, error: type[FlashsplitError]) -> None:
        if not isinstance(value, dict):
            raise error(f"{where} is {_shown(value)}; expected an object", field=where)
        self._values: dict[str, object] = dict(value)
        self._where, self._error = where, error

    def text(self, name: str, max_length: int, *, empty: bool = False) -> str:
        """Return a printable text of at most `max_length` characters; only with `empty` may it be empty."""
        value = self._pop(name)
        if not isinstance(value, str) or not (0 if empty else 1) <= len(value) <= max_length or not value.isprintable():
            raise self._wrong(name, value, f"a printable text of at most {max_length} characters")
        return value

    def optional_text(self, name: str, max_length: int) -> str | None:
        """Return a text as `text`, or None for null."""
        return self._pop(name) if self._is_null(name) else self.text(name, max_length)  # type: ignore[return-value]

    def hex(self, name: str, digits: int) -> str:
        """Return a text of exactly so many lower-case hex digits."""
        value = self._pop(name)
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
            raise self._wrong(name, value, f"{digits} hex digits")
        return value

    def optional_hex(self, name: str, digits: int) -> str | None:
        """Return hex digits as `hex`, or None for null."""
        return self._pop(name) if self._is_null(name) else self.hex(name, digits)  # type: ignore[return-value]

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return a text that is one of the choices."""
        value = self._pop(name)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        """Return a whole number in [least, most]."""
        value = self._pop(name)
        if not _is_integer(value, least, most):
            raise self._wrong(name, value, f"a whole number in [{least}, {most}]")
        return value  # type: ignore[return-value]

    def integers(self, name: str, least: int, most: int) -> list[int]:
        """Return a list of whole numbers in [least, most]."""
        value = self._pop(name)
        if not isinstance(value, list) or not all(_is_integer(number, least, most) for number in value):
            raise self._wrong(name, value, f"a list of whole numbers in [{least}, {most}]")
        return value

    def optional_integers(self, name: str, least: int, most: int) -> list[int] | None:
        """Return a list as `integers`, or None for null."""
        return self._pop(name) if self._is_null(name) else self.integers(name, least, most)  # type: ignore[return-value]

    def number(self, name: str, least: float, most: float) -> float:
        """Return a finite number in [least, most]."""
        value = self._pop(name)
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type, operator]
            raise self._wrong(name, value, f"a number in [{least:g}, {most:g}]")
        return float(value)  # type: ignore[arg-type]

    def objects(self, name: str, least: int, most: int) -> list[JsonFields]:
        """Return a list of `least` to `most` objects."""
        value = self._pop(name)
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise self._wrong(name, value, f"a list of {least} to {most} objects")
        return [JsonFields(item, f"{self._where}.{name}[{index}]", self._error) for index, item in enumerate(value)]

    def has(self, name: str) -> bool:
        """Tell whether a field is there, for those that may be left out."""
        return name in self._values

    def end(self) -> None:
        """Check that all fields were read. Raises `error` naming those that were not."""
        if self._values:
            raise self._error(f"{self._where} has the unknown fields {', '.join(sorted(self._values))[:200]}")

    def _is_null(self, name: str) -> bool:
        return name in self._values and self._values[name] is None

    def _pop(self, name: str) -> object:
        if name not in self._values:
            raise self._error(f"{self._where}.{name} is missing", field=name)
        return self._values.pop(name)

    def _wrong(self, name: str, value: object, expected: str) -> FlashsplitError:
        return self._error(f"{self._where}.{name} is {_shown(value)}; expected {expected}", field=name)


def _is_integer(value: object, least: int, most: int) -> bool:
    # bool is an int to Python, but true is no number.
    return type(value) is int and least <= value <= most


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 80 else f"{text[:80]}…"
