"""Calls as Llama 3.1 and later write them: an answer that is one JSON object, or several with semicolons between.

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}

The object stands at the answer's beginning, or behind `<|python_tag|>` anywhere. A call of a built-in tool that is
written as Python behind that tag is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from coordinator.text.parsers.json_call import JsonCallReader
from coordinator.text.parsers.lark import json_schema, literal
from coordinator.text.parsers.tagged_calls import TaggedCallParser
from coordinator.text.parsers.tags import skip_whitespace
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

PYTHON_TAG = "<|python_tag|>"

# In a template's source the quotes may be escaped.
_TAUGHT = re.compile(r'\{\\*"name\\*": function name, \\*"parameters\\*": dictionary of argument name')


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        by_name = read_tools(tools)
        super().__init__(
            {PYTHON_TAG: lambda: JsonCallReader(by_name, ("parameters", "arguments"), "function")}, closing=";"
        )
        # Whether a call may begin here without the tag.
        self._bare = bool(by_name)

    def _find_call(self) -> bool:
        if self._bare:
            start = skip_whitespace(self._held, 0)
            if start == len(self._held):
                return False
            self._bare = False
            if self._held[start] == "{":
                self._begin(PYTHON_TAG, 0, start)
                return True
        return super()._find_call()

    def _find_closing(self) -> bool:
        self._bare = True
        return super()._find_closing()


def is_taught_by(template: str) -> bool:
    """Return whether the template tells the model in the words of Meta's own to answer with such an object."""
    return _TAUGHT.search(template) is not None


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool."""
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": '
    return [
        f"{rule}: {literal(head)} {rule}_arguments {literal('}')}",
        f"{rule}_arguments: {json_schema({**tool.parameters, 'type': 'object'})}",
    ]
