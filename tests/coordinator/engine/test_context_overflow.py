"""The words of refusals: each API's own, with the numbers that belong to them."""

from __future__ import annotations

import pytest

from coordinator.engine.context_overflow import ContextOverflow


@pytest.mark.parametrize(
    ("prompt_tokens", "is_lower_bound", "openai", "anthropic"),
    [
        (90, False, "you requested 110 tokens (90 in the prompt, 20 in the completion)", "limit: 90 + 20 > 100, "),
        (100, False, "you requested 120 tokens (100 in the prompt, 20 in the completion)", "limit: 100 + 20 > 100, "),
        (
            101,
            False,
            "you requested 121 tokens (101 in the prompt, 20 in the completion)",
            "prompt is too long: 101 tokens > 100 maximum",
        ),
        (
            500,
            True,
            "you requested at least 520 tokens (at least 500 in the prompt, 20 in the completion)",
            "prompt is too long: at least 500 tokens > 100 maximum",
        ),
    ],
)
def test_both_say_what_is_too_long(prompt_tokens: int, is_lower_bound: bool, openai: str, anthropic: str) -> None:
    error = ContextOverflow(100, prompt_tokens, 20, chat=False, field="prompt", is_lower_bound=is_lower_bound)
    assert error.message == (
        f"This model's maximum context length is 100 tokens. However, {openai}. Please reduce the length of the prompt "
        "or completion."
    )
    assert error.responses_message == error.message.replace("the prompt", "the input")
    assert anthropic in error.anthropic_message
    assert (error.reason, error.where["field"], error.code_name) == ("CONTEXT_OVERFLOW", "prompt", "INVALID_ARGUMENT")
