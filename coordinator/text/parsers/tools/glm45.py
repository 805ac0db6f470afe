"""Calls as a name and tags of keys and values inside one tag, as GLM-4.5 and later write them.

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

Newer models leave the newlines out. What a value means depends on the tool's schema, and nothing in it is escaped: its
closing tag counts only where another key or the call's end follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coordinator.text.parsers.bare_arguments import BareArgumentsReader, argument_rules, name_at
from coordinator.text.parsers.lark import literal
from coordinator.text.parsers.tagged_calls import TaggedCallParser
from coordinator.text.parsers.tags import END_TOOL_CALL, TOOL_CALL, WHITESPACE, begins, skip_whitespace, unfinished
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        super().__init__({TOOL_CALL: partial(_Reader, read_tools(tools))})


class _Reader(BareArgumentsReader):
    """Reads one call."""

    def __init__(self, tools: Mapping[str, OfferedTool]) -> None:
        super().__init__(tools, self._function)

    def _function(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        name, end = name_at(text, start)
        if end == len(text):
            return None
        # Before its first key or its end it is no call yet.
        after = skip_whitespace(text, end)
        follows = [begins(text, after, tag) for tag in (_KEY, END_TOOL_CALL)]
        if not any(follows) and None in follows:
            return None
        if not any(follows) or not self._begin_call(name.strip(WHITESPACE)):
            return self._break(position)
        self._next = self._inside
        return end

    def _inside(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        key, closed = begins(text, start, _KEY), begins(text, start, END_TOOL_CALL)
        if closed:
            self._end_call()
            return start
        if key:
            self._next = self._key
            return start + len(_KEY)
        return None if key is None or closed is None else self._break(position)

    def _key(self, text: str, position: int) -> int | None:
        key, end = name_at(text, position)
        is_closed = begins(text, end, _END_KEY) if end < len(text) else None
        if is_closed is None:
            return None
        start = skip_whitespace(text, end + len(_END_KEY))
        is_value = begins(text, start, _VALUE)
        if is_closed and is_value is None:
            return None
        if not is_closed or not is_value or not self._begin_value(key.strip(WHITESPACE)):
            return self._break(position)
        self._next = self._text
        return start + len(_VALUE)

    def _text(self, text: str, position: int) -> int | None:
        end = text.find(_END_VALUE, position)
        if end < 0:
            return self._keep(text, position, len(text) - unfinished(text[position:], _END_VALUE))
        behind = end + len(_END_VALUE)
        start = skip_whitespace(text, behind)
        confirmed = [begins(text, start, tag) for tag in (_KEY, END_TOOL_CALL)]
        if not any(confirmed):
            return self._keep(text, position, end if None in confirmed else behind)
        self._keep(text, position, end)
        self._end_value()
        self._next = self._inside
        return behind


def is_taught_by(template: str) -> bool:
    """Return whether the template shows a key's tag beside the tag of the call."""
    return TOOL_CALL in template and _KEY in template


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool.

    The arguments come in the schema's order; of a string's limits only `enum` and `const` are kept.
    """
    text = f"{rule}_text"

    def argument(name: str, value: str | None) -> str:
        ended = text if value is None else f'{value} "{_END_VALUE}\\n"'
        return f"{literal(f'{_KEY}{name}{_END_KEY}{chr(10)}{_VALUE}')} {ended}"

    arguments, lines = argument_rules(tool, rule, argument)
    if not arguments and tool.takes_others():
        arguments.append(f"{rule}_other*")
        lines.append(f'{rule}_other: "{_KEY}" /[^<>\\n]+/ {literal(f"{_END_KEY}{chr(10)}{_VALUE}")} {text}')
    return [
        f"{rule}: {tag(TOOL_CALL)} {literal(tool.name + chr(10))} {' '.join(arguments)} {tag(END_TOOL_CALL)}",
        *lines,
        # Up to the first closing tag.
        f"{text}[lazy]: {text.upper()}",
        rf'{text.upper()}: (/(?s:.*)/ & ~/(?s:.*)<\/arg_value>(?s:.*)/) "{_END_VALUE}\n"',
    ]
