"""Dataclasses as JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from coordinator.answer import Compression, Request, StageStats, Stats
from coordinator.api.http.chat_exchange import ChatExchange
from coordinator.journal.plain import from_plain, to_plain
from coordinator.text.parsers.reasoning import OF_GEMMA, Opening
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, GrammarKind, TokenLogprobs

SAMPLING = SamplingParams(
    logit_bias={3: 1.5, 70000: -100.0},
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    temperature=0.1,
    top_k=3,
    seed=2**64 - 1,
    allowed_token_ids=(1, 2),
    bad_token_sequences=((1, 2), (3,)),
    min_tokens=2,
)
REQUEST = Request(
    request_id="a ü \n",
    prompt_ids=(1, 2, 3),
    max_tokens=7,
    sampling=SAMPLING,
    stop_token_ids=frozenset({5, 6}),
    stop_strings=("end\n", "\u2028"),
    include_stop=True,
    boundaries=(2,),
    logprobs=3,
    grammar=Grammar(GrammarKind.REGEX, "[a-z]+"),
    compression=Compression(9, 1.25, "left whole"),
)
STATS = Stats(1, 0, None, 0.0, 2, 1.5, 2.5, 3.5, 2, 0, 0, None, 0.0, (StageStats("unix:a", "cpu", 0, 12, 1.0, 2.0),))


@pytest.mark.parametrize(
    "value",
    [
        REQUEST,
        STATS,
        ChatExchange(REQUEST, Opening.INSIDE, OF_GEMMA, "hermes", [{"type": "function", "deep": {"a": [1, None]}}]),
        ChatExchange(REQUEST, Opening.CLOSED, None, "none", []),
        TokenLogprobs(-math.inf, (1,), (-0.1234567890123456,), 3),
    ],
)
def test_comes_back_as_it_was(value: Any) -> None:
    """Through the text of JSON: every number to its last bit, every kind of collection."""
    assert from_plain(type(value), json.loads(json.dumps(to_plain(value)))) == value


def test_other_versions() -> None:
    """What another version has written besides is passed over, and what it has not written has its default."""
    plain = to_plain(REQUEST) | {"new": 1}
    del plain["include_stop"]
    assert from_plain(Request, plain) == replace(REQUEST, include_stop=False)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": "7"}, {"prompt_ids": 5}, {"grammar": {"kind": "poem"}}, {"sampling": []}, {"request_id": 1}],
)
def test_what_is_no_request(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(Request, to_plain(REQUEST) | wrong)
