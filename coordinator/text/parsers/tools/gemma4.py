"""Calls as Gemma 4 writes them: a name with arguments in an object of its own kind, whose strings stand between marks.

    <|tool_call>call:add{a:1,b:{note:<|"|>two, or so<|"|>}}<tool_call|>

Keys are bare, nothing in a string is escaped, and everything else is written as in JSON. The marks are special tokens,
so an answer's text must have them. Texts stream as they come, other values once they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coordinator.text.parsers.argument_values import quote, to_json
from coordinator.text.parsers.lark import literal
from coordinator.text.parsers.stepwise_reader import StepwiseReader
from coordinator.text.parsers.tagged_calls import Outcome, TaggedCallParser
from coordinator.text.parsers.tags import END_GEMMA_CALL, GEMMA_CALL, GEMMA_QUOTE, begins, skip_whitespace, unfinished
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

_CALL = "call:"
_NAME = re.compile(r"[^\s{}<>:,]*")
_KEY = re.compile(r'[^\s{}\[\]<>:,"]*')
_BARE = re.compile(r"[^{}\[\],]*")
_ENDS = {"{": "}", "[": "]"}


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        super().__init__({GEMMA_CALL: partial(_Reader, read_tools(tools))}, END_GEMMA_CALL)


class _Reader(StepwiseReader):
    """Reads one call."""

    def __init__(self, tools: Mapping[str, OfferedTool]) -> None:
        super().__init__(tools, self._call)
        self._open: list[str] = []  # what closes the objects and lists that are open
        self._first = True  # whether the innermost of them has had nothing yet
        self._types: frozenset[str] = frozenset()  # of the argument that is being read

    def _call(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        is_call = begins(text, start, _CALL)
        if is_call is None:
            return None
        self._next = self._function
        return start + len(_CALL) if is_call else self._break(position)

    def _function(self, text: str, position: int) -> int | None:
        name, end = _match(_NAME, text, position)
        if end == len(text):
            return None
        if text[end] != "{" or not self._begin_call(name):
            return self._break(position)
        return self._enter(text[end], end)

    def _enter(self, bracket: str, position: int) -> int:
        self._open.append(_ENDS[bracket])
        self._first, self._next = True, self._item
        return position + 1

    def _item(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        if start == len(text):
            return None
        if text[start] == self._open[-1]:
            self._arguments.append(self._open.pop())
            self._first, self._next = False, self._separator
            if not self._open:
                self._outcome = Outcome.WHOLE
            return start + 1
        if not self._first:
            self._arguments.append(", ")
        self._first = False
        self._next = self._key if self._open[-1] == "}" else self._value
        return start

    def _separator(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        if start == len(text):
            return None
        self._next = self._item
        if text[start] == ",":
            return start + 1
        return start if text[start] == self._open[-1] else self._break(position)

    def _key(self, text: str, position: int) -> int | None:
        quoted = begins(text, position, GEMMA_QUOTE)
        if quoted is None:
            return None
        if quoted:
            end = text.find(GEMMA_QUOTE, position + len(GEMMA_QUOTE))
            if end < 0:
                return None
            key, end = text[position + len(GEMMA_QUOTE) : end], end + len(GEMMA_QUOTE)
        else:
            key, end = _match(_KEY, text, position)
            if not key:
                return self._break(position) if position < len(text) else None
        colon = skip_whitespace(text, end)
        if colon == len(text):
            return None
        outermost = len(self._open) == 1
        if text[colon] != ":" or (outermost and key in self._seen) or self.name is None:
            return self._break(position)
        if outermost:
            self._seen.add(key)
            self._types = self._tools[self.name].argument_types(key)
        self._arguments.append(f"{quote(key)}: ")
        self._next = self._value
        return colon + 1

    def _value(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        if start == len(text):
            return None
        quoted = begins(text, start, GEMMA_QUOTE)
        if quoted is None:
            return None
        if quoted:
            self._arguments.append('"')
            self._next = self._text
            return start + len(GEMMA_QUOTE)
        if text[start] in _ENDS:
            self._arguments.append(text[start])
            return self._enter(text[start], start)
        self._next = self._bare
        return start

    def _text(self, text: str, position: int) -> int | None:
        found = text.find(GEMMA_QUOTE, position)
        end = found if found >= 0 else len(text) - unfinished(text[position:], GEMMA_QUOTE)
        self._arguments.append(quote(text[position:end])[1:-1])
        if found < 0:
            return end if end > position else None
        self._arguments.append('"')
        self._next = self._separator
        return end + len(GEMMA_QUOTE)

    def _bare(self, text: str, position: int) -> int | None:
        word, end = _match(_BARE, text, position)
        if any(tag in word for tag in (GEMMA_CALL, END_GEMMA_CALL, GEMMA_QUOTE)):
            return self._break(position)
        if end == len(text):
            return None
        word = word.strip()
        if not word or text[end] in _ENDS:
            return self._break(position)
        # What types stand deeper inside is not looked up.
        self._arguments.append(to_json(word, self._types if len(self._open) == 1 else frozenset()))
        self._next = self._separator
        return end


def _match(pattern: re.Pattern[str], text: str, position: int) -> tuple[str, int]:
    match = pattern.match(text, position)
    return (match[0], match.end()) if match else ("", position)


def is_taught_by(template: str) -> bool:
    """Return whether the template writes calls so."""
    return f"{GEMMA_CALL}{_CALL}" in template


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool.

    The arguments come in the schema's order. Of their schemas the types are kept, and of strings `enum` and `const`.
    """
    schemas = tool.argument_schemas()
    schemas |= {name: {} for name in sorted(tool.required() - schemas.keys())}
    lines = []
    # `first_i`: the arguments from the i-th on where none came before; `rest_i`: where one did.
    for index, (name, schema) in enumerate(schemas.items()):
        argument, rest = f"{rule}_argument_{index}", f"{rule}_rest_{index + 1}"
        lines.append(f"{argument}: {literal(f'{name}:')} {_value_grammar(tool, name, schema, rule, tag)}")
        without = ("", "") if name in tool.required() else (f" | {rule}_first_{index + 1}", f" | {rest}")
        lines.append(f"{rule}_first_{index}: {argument} {rest}{without[0]}")
        lines.append(f'{rule}_rest_{index}: "," {argument} {rest}{without[1]}')
    last, mark = len(schemas), tag(GEMMA_QUOTE)
    others = f'({rule}_pair ("," {rule}_pair)*)?' if not schemas and tool.takes_others() else '""'
    head = literal(f"{_CALL}{tool.name}{{")
    # A single token's text is never matched by a pattern.
    text = f"{mark} {rule}_text" if mark != literal(GEMMA_QUOTE) else f"{mark} {rule}_spelled"
    return [
        f'{rule}: {tag(GEMMA_CALL)} {head} {rule}_first_0 "}}" {tag(END_GEMMA_CALL)}',
        *lines,
        f"{rule}_first_{last}: {others}",
        f'{rule}_rest_{last}: ""',
        f"{rule}_string: {text}",
        f"{rule}_text: /(?s:.*)/ {mark}",
        f'{rule}_spelled[lazy]: /(?s:.*)<\\|"\\|>/',
        f"{rule}_number: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        f'{rule}_list: "[" ({rule}_any ("," {rule}_any)*)? "]"',
        f'{rule}_object: "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
        f'{rule}_pair: /[^\\s{{}}\\[\\]<>:,"|]+/ ":" {rule}_any',
        f'{rule}_any: {rule}_string | {rule}_number | "true" | "false" | "null" | {rule}_list | {rule}_object',
    ]


_TERMS = {
    "string": "{rule}_string",
    "number": "{rule}_number",
    "boolean": '("true" | "false")',
    "null": '"null"',
    "object": "{rule}_object",
    "array": "{rule}_list",
}


def _value_grammar(tool: OfferedTool, name: str, schema: object, rule: str, tag: Callable[[str], str]) -> str:
    """Return the term for an argument's value."""
    limits = schema if isinstance(schema, Mapping) else {}
    words = limits.get("enum", [limits["const"]] if "const" in limits else None)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        choices = " | ".join(literal(word) for word in words)
        return f"{tag(GEMMA_QUOTE)} ({choices}) {tag(GEMMA_QUOTE)}"
    if limits.get("type") == "integer":
        return "/-?(0|[1-9][0-9]*)/"
    return f"({' | '.join(_TERMS[kind].format(rule=rule) for kind in sorted(tool.argument_types(name)))})"
