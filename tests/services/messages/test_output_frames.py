"""Grammars and log-probabilities on the wire: what comes back, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsplit.shard.v1 import stage_pb2, stage_service_pb2 as pb
from services.errors import InvalidArgument
from services.messages.frames import FrameReader
from services.messages.output_frames import MAX_GRAMMAR_BYTES, check_grammar
from services.messages.session_frames import EVENT_FRAMES, event_to_message, open_from_message, open_to_message
from services.messages.steps import Commit, Grammar, GrammarKind, TokenLogprobs
from tests.services.fakes import OPEN

SCHEMA, OBJECT, REGEX, LARK = GrammarKind
NO_MORE = TokenLogprobs(-0.5)
THREE = TokenLogprobs(-1.5, (7, 2**32 - 1, 0), (-0.25, -1.5, float("-inf")), 2)


@pytest.mark.parametrize("logprobs", [None, 0, 20])
@pytest.mark.parametrize(
    "grammar",
    [None, Grammar(OBJECT), Grammar(SCHEMA, '{"enum": ["ü"]}'), Grammar(REGEX, "[ab]{2}"), Grammar(LARK, "start: /x/")],
)
def test_open_round_trip(logprobs: int | None, grammar: Grammar | None) -> None:
    """Every kind of grammar comes back; no alternatives and no log-probabilities stay different."""
    request = replace(OPEN, logprobs=logprobs, grammar=grammar)
    assert open_from_message(open_to_message(replace(OPEN, prompt_logprobs=logprobs))).prompt_logprobs == logprobs
    raw = open_to_message(request).SerializeToString()
    assert open_from_message(stage_pb2.Open.FromString(raw)) == request


def test_empty_texts_are_not_absent() -> None:
    """An empty expression is one, for the empty output."""
    request = replace(OPEN, grammar=Grammar(REGEX))
    assert open_from_message(open_to_message(request)) == request


@pytest.mark.parametrize(
    "message", [stage_pb2.Grammar(), stage_pb2.Grammar(json_object=False), stage_pb2.Grammar.FromString(b"\x7a\x01x")]
)
def test_grammars_of_no_known_kind_are_refused(message: stage_pb2.Grammar) -> None:
    """None set, one set to nothing, and one of a newer version."""
    opening = open_to_message(OPEN)
    opening.grammar.CopyFrom(message)
    with pytest.raises(InvalidArgument, match="grammar is empty: set one of json_schema, json_object, regex, lark"):
        open_from_message(opening)


def test_sizes_are_limited() -> None:
    """Up to 256 KiB of UTF-8 pass, and up to 20 alternatives."""
    check_grammar(Grammar(REGEX, "x" * MAX_GRAMMAR_BYTES))
    with pytest.raises(InvalidArgument, match=r"regex has 262146 bytes; at most 262144 are taken") as refused:
        open_from_message(open_to_message(replace(OPEN, grammar=Grammar(REGEX, "ü" * (MAX_GRAMMAR_BYTES // 2 + 1)))))
    assert refused.value.where["field"] == "grammar.regex"
    with pytest.raises(InvalidArgument, match="logprobs is 21; it must be between 0 and 20"):
        open_from_message(open_to_message(replace(OPEN, logprobs=21)))
    with pytest.raises(InvalidArgument, match="prompt_logprobs is 21; it must be between 0 and 20"):
        open_from_message(open_to_message(replace(OPEN, prompt_logprobs=21)))


def test_texts_that_are_none_are_refused() -> None:
    """A lone surrogate, which JSON can spell, and a text beside the kind that has none."""
    with pytest.raises(InvalidArgument, match="json_schema is no Unicode text"):
        check_grammar(Grammar(SCHEMA, '{"const": "\ud800"}'))
    with pytest.raises(InvalidArgument, match="json_object has no text"):
        check_grammar(Grammar(OBJECT, "{}"))


@pytest.mark.parametrize("logprobs", [(), (NO_MORE, NO_MORE), (THREE, TokenLogprobs(0.0, (1,), (-0.0,)))])
def test_commits_round_trip(logprobs: tuple[TokenLogprobs, ...]) -> None:
    """With and without log-probabilities and alternatives, the certain and the impossible included."""
    for commit in (Commit(4, 9, (1, 2), (), logprobs), Commit(4, 9, (1, 2), (), (), prompt_logprobs=logprobs)):
        raw = event_to_message(commit).SerializeToString()
        assert FrameReader(EVENT_FRAMES).read(pb.RunStageResponse.FromString(raw)) == commit


@pytest.mark.parametrize(
    ("logprobs", "text"),
    [
        ((NO_MORE,), "logprobs has 1 entries for 2 tokens"),
        ((THREE, replace(THREE, top_logprobs=())), "logprobs has 0 numbers for 3 alternatives"),
        ((NO_MORE, TokenLogprobs(-1.0, (1,) * 21, (-1.0,) * 21)), "logprobs has 21 numbers for 21 alternatives"),
        ((NO_MORE, TokenLogprobs(0.5)), "logprobs has 0.5, which is no log-probability"),
        ((NO_MORE, TokenLogprobs(float("nan"))), "logprobs has nan"),
        ((NO_MORE, TokenLogprobs(-1.0, (1,), (float("nan"),))), "logprobs has nan"),
    ],
)
def test_senseless_logprobs_are_refused(logprobs: tuple[TokenLogprobs, ...], text: str) -> None:
    """Too few, unpaired, too many, and numbers that no probability has."""
    message = event_to_message(Commit(4, 9, (1, 2), (), logprobs))
    with pytest.raises(InvalidArgument, match=text):
        FrameReader(EVENT_FRAMES).read(message)
    if len(logprobs) > 1:
        message = event_to_message(Commit(4, 9, (), (), prompt_logprobs=logprobs))
        with pytest.raises(InvalidArgument, match=text):
            FrameReader(EVENT_FRAMES).read(message)
