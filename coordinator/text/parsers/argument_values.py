"""Turns arguments that a model writes as bare text into JSON, by the types that the tool's schema allows."""

from __future__ import annotations

import json
from typing import NoReturn

from coordinator.text.parsers.tags import WHITESPACE
from coordinator.text.parsers.tool_schema import json_type

# Templates show some models their earlier calls with values as Python writes them.
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value that may have these types.

    Where only strings are allowed, the value is a string. Otherwise it is read as JSON, if it is JSON of another type
    than string and that type is allowed, or strings are not; anything else is a string too.
    """
    if types != {"string"}:
        word = text.strip(WHITESPACE)
        word = _PYTHON_WORDS.get(word, word)
        kind = _type_of(word)
        if kind is not None and kind != "string" and (kind in types or "string" not in types):
            return word
    return quote(text)


def quote(text: str) -> str:
    """Return the JSON string that holds a text."""
    return json.dumps(text, ensure_ascii=False)


def _type_of(text: str) -> str | None:
    """Return the type of a JSON value, None for what isn't JSON."""
    try:
        return json_type(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):  # not JSON, or a number too long, or nesting too deep, for Python
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
