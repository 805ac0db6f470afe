"""JSON of strangers: what Python's reader reads is read the same, what breaks it or takes too long is refused."""

from __future__ import annotations

import json

import pytest

from coordinator.text.bounded_json import MAX_COLLECTIONS, MAX_ITEMS, MAX_MEMBERS, TooMuchJson, parse_json
from tests.coordinator.text.other_threads import turns_of_another_thread

MANY = MAX_COLLECTIONS * 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, -2.5, "x", True, {"b": []}]},
        {"text": 'quotes " and \\ and \n and 😀'},
        list(range(MANY)),
        {"ids": [[1, 2.0, None]] * 5000, "text": "😀" * 1000},
    ],
    ids=lambda value: str(value)[:12],
)
def test_json(value: object) -> None:
    """Short and long texts, escaped and plain, have the values that they have for Python."""
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)):
        assert parse_json(text) == value


@pytest.mark.parametrize("padding", ["", "," + "0," * MANY + "0"], ids=["short", "long"])
@pytest.mark.parametrize("wrong", ["NaN", "-Infinity", "1e999", r'"\ud800"', r'{"\udc00": 1}', "[", "1 2", "'x'", ","])
def test_no_json(wrong: str, padding: str) -> None:
    """What JSON or UTF-8 does not have is refused, however long the text is."""
    with pytest.raises(ValueError, match="."):
        parse_json(f"[{wrong}{padding}]")
    with pytest.raises(RecursionError):
        parse_json("[" * 100_000 + padding)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * MAX_COLLECTIONS + "1]",
        "[" + "{}," * MAX_COLLECTIONS + "1]",
        json.dumps({str(index): 1 for index in range(MANY)}),
        "[" + "1," * MAX_ITEMS + "1]",
    ],
    ids=["arrays", "objects", "members", "items"],
)
def test_too_much(text: str) -> None:
    """Shapes that take long to check are refused with the limit."""
    with pytest.raises(TooMuchJson, match=f"{MAX_COLLECTIONS}|{MAX_MEMBERS}|{MAX_ITEMS}"):
        parse_json(text)


def test_other_threads_run_while_it_is_read() -> None:
    """Python's own reader gives another thread no turn before it has read all."""
    text = json.dumps([*range(300_000)])
    assert turns_of_another_thread(lambda: parse_json(text)) > 10
