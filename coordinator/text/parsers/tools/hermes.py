"""Calls as JSON objects between tags, as Hermes, Qwen2.5 and Qwen3 write them.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

How the object is read, and when its arguments come, `json_call` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from coordinator.text.parsers.json_call import JsonCallReader
from coordinator.text.parsers.lark import json_schema, literal
from coordinator.text.parsers.tagged_calls import TaggedCallParser
from coordinator.text.parsers.tags import END_TOOL_CALL, TOOL_CALL
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

# In a template's source the quotes may be escaped and the newline spelled out.
_TAUGHT = re.compile(r'<tool_call>(?:\s|\\n)*\{\\*"(?:name|arguments)\\*":')


class Parser(TaggedCallParser):
    """Finds the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        by_name = read_tools(tools)
        super().__init__({TOOL_CALL: lambda: JsonCallReader(by_name)})


def is_taught_by(template: str) -> bool:
    """Return whether the template shows a JSON object inside the tag."""
    return _TAUGHT.search(template) is not None


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool."""
    head = f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    return [
        f"{rule}: {tag(TOOL_CALL)} {literal(head)} {rule}_arguments {literal('}' + chr(10))} {tag(END_TOOL_CALL)}",
        f"{rule}_arguments: {json_schema({**tool.parameters, 'type': 'object'})}",
    ]
