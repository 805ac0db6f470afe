"""Reads the arguments of one call as bare text between tags; formats of that kind share this, and add their tags.

What a value means depends on the tool's schema. Texts stream as they come, other values once they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from coordinator.text.parsers.argument_values import quote, to_json
from coordinator.text.parsers.lark import json_schema, literal
from coordinator.text.parsers.stepwise_reader import StepwiseReader
from coordinator.text.parsers.tool_schema import OfferedTool

_NAME = re.compile(r"[^<>\n]*")


class BareArgumentsReader(StepwiseReader):
    """Reads one call."""

    def __init__(self, tools: Mapping[str, OfferedTool], first: Callable[[str, int], int | None]) -> None:
        """first: what reads the call's beginning."""
        super().__init__(tools, first)
        self._types: frozenset[str] = frozenset()  # of the value that is being read
        self._value: list[str] = []  # what there is of it, unless it streams

    def _begin_value(self, key: str) -> bool:
        """Begin an argument, and return whether it is the first of this name."""
        if key in self._seen or self.name is None:
            return False
        self._arguments.append(f"{', ' if self._seen else ''}{quote(key)}: ")
        self._seen.add(key)
        self._types = self._tools[self.name].argument_types(key)
        self._arguments += '"' if self._streams else ""
        self._value = []
        return True

    def _end_value(self) -> None:
        self._arguments.append('"' if self._streams else to_json("".join(self._value), self._types))

    def _keep(self, text: str, start: int, end: int) -> int | None:
        """Add text of the value that is certain; return the position behind it, None where there is none."""
        if self._streams:
            self._arguments.append(quote(text[start:end])[1:-1])
        else:
            self._value.append(text[start:end])
        return end if end > start else None

    @property
    def _streams(self) -> bool:
        return self._types == {"string"}


def name_at(text: str, position: int) -> tuple[str, int]:
    """Return the name at a position, which has no angle brackets and no newlines in it, and where it ends."""
    match = _NAME.match(text, position)
    return (match[0], match.end()) if match else ("", position)


def argument_rules(
    tool: OfferedTool, rule: str, argument: Callable[[str, str | None], str]
) -> tuple[list[str], list[str]]:
    """Return the terms of a tool's declared arguments, in the schema's order, and the Lark lines of their rules.

    rule: what the names of these begin with. argument: returns the term for an argument by its name and the term of its
    value, None where that is text.
    """
    schemas = tool.argument_schemas()
    schemas |= {name: {} for name in sorted(tool.required() - schemas.keys())}
    terms, lines = [], []
    for index, (name, schema) in enumerate(schemas.items()):
        own = f"{rule}_argument_{index}"
        terms.append(own if name in tool.required() else f"{own}?")
        lines.append(f"{own}: {argument(name, _value_term(tool, name, schema))}")
    return terms, lines


def _value_term(tool: OfferedTool, name: str, schema: object) -> str | None:
    """Return the term for a value, None where it is text. Of a string's limits only `enum` and `const` are kept."""
    types = tool.argument_types(name)
    limits = schema if isinstance(schema, Mapping) else {}
    words = limits.get("enum", [limits["const"]] if "const" in limits else None)
    if types == {"boolean"}:
        words = ["true", "false", "True", "False"]
    elif not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        words = None
    if words:
        return f"({' | '.join(literal(word) for word in words)})"
    if "string" in types:
        return None
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return json_schema({**definitions, **limits})
