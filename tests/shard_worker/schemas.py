"""Random small JSON schemas, and an independent check of values against them."""

from __future__ import annotations

import random
import re
from typing import Any

PATTERN = "^[a-f]{2}-[0-9]{1,3}$"


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Bounded everywhere, so that random walks come to an end."""
    kinds = ["enum", "integer", "string", "pattern", "boolean", "null", "number", "any of"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "array", "object", "object", "array"])
    match kind:
        case "enum":
            values = ["x", "ü€😀", 'a"\\\n', 7, -1.5, None, True, [1], {"k": 2}]
            return {"enum": rng.sample(values, rng.randint(1, 4))}
        case "integer":
            least = rng.randint(-200, 100)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 300)}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
        case "pattern":
            return {"type": "string", "pattern": PATTERN}
        case "array":
            least = rng.randint(0, 2)
            most = least + rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": most}
        case "object":
            names = rng.sample(["a", "b", "naïve", "long name", "q\"'"], rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case "any of":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what the schema describes, for the keywords that `random_schema` and the tests use."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    match schema["type"]:
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return (
                isinstance(value, str)
                and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
                and re.search(schema.get("pattern", ""), value) is not None
            )
        case "array":
            return (
                isinstance(value, list)
                and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
                and all(fits(item, schema["items"]) for item in value)
            )
        case "object":
            known = schema.get("properties", {})
            return (
                isinstance(value, dict)
                and set(schema.get("required", ())) <= set(value)
                and (schema.get("additionalProperties", True) or set(value) <= set(known))
                and all(fits(value[name], known[name]) for name in value if name in known)
            )
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
    raise AssertionError(schema)
