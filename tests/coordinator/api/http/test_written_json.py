"""JSON in pieces: the same value as in one, and other threads run while it is written."""

from __future__ import annotations

import json

import pytest

from coordinator.api.http.written_json import WrittenList, json_pieces
from tests.coordinator.text.other_threads import turns_of_another_thread

VALUES = [{}, [], {"a": [], "b": {}, "c": [[], {}]}, {"text": 'quotes " and é 😀', "list": [1, -2.5, None, True, "x"]}]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_value_is_the_same(value: object) -> None:
    """For plain values, and for lists of which only the text is kept."""
    assert json.loads("".join(json_pieces(value))) == value
    written = WrittenList([value, 5])
    written.extend([value])
    assert len(written) == 3
    assert json.loads("".join(json_pieces({"a": [{"b": written}], "c": WrittenList()}))) == {
        "a": [{"b": [value, 5, value]}],
        "c": [],
    }


def test_what_json_does_not_have_is_an_error() -> None:
    """No reply has NaN, which clients could not read."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        WrittenList([float("nan")])
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(json_pieces({"x": float("inf")}))


def test_other_threads_run_while_it_is_written() -> None:
    """Python's own writer gives another thread no turn before it has written all."""
    entries = [{str(token): {"logprob": -1.0, "rank": token} for token in range(20)} for _ in range(15000)]
    assert turns_of_another_thread(lambda: list(json_pieces({"x": WrittenList(entries)}))) > 10
    assert turns_of_another_thread(lambda: list(json_pieces({"x": entries}))) > 10
