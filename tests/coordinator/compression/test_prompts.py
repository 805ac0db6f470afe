"""What of a conversation may be shortened."""

from __future__ import annotations

import pytest

from coordinator.compression.prompts import compressible

SYSTEM = {"role": "system", "content": "Be brief. " * 100}
LONG = {"role": "user", "content": "A long document. " * 50}
SHORT = {"role": "user", "content": "What is in it?"}
SAID = {"role": "assistant", "content": "Much."}


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([LONG], 0),
        ([SYSTEM, LONG], 1),
        ([SYSTEM, SHORT, LONG], 2),
        ([LONG, SHORT], 0),
        ([SHORT, SHORT], 1),
        ([SYSTEM], None),
        ([], None),
        ([LONG, SAID, SHORT], None),
        ([LONG, {"role": "tool", "content": "5"}], None),
        ([{"role": "user", "content": None}], None),
    ],
)
def test_which_message(messages: list[dict[str, object]], index: int | None) -> None:
    """The user's longest message may be shortened, and nothing where tools, a form or earlier answers are there."""
    assert compressible(messages, tools=False, structured=False) == index
    assert compressible(messages, tools=True, structured=False) is None
    assert compressible(messages, tools=False, structured=True) is None
