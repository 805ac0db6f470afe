"""Writes terms of the Lark dialect that llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Separators as templates write them, so that a forced call looks like the ones that the model was trained on, and so
# that no model can go on writing white space for ever. A schema's keywords that llguidance lacks are passed over: a
# tool's schema is a description first.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}


def literal(text: str) -> str:
    """Return a term that matches exactly this text."""
    return json.dumps(text)


def json_schema(schema: Mapping[str, Any], *, lenient: bool = True) -> str:
    """Return a term that matches the JSON values of a schema.

    lenient: keywords that llguidance lacks are passed over; a tool's schema is a description first.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_OPTIONS, 'lenient': lenient}})}"
