"""The tools of a request: their names, and what their JSON schemas say about each argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.errors import InvalidArgument

# As a client sends it: OpenAI's {"type": "function", "function": {…}} or the inner object alone.
ToolSchema = Mapping[str, Any]

# An integer is a number here: which of the two is asked for doesn't change how a value is read.
ANY_TYPE = frozenset({"string", "number", "boolean", "null", "object", "array"})
_TYPES = {**{name: name for name in ANY_TYPE}, "integer": "number"}
# Schemas may refer to themselves.
_MAX_NESTING = 16


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]

    def argument_schemas(self) -> dict[str, Any]:
        """Return the schemas of the declared arguments by name."""
        properties = _resolved(self.parameters, self.parameters).get("properties")
        return dict(properties) if isinstance(properties, Mapping) else {}

    def required(self) -> frozenset[str]:
        """Return the names of the arguments that must be there."""
        names = _resolved(self.parameters, self.parameters).get("required")
        return frozenset(name for name in _list(names) if isinstance(name, str))

    def takes_others(self) -> bool:
        """Return whether arguments that are not declared are allowed."""
        return _resolved(self.parameters, self.parameters).get("additionalProperties") is not False

    def argument_types(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have, all of them where the schema doesn't say."""
        others = _resolved(self.parameters, self.parameters).get("additionalProperties")
        return _types(self.argument_schemas().get(name, others), self.parameters, set())


def read_tools(schemas: Sequence[ToolSchema]) -> dict[str, OfferedTool]:
    """Return tools by name.

    Raises InvalidArgument for one without a name, a name twice, or parameters that are no object.
    """
    tools: dict[str, OfferedTool] = {}
    for index, schema in enumerate(schemas):
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidArgument(f"tools[{index}] names no function: expected an object with a name", field="tools")
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise InvalidArgument(f"tools[{index}].parameters must be a JSON schema, an object", field="tools")
        if name in tools:
            raise InvalidArgument(f"tools[{index}]: {name!r} is there already; names must differ", field="tools")
        tools[name] = OfferedTool(name, parameters or {})
    return tools


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a chain of local `$ref`s leads to, an empty one where it isn't there."""
    for _ in range(_MAX_NESTING):
        if not isinstance(schema, Mapping):
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}


def _types(schema: Any, root: Mapping[str, Any], seen: set[int], nesting: int = _MAX_NESTING) -> frozenset[str]:
    """Return the JSON types that a schema allows.

    They are none for a schema in `seen`, so that one that refers to itself takes no longer than another.
    """
    schema = _resolved(schema, root)
    if id(schema) in seen or not nesting:
        return frozenset()
    seen.add(id(schema))
    stated = schema.get("type")
    names = {_TYPES[name] for name in _list(stated, stated) if isinstance(name, str) and name in _TYPES}
    if not names:
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        names = {json_type(value) for value in values}
    if not names:
        choices = [choice for key in ("anyOf", "oneOf") for choice in _list(schema.get(key))]
        names = {name for choice in choices for name in _types(choice, root, seen, nesting - 1)}
    if not names:
        names = set(ANY_TYPE)
        for part in _list(schema.get("allOf")):
            names &= _types(part, root, seen, nesting - 1) or ANY_TYPE
    return frozenset(names) or ANY_TYPE


def json_type(value: object) -> str:
    """Return the JSON type of a value that Python's json has read."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _list(value: object, *otherwise: object) -> list[Any]:
    return value if isinstance(value, list) else [*otherwise]
