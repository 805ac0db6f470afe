"""Calls as nested tags with bare text inside, as Qwen3-Coder and Qwen3.5 write them.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

What a value means depends on the tool's schema. One newline on either side of it is layout. Nothing in a value is
escaped, so a closing tag counts only where what follows confirms it: behind `</parameter>` another parameter or
`</function>`. A `</function>` with its `</tool_call>` inside a value means that the model forgot to close the value,
and breaks the call. Texts stream as they come, other values once they are whole. The outer tag may be missing, which
some of these models make a habit of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coordinator.text.parsers.bare_arguments import BareArgumentsReader, argument_rules, name_at
from coordinator.text.parsers.lark import literal
from coordinator.text.parsers.tagged_calls import TaggedCallParser
from coordinator.text.parsers.tags import END_TOOL_CALL, TOOL_CALL, begins, skip_whitespace, unfinished
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_END = re.compile(r"\n?(</parameter>|</function>)")


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        by_name = read_tools(tools)
        super().__init__({TOOL_CALL: partial(_Reader, by_name), _FUNCTION: partial(_Reader, by_name, in_function=True)})


class _Reader(BareArgumentsReader):
    """Reads one call. in_function: whether its function's tag has been opened already."""

    def __init__(self, tools: Mapping[str, OfferedTool], in_function: bool = False) -> None:
        super().__init__(tools, self._function if in_function else self._outer)

    def _outer(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        is_function = begins(text, start, _FUNCTION)
        if is_function is None:
            return None
        self._next = self._function
        return start + len(_FUNCTION) if is_function else self._break(position)

    def _function(self, text: str, position: int) -> int | None:
        name, end = name_at(text, position)
        if end == len(text):
            return None
        if text[end] != ">" or not self._begin_call(name):
            return self._break(position)
        self._next = self._inside
        return end + 1

    def _inside(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        parameter, closed = begins(text, start, _PARAMETER), begins(text, start, _END_FUNCTION)
        if closed:
            self._end_call()
            return start + len(_END_FUNCTION)
        if parameter:
            self._next = self._key
            return start + len(_PARAMETER)
        return None if parameter is None or closed is None else self._break(position)

    def _key(self, text: str, position: int) -> int | None:
        key, end = name_at(text, position)
        if end == len(text):
            return None
        if text[end] != ">" or not self._begin_value(key):
            return self._break(position)
        self._next = self._layout
        return end + 1

    def _layout(self, text: str, position: int) -> int | None:
        if position == len(text):
            return None
        self._next = self._text
        return position + (text[position] == "\n")

    def _text(self, text: str, position: int) -> int | None:
        tag = _END.search(text, position)
        if tag is None:
            end = len(text) - unfinished(text[position:], _END_PARAMETER, _END_FUNCTION)
            return self._keep(text, position, end - (text[position:end].endswith("\n")))
        start = skip_whitespace(text, tag.end())
        follows = (_PARAMETER, _END_FUNCTION) if tag[1] == _END_PARAMETER else (END_TOOL_CALL,)
        confirmed = [begins(text, start, other) for other in follows]
        if not any(confirmed):
            return self._keep(text, position, tag.start() if None in confirmed else tag.end())
        self._keep(text, position, tag.start())
        if tag[1] == _END_FUNCTION:
            return self._break(tag.start())
        self._end_value()
        self._next = self._inside
        return tag.end()


def is_taught_by(template: str) -> bool:
    """Return whether the template shows a function's tag inside the tag of the call."""
    return TOOL_CALL in template and _FUNCTION in template


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool.

    The arguments come in the schema's order; of a string's limits only `enum` and `const` are kept.
    """
    text = f"{rule}_text"

    def argument(name: str, value: str | None) -> str:
        ended = text if value is None else f'{value} "\\n{_END_PARAMETER}\\n"'
        return f"{literal(f'{_PARAMETER}{name}>' + chr(10))} {ended}"

    arguments, lines = argument_rules(tool, rule, argument)
    if not arguments and tool.takes_others():
        arguments.append(f"{rule}_other*")
        lines.append(f'{rule}_other: "{_PARAMETER}" /[^<>\\n]+/ ">\\n" {text}')
    head, tail = literal(f"\n{_FUNCTION}{tool.name}>\n"), literal(f"{_END_FUNCTION}\n")
    return [
        f"{rule}: {tag(TOOL_CALL)} {head} {' '.join(arguments)} {tail} {tag(END_TOOL_CALL)}",
        *lines,
        # Up to the first closing tag, and without what the parser would not read as text.
        f"{text}[lazy]: {text.upper()}",
        rf'{text.upper()}: (/(?s:.*)/ & ~/(?s:.*)<\/(parameter|function)>(?s:.*)/) "\n{_END_PARAMETER}\n"',
    ]
