"""Grammars and log-probabilities, which an output is asked to have: to messages and back.

Clients' messages and those between the processes have the same fields, so that the same functions fill and read both;
that is why they are not part of `session_frames`. Sizes and numbers are checked here; whether a grammar can be compiled
the last stage finds out.
"""

from __future__ import annotations

from flashsplit.inference.v1 import generation_pb2
from flashsplit.shard.v1 import stage_pb2
from services.errors import InvalidArgument
from services.messages.steps import Grammar, GrammarKind, TokenLogprobs

GrammarMessage = stage_pb2.Grammar | generation_pb2.Grammar
LogprobsMessage = stage_pb2.TokenLogprobs | generation_pb2.TokenLogprobs

MAX_ALTERNATIVES = 20
"""The most tokens whose log-probabilities are reported beside each one."""

MAX_GRAMMAR_BYTES = 256 * 1024
"""The longest grammar, in UTF-8."""


def check_logprobs(alternatives: int | None, field: str = "logprobs") -> None:
    """Check a number of alternatives, None for no log-probabilities. Raises InvalidArgument for too many."""
    if alternatives is not None and not 0 <= alternatives <= MAX_ALTERNATIVES:
        raise InvalidArgument(f"{field} is {alternatives}; it must be between 0 and {MAX_ALTERNATIVES}", field=field)


def check_grammar(grammar: Grammar | None) -> None:
    """Check a grammar's text. Raises InvalidArgument for one that is too long, cannot be written as UTF-8, or stands
    beside a kind that has none."""
    if grammar is None:
        return
    if grammar.kind is GrammarKind.JSON_OBJECT and grammar.text:
        raise InvalidArgument("json_object has no text: use json_schema for one", field=grammar_field(grammar))
    try:
        size = len(grammar.text.encode())
    except UnicodeError:
        raise InvalidArgument(f"{grammar.kind} is no Unicode text", field=grammar_field(grammar)) from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            f"{grammar.kind} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken", field=grammar_field(grammar)
        )


def grammar_field(grammar: Grammar) -> str:
    """Return the name that errors have for the grammar's field."""
    return f"grammar.{grammar.kind}"


def grammar_to_message(grammar: Grammar, message: GrammarMessage) -> None:
    """Fill the message with a grammar."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        message.json_object = True
    else:
        setattr(message, grammar.kind, grammar.text)


def grammar_from_message(message: GrammarMessage) -> Grammar:
    """Return the grammar. Raises InvalidArgument as `check_grammar`, and for a grammar of no known kind."""
    field = message.WhichOneof("grammar")
    if field is None or (field == "json_object" and not message.json_object):
        kinds = ", ".join(GrammarKind)
        raise InvalidArgument(f"grammar is empty: set one of {kinds}, or leave it out", field="grammar")
    kind = GrammarKind(field)
    grammar = Grammar(kind, "" if kind is GrammarKind.JSON_OBJECT else getattr(message, field))
    check_grammar(grammar)
    return grammar


def logprobs_to_message(logprobs: TokenLogprobs, message: LogprobsMessage) -> None:
    """Fill the message with one token's log-probabilities."""
    message.logprob = logprobs.logprob
    message.top_token_ids.extend(logprobs.top_token_ids)
    message.top_logprobs.extend(logprobs.top_logprobs)
    message.rank = logprobs.rank


def logprobs_of_tokens(message: stage_pb2.Commit | generation_pb2.Delta) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each of the message's tokens, or none at all.

    Raises InvalidArgument for another number of them, and as `logprobs_from_message`.
    """
    if message.logprobs and len(message.logprobs) != len(message.token_ids):
        raise InvalidArgument(
            f"logprobs has {len(message.logprobs)} entries for {len(message.token_ids)} tokens", field="logprobs"
        )
    return tuple(map(logprobs_from_message, message.logprobs))


def logprobs_from_message(message: LogprobsMessage) -> TokenLogprobs:
    """Return one token's log-probabilities.

    Raises InvalidArgument for alternatives that are too many or lack a number, and for what is no log-probability.
    """
    if len(message.top_token_ids) != len(message.top_logprobs) or len(message.top_logprobs) > MAX_ALTERNATIVES:
        raise InvalidArgument(
            f"logprobs has {len(message.top_logprobs)} numbers for {len(message.top_token_ids)} alternatives; "
            f"at most {MAX_ALTERNATIVES} of each are expected",
            field="logprobs",
        )
    # NaN fails the comparison too; minus infinity is the logarithm of 0.
    wrong = [value for value in (message.logprob, *message.top_logprobs) if not value <= 0]
    if wrong:
        raise InvalidArgument(f"logprobs has {wrong[0]}, which is no log-probability", field="logprobs")
    return TokenLogprobs(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs), message.rank)
