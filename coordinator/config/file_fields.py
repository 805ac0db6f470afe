"""Mappings in a file that a person writes, checked by pydantic.

Refusals name the field, its value and what to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from services.errors import InvalidArgument


class Fields(BaseModel):
    """A mapping whose keys are written with dashes; unknown ones are refused."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"), extra="forbid", frozen=True, strict=True
    )


_Model = TypeVar("_Model", bound=Fields)


def read_fields(model: type[_Model], values: Mapping[str, Any], name: str = "") -> _Model:
    """Return the mapping as a model. name: the mapping's own in the file, for refusals; empty for the whole file.

    Raises InvalidArgument for the first field that is wrong.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        steps = [step for step in problem["loc"] if step not in ("str", "int", "float")]
        path = name + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        path = path.removeprefix(".")
        if problem["type"] == "extra_forbidden":
            fields = ", ".join(_model_at(model, steps[:-1]).model_json_schema(by_alias=True)["properties"])
            raise InvalidArgument(f"{path} is unknown; known here are {fields}", field=path) from error
        like = _example(_model_at(model, steps[:-1]), steps[-1])
        if problem["type"] == "missing":
            raise InvalidArgument(f"{path} is missing{like}", field=path) from error
        message = str(problem["msg"]).removeprefix("Value error, ")
        raise InvalidArgument(
            f"{path} is {problem['input']!r}: {message[0].lower()}{message[1:]}{like}", field=path
        ) from error


def _example(model: type[Fields], step: int | str) -> str:
    """Return the end of a refusal that shows how the field is written, where it has an example; else nothing."""
    field = model.model_fields.get(str(step).replace("-", "_"))
    return f"; write it like {field.examples[0]!r}" if field is not None and field.examples else ""


def _model_at(model: type[Fields], steps: list[int | str]) -> type[Fields]:
    """Return the model below another one that holds the field at the end of a path."""
    for step in steps:
        if isinstance(step, int):
            continue
        kind = model.model_fields[step.replace("-", "_")].annotation
        model = next(part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Fields))
    return model
