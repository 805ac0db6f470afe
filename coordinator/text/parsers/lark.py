"""Writes terms of the Lark dialect that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Separators as templates write them, so that a forced call looks like the ones that the model was trained on, and so
# that no model can go on writing white space for ever. A schema's keywords that llguidance lacks are passed over: a
# tool's schema is a description first.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}


def literal(text: str) -> str:
    """Return a term that matches exactly this text."""
    return json.dumps(text)


def regex(pattern: str) -> str:
    """Return a term that matches a regular expression, which may have slashes and line breaks of its own."""
    # A slash that is escaped already is a pair, and passed over as one.
    escaped = re.sub(r"\\.|/", _escaped_slash, pattern, flags=re.DOTALL)
    return f"/{escaped}/".replace("\n", r"\n")


def _escaped_slash(match: re.Match[str]) -> str:
    return r"\/" if match[0] == "/" else match[0]


def json_schema(schema: Mapping[str, Any], *, lenient: bool = True) -> str:
    """Return a term that matches the JSON values of a schema.

    lenient: keywords that llguidance lacks are passed over; a tool's schema is a description first.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_OPTIONS, 'lenient': lenient}})}"
