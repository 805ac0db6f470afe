"""Writes the grammar that makes a model call a tool in its own format, as `tool_choice` asks for, or think first.

The grammar is text in the Lark dialect of llguidance; the last stage compiles it and masks tokens by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence

from coordinator.text.parsers.lark import json_schema, literal, regex
from coordinator.text.parsers.reasoning import TAGGED, Opening, ThinkingTags
from coordinator.text.parsers.tool_schema import ToolSchema, read_tools
from coordinator.text.parsers.tools import GEMMA4, HARMONY, format_of, openai
from services.errors import InvalidArgument
from services.messages.steps import Grammar, GrammarKind


def forced_call_grammar(
    format: str,
    tools: Sequence[ToolSchema],
    name: str | None = None,
    *,
    opening: Opening = Opening.CLOSED,
    parallel: bool = True,
    single_tokens: Collection[str] = (),
    thinking: ThinkingTags = TAGGED,
) -> str:
    """Return a grammar for exactly one call of the named tool, or for a call of any; with `parallel` for several.

    opening: how the prompt leaves the model's thinking, which may come first.
    single_tokens: which of `parsers.tags.TAGS` are one token of the tokenizer. They are named as tokens: spelled with
        others they would be a text that the model has never seen, and llguidance never matches such a token by text.
    thinking: what it stands between.

    Raises InvalidArgument for an unknown format, one that has no calls, no tools, or a name that no tool has.
    """

    def tag(text: str) -> str:
        return text if text in single_tokens else literal(text)

    module = format_of(format)
    by_name = read_tools(tools)
    if not by_name:
        raise InvalidArgument("tool_choice asks for a call, but there are no tools", field="tool_choice")
    if name is not None and name not in by_name:
        raise InvalidArgument(
            f"tool_choice: no tool is called {name!r}; tools: {', '.join(by_name)}", field="tool_choice"
        )
    choices = [by_name[name]] if name is not None else [*by_name.values()]
    rules = [f"call_{index}" for index in range(len(choices))]
    lines = [f"call: {' | '.join(rules)}"]
    if format == HARMONY:
        lines += ["start: before call", *openai.framing_grammar(tag, begun=opening is Opening.CLOSED)]
    else:
        between = '"\\n"?' if format == GEMMA4 else '"\\n"'
        calls = f"call ({between} call)*" if parallel and name is None else "call"
        lines.append(f"start: {_thinking(opening, thinking, tag)} {calls}")
    for rule, tool in zip(rules, choices, strict=True):
        lines += module.call_grammar(tool, rule, tag)
    if opening is not Opening.CLOSED and format != HARMONY:
        lines.append(_end_of_thinking(single_tokens, thinking))
    return "\n".join(lines) + "\n"


def behind_thinking(grammar: Grammar, single_tokens: Collection[str] = (), thinking: ThinkingTags = TAGGED) -> Grammar:
    """Return a grammar for the end of the thinking that the prompt has opened, and behind it what `grammar` says.

    single_tokens, thinking: as in `forced_call_grammar`. Raises InvalidArgument for a grammar in GBNF.
    """
    lines = [
        f"start: thinking{thinking.behind_term} body\nbody: {_term(grammar)}",
        _end_of_thinking(single_tokens, thinking),
    ]
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


def in_final_message(grammar: Grammar, single_tokens: Collection[str] = ()) -> Grammar:
    """Return a grammar for an answer in Harmony whose last message is what `grammar` says; reasoning may come before.

    Arguments and errors are those of `behind_thinking`.
    """

    def tag(text: str) -> str:
        return text if text in single_tokens else literal(text)

    lines = [f"start: before {openai.final_grammar(tag)} body", f"body: {_term(grammar)}"]
    lines += openai.framing_grammar(tag, begun=False)
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


def _term(grammar: Grammar) -> str:
    """Return the term for what a grammar says. Raises InvalidArgument for one in GBNF."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return json_schema({"type": "object"}, lenient=False)
        case GrammarKind.JSON_SCHEMA:
            return json_schema(json.loads(grammar.text), lenient=False)
        case GrammarKind.REGEX:
            return regex(grammar.text)
        case GrammarKind.LARK:
            if "::=" in grammar.text and not grammar.text.lstrip().startswith("start"):
                raise InvalidArgument(
                    "the grammar is written in GBNF, and behind thinking it must be in Lark: write it so, or switch "
                    "the thinking off",
                    field="grammar",
                )
            return f"%lark {{\n{grammar.text}\n}}"


def _end_of_thinking(single_tokens: Collection[str], tags: ThinkingTags) -> str:
    """Return the rule `thinking`: any text up to the closing tag, which is one token of many tokenizers."""
    if tags.closing in single_tokens:
        return f"thinking: /(?s:.*)/ {tags.closing}"
    return f"thinking[lazy]: {regex('(?s:.*)' + re.escape(tags.closing))}"


def _thinking(opening: Opening, tags: ThinkingTags, tag: Callable[[str], str]) -> str:
    """Return the term for the thinking that may or must come before the calls."""
    if opening is Opening.CLOSED:
        return ""
    whole = f"thinking{tags.behind_term}"
    return whole if opening is Opening.INSIDE else f"({tags.opening_term(tag)} {whole})?"
