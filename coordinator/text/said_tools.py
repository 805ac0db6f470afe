"""Tools in a conversation for a chat template that teaches none: said in words, in the format of Hermes.

The tools become part of the system message, earlier calls text of the assistant, and their results turns of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from coordinator.text.parsers.tags import END_TOOL_CALL, TOOL_CALL

FORMAT = "hermes"
"""The name of the format in which the model is told to call."""

_BEFORE = "# Tools\n\nThese functions can be called; each line describes one as JSON.\n<tools>\n"
_BEHIND = f"""
</tools>

To call one, write its name and its arguments in exactly this form:
{TOOL_CALL}
{{"name": <name>, "arguments": <object>}}
{END_TOOL_CALL}
What it gives comes back as <tool_response>."""


def say_tools(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return the messages with everything about tools as text; all are in the form that chat templates take."""
    said = _BEFORE + "\n".join(_json(tool) for tool in tools) + _BEHIND
    plain: list[dict[str, object]] = []
    for message in messages:
        text = str(message.get("content") or "")
        calls = message.get("tool_calls")
        if message.get("role") == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if plain and plain[-1].get("role") == "user" and str(plain[-1]["content"]).startswith("<tool_response>"):
                plain[-1]["content"] = f"{plain[-1]['content']}\n{text}"
            else:
                plain.append({"role": "user", "content": text})
            continue
        if isinstance(calls, list):
            text = "\n".join([*([text] if text else []), *map(_call, calls)])
        plain.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text})
    if plain and plain[0].get("role") == "system":
        plain[0]["content"] = f"{plain[0]['content']}\n\n{said}"
        return plain
    return [{"role": "system", "content": said}, *plain]


def _call(call: Mapping[str, Mapping[str, object]]) -> str:
    function = call["function"]
    return f"{TOOL_CALL}\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n{END_TOOL_CALL}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
