"""Parses and formats amounts of bytes and spans of time as people write them: "4GiB", "7d"."""

from __future__ import annotations

import re

from services.errors import InvalidArgument

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE_WORDS = "a number with B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), like 4GiB"

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE_WORDS = "a number with s, m, h, d or w, like 12h or 7d"

_NUMBER_AND_UNIT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)")


def parse_size(text: str, field: str) -> int:
    """Return a number of bytes; a number without a unit is bytes. Raises InvalidArgument naming the field otherwise."""
    number, unit = _split(text, field, _SIZE_WORDS)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise InvalidArgument(f"{field} {text!r} has the unknown unit {unit!r}: give {_SIZE_WORDS}", field=field)
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_size(size_bytes: int) -> str:
    """Write a number of bytes with three or four digits, in powers of 1024: "996 B", "70.0 MiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def parse_age(text: str, field: str) -> float:
    """Return a number of seconds. Raises InvalidArgument naming the field for anything but a number with a unit."""
    number, unit = _split(text, field, _AGE_WORDS)
    if unit not in _SECONDS:
        raise InvalidArgument(f"{field} {text!r} has the unknown unit {unit!r}: give {_AGE_WORDS}", field=field)
    return float(number) * _SECONDS[unit]


def format_age(seconds: float) -> str:
    """Write a span of time in its largest whole unit: "45s", "3h", "12d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def _split(text: str, field: str, words: str) -> tuple[str, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{field} is {text!r}: give {words}", field=field)
    return match[1], match[2]
