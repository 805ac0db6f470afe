"""Mappings of a file that a person writes, checked by pydantic: refused by field, value and what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from services.errors import InvalidArgument


class Fields(BaseModel):
    """Keys are written with dashes; unknown ones are refused."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"), extra="forbid", frozen=True, strict=True
    )


_Model = TypeVar("_Model", bound=Fields)


def read_fields(model: type[_Model], values: Mapping[str, Any], name: str = "") -> _Model:
    """Raises InvalidArgument for the first field that is wrong. name: of the mapping, for the sentence."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors()[0]
        steps = [step for step in found["loc"] if step not in ("str", "int", "float")]
        path = name + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        path = path.removeprefix(".")
        if found["type"] == "extra_forbidden":
            fields = ", ".join(_model_at(model, steps[:-1]).model_json_schema(by_alias=True)["properties"])
            raise InvalidArgument(f"{path} is unknown; known here are {fields}", field=path) from error
        like = _example(_model_at(model, steps[:-1]), steps[-1])
        if found["type"] == "missing":
            raise InvalidArgument(f"{path} is missing{like}", field=path) from error
        message = str(found["msg"]).removeprefix("Value error, ")
        raise InvalidArgument(
            f"{path} is {found['input']!r}: {message[0].lower()}{message[1:]}{like}", field=path
        ) from error


def _example(model: type[Fields], step: int | str) -> str:
    """The end of a sentence, where the field has one."""
    field = model.model_fields.get(str(step).replace("-", "_"))
    return f"; write it like {field.examples[0]!r}" if field is not None and field.examples else ""


def _model_at(model: type[Fields], steps: list[int | str]) -> type[Fields]:
    """The one whose field a path names."""
    for step in steps:
        if isinstance(step, int):
            continue
        kind = model.model_fields[step.replace("-", "_")].annotation
        model = next(part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Fields))
    return model
