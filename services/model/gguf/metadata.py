"""Typed reading of a GGUF file's metadata."""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping
from pathlib import Path

from services.errors import InvalidArgument, Unimplemented
from services.model.gguf.container import GgufArray, GgufFile, Value

ARCHITECTURE = "general.architecture"


class Metadata:
    """The metadata of a model. Every method raises InvalidArgument naming the file and the key that holds something
    else, or that is missing where there is no default.

    Keys are written as the format's description has them: {arch} in them stands for the architecture.
    """

    def __init__(self, file: GgufFile) -> None:
        self._values: Mapping[str, Value] = file.metadata
        self.path: Path = file.paths[0]
        self.architecture = self.text(ARCHITECTURE)

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return self._named(key) in self._values

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        """Return a whole number."""
        value = self._values.get(self._named(key), default)
        if type(value) is not int or value < at_least:
            raise self._wrong(key, value, f"a whole number of at least {at_least}")
        return value

    def by_layer(self, key: str, layers: int) -> list[int]:
        """Return a whole number of each layer, which may be one for all of them."""
        if not isinstance(self._values.get(self._named(key)), GgufArray):
            return [self.integer(key)] * layers
        items = self._items(key)
        if len(items) != layers or any(type(item) is not int or item < 1 for item in items):
            raise self._wrong(key, items, f"a whole number of at least 1 for each of {layers} layers")
        return [int(item) for item in items]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0: of those that are the same float32 the one that is written shortest, which is what
        the model's own configuration says."""
        value = self._values.get(self._named(key), default)
        if type(value) not in (int, float) or not value > 0:  # type: ignore[operator]
            raise self._wrong(key, value, "a number above 0")
        return shortest(float(value))  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._values.get(self._named(key), default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._values.get(self._named(key), default)
        if type(value) is not str:
            raise self._wrong(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts. Raises DataLoss for one that is not UTF-8."""
        return [item for item in self._items(key) if isinstance(item, str)]

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers."""
        return [item for item in self._items(key) if isinstance(item, int)]

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers."""
        return [float(item) for item in self._items(key) if isinstance(item, int | float)]

    def pattern(self, key: str, count: int, default: int) -> list[bool]:
        """Return what is said of each of `count` layers: a list of true and false, or of all but each so-many-th one
        true, `default` where the file says neither."""
        if isinstance(self._values.get(self._named(key)), GgufArray):
            items = self._items(key)
            if len(items) != count or any(type(item) is not bool for item in items):
                raise self._wrong(key, items, f"true or false for each of {count} layers")
            return [bool(item) for item in items]
        period = self.integer(key, default)
        return [(layer + 1) % period != 0 for layer in range(count)]

    def token(self, name: str) -> int | None:
        """Return a special token's id; None where there is none. name: like "eos"."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.integer(key, at_least=0) if self.has(key) else None

    def starting_with(self, prefix: str) -> dict[str, Value]:
        """Return what keys of this beginning hold, by what follows it."""
        return {key[len(prefix) :]: value for key, value in self._values.items() if key.startswith(prefix)}

    def with_keys(self, values: Mapping[str, Value]) -> Metadata:
        """Return the same with other values of some keys."""
        other = copy.copy(self)
        other._values = {**self._values, **{self._named(key): value for key, value in values.items()}}
        return other

    def unsupported(self, key: str, accepted: str) -> Unimplemented:
        """Return the error for a value that is not served. accepted: what is, or what to do."""
        name = self._named(key)
        return Unimplemented(f"{self.path}: {name} {self._values.get(name)!r} is not supported: {accepted}", field=name)

    def _items(self, key: str) -> list[str] | list[int] | list[float] | list[bool]:
        value = self._values.get(self._named(key))
        if not isinstance(value, GgufArray):
            raise self._wrong(key, value, "a list")
        return value.items()

    def _named(self, key: str) -> str:
        return key.format(arch=self.architecture) if key.startswith("{") else key

    def _wrong(self, key: str, value: object, accepted: str) -> InvalidArgument:
        name = self._named(key)
        told = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return InvalidArgument(f"{self.path}: {name} {told}; it must be {accepted}", field=name)


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same float32, or the number itself where there is none."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if struct.pack("<f", rounded) == stored:
            return rounded
    return value
