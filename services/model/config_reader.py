"""Typed reading of a config.json, in which anything may stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.errors import InvalidArgument, Unimplemented


class ConfigReader:
    """Typed reading of a config.json. Every method raises InvalidArgument naming the key that holds something else.

    A key that is missing or null counts as not given.
    """

    def __init__(self, raw: Mapping[str, Any], source: str = "config.json") -> None:
        """source: what errors call the file."""
        self._raw, self.source = raw, source

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return self._raw.get(key) is not None

    def raw(self, key: str) -> Any:
        """Return whatever the key holds, unchecked."""
        return self._raw.get(key)

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        """Return a whole number. Without a default the key must be given."""
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InvalidArgument(
                f"{self.source}: {key} is {value!r}; it must be a whole number of at least {at_least}",
                field=key,
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0. Without a default the key must be given."""
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidArgument(f"{self.source}: {key} is {value!r}; it must be above 0", field=key)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InvalidArgument(f"{self.source}: {key} is {value!r}; it must be true or false", field=key)
        return value

    def only(self, key: str, *served: object) -> None:
        """Check that a key, where it is given, holds one of the values served. Raises Unimplemented otherwise."""
        value = self._raw.get(key)
        if value is not None and value not in served:
            raise Unimplemented(
                f"{self.source}: {key} {value!r} is not supported, only {' and '.join(map(repr, served)) or 'null'} is",
                field=key,
            )

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object, an empty one where the key is not given."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise InvalidArgument(f"{self.source}: {key} must be an object", field=key)
        return value or {}

    def with_keys(self, keys: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the same file in which these keys are given, in place of what it has under them."""
        return ConfigReader({**self._raw, **keys}, self.source)
