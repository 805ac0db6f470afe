"""Arguments that a model writes as bare text become JSON, by the types that the tool's schema allows."""

from __future__ import annotations

import json
from typing import NoReturn

from coordinator.text.parsers.tags import WHITESPACE
from coordinator.text.parsers.tool_schema import json_type

# Templates show some models their earlier calls with values as Python writes them.
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value.

    Text stays text where nothing else is allowed. Otherwise it is what it says as JSON, if that is no string and either
    one of the allowed types or text isn't allowed; what is left is text.
    """
    if types != {"string"}:
        word = text.strip(WHITESPACE)
        word = _PYTHON_WORDS.get(word, word)
        found = _type_of(word)
        if found is not None and found != "string" and (found in types or "string" not in types):
            return word
    return quote(text)


def quote(text: str) -> str:
    """The JSON string that holds a text."""
    return json.dumps(text, ensure_ascii=False)


def _type_of(text: str) -> str | None:
    """The type of a JSON value, None if it isn't JSON."""
    try:
        return json_type(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):  # not JSON, or a number too long, or nesting too deep, for Python
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
