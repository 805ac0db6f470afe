"""Sizes and ages as people write them."""

from __future__ import annotations

import pytest

from services.errors import InvalidArgument
from services.sizes import format_age, format_size, parse_age, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("996", 996),
        ("1B", 1),
        ("1KiB", 1024),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        (" 4gib ", 4 << 30),
        ("1.5MiB", 3 << 19),
        ("2TiB", 2 << 40),
        ("5kB", 5000),
        ("5MB", 5_000_000),
        ("5GB", 5_000_000_000),
        ("123456789012345678", 123456789012345678),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Powers of 1024 with an i, of 1000 without; bare numbers are bytes."""
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "4G", "4 GiBs", "1e9", "4,5GiB", "0x10", "nan", "inf", "1.2.3MB", "4GiB!", "٤GiB"]
)
def test_what_is_no_size(text: str) -> None:
    """Refused naming the option, the value and what is accepted."""
    with pytest.raises(InvalidArgument, match=r"--kv-cache-budget.*like 4GiB"):
        parse_size(text, "--kv-cache-budget")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (70 << 20, "70.0 MiB"),
        (1023 << 20, "1.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_showing_sizes(size: int, text: str) -> None:
    """Short, and never four digits before the point."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("1.5d", 129600), ("2w", 1209600)],
)
def test_ages(text: str, seconds: float) -> None:
    """A number with a unit."""
    assert parse_age(text, "--x") == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "7 days", "-1d", "7D", "7mo"])
def test_what_is_no_age(text: str) -> None:
    """Refused naming the option, the value and what is accepted."""
    with pytest.raises(InvalidArgument, match=r"--older-than.*7d"):
        parse_age(text, "--older-than")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (59.2, "59s"), (60, "1m"), (7200, "2h"), (86400 * 12, "12d")]
)
def test_showing_ages(seconds: float, text: str) -> None:
    """The largest unit that fits."""
    assert format_age(seconds) == text
