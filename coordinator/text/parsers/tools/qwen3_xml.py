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

from coordinator.text.parsers.argument_values import quote, to_json
from coordinator.text.parsers.lark import json_schema, literal
from coordinator.text.parsers.tagged_calls import Outcome, Step, TaggedCallParser
from coordinator.text.parsers.tags import END_TOOL_CALL, TOOL_CALL, begins, skip_whitespace, unfinished
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_END = re.compile(r"\n?(</parameter>|</function>)")


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        by_name = read_tools(tools)
        super().__init__({TOOL_CALL: partial(_Reader, by_name), _FUNCTION: partial(_Reader, by_name, in_function=True)})


class _Reader:
    """Reads one call. in_function: whether its function's tag has been opened already."""

    def __init__(self, tools: Mapping[str, OfferedTool], in_function: bool = False) -> None:
        self.name: str | None = None
        self._tools = tools
        self._outcome = Outcome.READING
        # The method that reads on from a position and returns the position behind what it read, None to wait for text.
        self._next: Callable[[str, int], int | None] = self._function if in_function else self._outer
        self._arguments: list[str] = []
        self._seen: set[str] = set()
        self._types: frozenset[str] = frozenset()  # of the value that is being read
        self._value: list[str] = []  # what there is of it, unless it streams

    def read(self, text: str) -> Step:
        """See `CallReader`."""
        position = 0
        self._arguments = []
        while self._outcome is Outcome.READING and (end := self._next(text, position)) is not None:
            position = end
        return Step(self._outcome, position, "".join(self._arguments))

    def _outer(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        is_function = begins(text, start, _FUNCTION)
        if is_function is None:
            return None
        self._next = self._function
        return start + len(_FUNCTION) if is_function else self._break(position)

    def _function(self, text: str, position: int) -> int | None:
        name, end = _name(text, position)
        if end == len(text):
            return None
        if text[end] != ">" or name not in self._tools:
            return self._break(position)
        self.name = name
        self._arguments.append("{")
        self._next = self._inside
        return end + 1

    def _inside(self, text: str, position: int) -> int | None:
        start = skip_whitespace(text, position)
        parameter, closed = begins(text, start, _PARAMETER), begins(text, start, _END_FUNCTION)
        if closed:
            self._arguments.append("}")
            self._outcome = Outcome.WHOLE
            return start + len(_END_FUNCTION)
        if parameter:
            self._next = self._key
            return start + len(_PARAMETER)
        return None if parameter is None or closed is None else self._break(position)

    def _key(self, text: str, position: int) -> int | None:
        key, end = _name(text, position)
        if end == len(text):
            return None
        if text[end] != ">" or key in self._seen or self.name is None:
            return self._break(position)
        self._arguments.append(f"{', ' if self._seen else ''}{quote(key)}: ")
        self._seen.add(key)
        self._types = self._tools[self.name].argument_types(key)
        self._arguments += '"' if self._streams() else ""
        self._value = []
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
        self._arguments.append('"' if self._streams() else to_json("".join(self._value), self._types))
        self._next = self._inside
        return tag.end()

    def _keep(self, text: str, start: int, end: int) -> int | None:
        """Add text of the value that is certain; return the position behind it, None where there is none."""
        if self._streams():
            self._arguments.append(quote(text[start:end])[1:-1])
        else:
            self._value.append(text[start:end])
        return end if end > start else None

    def _streams(self) -> bool:
        return self._types == {"string"}

    def _break(self, position: int) -> int:
        self._outcome = Outcome.BROKEN
        return position


def _name(text: str, position: int) -> tuple[str, int]:
    """Return the name at a position, and where it ends."""
    match = _NAME.match(text, position)
    return (match[0], match.end()) if match else ("", position)


def is_taught_by(template: str) -> bool:
    """Return whether the template shows a function's tag inside the tag of the call."""
    return TOOL_CALL in template and _FUNCTION in template


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool.

    The arguments come in the schema's order; of a string's limits only `enum` and `const` are kept.
    """
    text = f"{rule}_text"
    schemas = tool.argument_schemas()
    schemas |= {name: {} for name in sorted(tool.required() - schemas.keys())}
    arguments, lines = [], []
    for index, (name, schema) in enumerate(schemas.items()):
        argument = f"{rule}_argument_{index}"
        arguments.append(argument if name in tool.required() else f"{argument}?")
        value = _value_grammar(tool, name, schema, text)
        lines.append(f"{argument}: {literal(f'{_PARAMETER}{name}>' + chr(10))} {value}")
    if not schemas and tool.takes_others():
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


def _value_grammar(tool: OfferedTool, name: str, schema: object, text: str) -> str:
    """Return the term for a value and the tag that closes it."""
    types = tool.argument_types(name)
    limits = schema if isinstance(schema, Mapping) else {}
    words = limits.get("enum", [limits["const"]] if "const" in limits else None)
    if types == {"boolean"}:
        words = ["true", "false", "True", "False"]
    elif not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        words = None
    if words:
        term = f"({' | '.join(literal(word) for word in words)})"
    elif "string" in types:
        return text
    else:
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        term = json_schema({**definitions, **limits})
    return f'{term} "\\n{_END_PARAMETER}\\n"'
