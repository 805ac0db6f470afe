"""Calls as Python writes them, as Llama 3.2 and 4 do: an answer that is a list of calls.

    [add(a=1, b=2.5), write_file(path='a', text="b")]

The list stands at the answer's beginning, or behind `<|python_start|>` anywhere. Arguments are keywords with literals,
and come one by one, each once it is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from coordinator.text.parsers.argument_values import quote
from coordinator.text.parsers.lark import json_schema, literal
from coordinator.text.parsers.python_literals import NotALiteral, python_to_json
from coordinator.text.parsers.stepwise_reader import StepwiseReader
from coordinator.text.parsers.tagged_calls import TaggedCallParser
from coordinator.text.parsers.tags import skip_whitespace
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

START = "<|python_start|>"

_NAME = re.compile(r"[^\W\d][\w.-]*")
_PLAIN = re.compile(r"[^\\'\"\[\](){},]+")
_OPENING, _CLOSING = frozenset("[({"), frozenset("])}")


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        self._tools = read_tools(tools)
        super().__init__({START: self._new_reader})
        # Whether a list may begin here without the tag, and whether one goes on here.
        self._bare, self._in_list = bool(self._tools), False

    def _new_reader(self) -> _Reader:
        in_list, self._in_list, self._bare = self._in_list, False, False
        return _Reader(self._tools, in_list)

    def _find_call(self) -> bool:
        if self._bare or self._in_list:
            start = skip_whitespace(self._held, 0)
            if start == len(self._held):
                return False
            if self._in_list or self._held[start] == "[":
                self._begin(START, 0, start)
                return True
            self._bare = False
        return super()._find_call()

    def _find_closing(self) -> bool:
        start = skip_whitespace(self._held, 0)
        mark = self._held[start : start + 1]
        self._closing = mark if mark in ("]", ",") else "]"
        self._in_list, self._bare = mark == ",", mark == "]"
        return super()._find_closing()


class _Reader(StepwiseReader):
    """Reads one call of a list. in_list: whether the list has been opened already."""

    def __init__(self, tools: Mapping[str, OfferedTool], in_list: bool) -> None:
        super().__init__(tools, self._function if in_list else self._list)
        self._value: list[str] = []  # what there is of the value that is being read
        self._depth, self._quote = 0, ""

    def _list(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        if start == len(text):
            return None
        self._next = self._function
        return start + 1 if text[start] == "[" else self._break(position)

    def _function(self, text: str, position: int) -> int | None:
        found = _name(text, position)
        if found is None:
            return None
        name, end = found
        if text[end] != "(" or not self._begin_call(name):
            return self._break(position)
        self._next = self._key
        return end + 1

    def _key(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        if text[start : start + 1] == ")":
            self._end_call()
            return start + 1
        found = _name(text, start)
        if found is None:
            return None
        key, end = found
        if not key or text[end] != "=" or key in self._seen:
            return self._break(position)
        self._seen.add(key)
        self._value = [key]
        self._next = self._literal
        return end + 1

    def _literal(self, text: str, position: int) -> int | None:
        """Read up to the end of a value, piece by piece."""
        if position == len(text):
            return None
        mark = text[position]
        if plain := _PLAIN.match(text, position):
            end = plain.end()
        elif mark == "\\":
            # What is escaped does not end a string.
            end = position + 2
            if end > len(text):
                return None
        elif self._quote:
            end = position + 1
            self._quote = "" if mark == self._quote else self._quote
        elif mark in ",)" and not self._depth:
            return self._end_value(mark, position)
        else:
            end = position + 1
            self._quote = mark if mark in "'\"" else ""
            self._depth += (mark in _OPENING) - (mark in _CLOSING)
        self._value.append(text[position:end])
        return end if self._depth >= 0 else self._break(position)

    def _end_value(self, mark: str, position: int) -> int:
        key, *parts = self._value
        try:
            value = python_to_json("".join(parts))
        except NotALiteral:
            return self._break(position)
        self._arguments.append(f"{', ' if len(self._seen) > 1 else ''}{quote(key)}: {value}")
        self._next = self._key
        if mark == ")":
            self._end_call()
        return position + 1


def _name(text: str, position: int) -> tuple[str, int] | None:
    """Return the name at a position, and where the white space behind it ends; None where only more text can tell."""
    start = skip_whitespace(text, position)
    match = _NAME.match(text, start)
    end = skip_whitespace(text, match.end() if match else start)
    return None if end == len(text) else (match[0] if match else "", end)


def is_taught_by(template: str) -> bool:
    """Return whether the template tells the model in the words of Meta's own to answer with such a list."""
    return "func_name1(params_name1=params_value1" in template


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is a list of one call of the tool.

    Arguments that must be there come first, and the others in the schema's order.
    """
    schemas = tool.argument_schemas()
    schemas |= {name: {} for name in sorted(tool.required() - schemas.keys())}
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    terms: dict[str, str] = {}
    lines: list[str] = []
    for index, (name, schema) in enumerate(sorted(schemas.items(), key=lambda one: one[0] not in tool.required())):
        terms[name] = f"{rule}_argument_{index}"
        limits = schema if isinstance(schema, Mapping) else {}
        lines.append(f"{terms[name]}: {literal(f'{name}=')} {json_schema({**definitions, **limits})}")
    # By the first one that is there, as a comma stands before all others alone.
    choices = []
    for index, name in enumerate(terms):
        behind = list(terms)[index + 1 :]
        others = [f'", " {terms[other]}' if other in tool.required() else f'(", " {terms[other]})?' for other in behind]
        choices.append(" ".join([terms[name], *others]))
        if name in tool.required():
            break
    if not terms and tool.takes_others():
        lines.append(f'{rule}_other: /[A-Za-z_][A-Za-z0-9_]*/ "=" {json_schema({})}')
        choices.append(f'{rule}_other (", " {rule}_other)*')
    inside = f"({' | '.join(choices)}){'' if tool.required() else '?'}" if choices else ""
    return [f'{rule}: {literal(f"[{tool.name}(")} {inside} ")]"', *lines]
