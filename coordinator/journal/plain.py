"""Frozen dataclasses as values that JSON has, and back: what a record of the journal may hold.

Types are read from the dataclass itself, so that a new field of a request is written without being named here.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return a value of JSON's types that `from_plain` makes the same value of."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [to_plain(entry) for entry in value]
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """Return the value of this type that `to_plain` made a value of.

    Fields that are missing have their defaults, and those of unknown names are passed over, so that another version's
    records can be read. Raises TypeError or ValueError for what is no value of the type.
    """
    return cast(T, _of_kind(kind, value))


def _of_kind(kind: Any, value: Any) -> Any:
    origin, parameters = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parameters:
            return None
        (one,) = (parameter for parameter in parameters if parameter is not type(None))
        return _of_kind(one, value)
    if origin is tuple and parameters[-1] is Ellipsis or origin in (list, frozenset):
        return origin(_of_kind(parameters[0], entry) for entry in _expect(list, value))
    if origin is not None and issubclass(origin, Mapping):
        made = {_key(parameters[0], key): _of_kind(parameters[1], entry) for key, entry in _expect(dict, value).items()}
        return made
    if is_dataclass(kind) and isinstance(kind, type):
        types_of, given = _types(kind), _expect(dict, value)
        return kind(**{name: _of_kind(types_of[name], entry) for name, entry in given.items() if name in types_of})
    if issubclass(kind, Enum):
        return kind(value)
    return float(_expect((int, float), value)) if kind is float else _expect(kind, value)


def _key(kind: Any, key: str) -> Any:
    """Return a mapping's key, which JSON has as a text."""
    return key if kind is str else kind(key)


def _expect(kind: Any, value: Any) -> Any:
    """Return a value that is of this type. Raises TypeError for another one."""
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:80]!r} where {kind} was expected")
    return value


@lru_cache(maxsize=256)
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
