"""The values of enumerations and their numbers in protobuf, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from services.errors import InvalidArgument

ValueT = TypeVar("ValueT")


class EnumNumbers(Generic[ValueT]):
    """One enumeration of the contract."""

    def __init__(self, numbers: Mapping[ValueT, int]) -> None:
        """numbers: the number of each value."""
        self._numbers = numbers
        self._values = {number: value for value, number in numbers.items()}

    def number(self, value: ValueT) -> Any:
        """Return a value's number, of the type that protobuf has for it."""
        return self._numbers[value]

    def value(self, number: int, field: str) -> ValueT:
        """Return the value of a number. Raises InvalidArgument for one that this version doesn't know."""
        if number not in self._values:
            known = ", ".join(f"{known} ({value})" for known, value in self._values.items())
            raise InvalidArgument(f"{field} is {number}, not one of {known}", field=field)
        return self._values[number]

    def get(self, number: int) -> ValueT | None:
        """Return the value of a number, None for one that this version doesn't know."""
        return self._values.get(number)
