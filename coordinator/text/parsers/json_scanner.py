"""Follows the text of one JSON value as it comes, so that a mistake is known at the character that makes it.

Keeps no text and builds no values; the nesting may be of any depth.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from coordinator.text.parsers.tags import WHITESPACE

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# What may follow inside a number: its part so far to the characters that lead to another part.
_NUMBER = {
    "minus": {"0": "zero", **dict.fromkeys("123456789", "whole")},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "whole": {".": "point", "e": "exponent", "E": "exponent", **dict.fromkeys(_DIGITS, "whole")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "exponent", "E": "exponent", **dict.fromkeys(_DIGITS, "fraction")},
    "exponent": {"+": "sign", "-": "sign", **dict.fromkeys(_DIGITS, "power")},
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
_COMPLETE = frozenset({"zero", "whole", "fraction", "power"})


class _Next(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # or the end of the array
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    COLON = auto()
    COMMA = auto()  # or the end of what is open
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


class JsonScanner:
    """Follows one JSON value."""

    def __init__(self) -> None:
        self._next = _Next.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._hex_left = 0
        self._literal = ""  # what is missing of true, false or null
        self._number = ""  # the part of a number that was read last

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._open)

    def step(self, text: str, position: int) -> int:
        """Read one character, or several plain ones inside a string; return the position behind them, -1 if not JSON.

        Characters behind the end of the outermost object or array, except white space, are not JSON.
        """
        if self._next is _Next.STRING and (plain := _PLAIN.match(text, position)):
            return plain.end()
        return position + 1 if self._take(text[position]) else -1

    def _take(self, char: str) -> bool:
        match self._next:
            case _Next.STRING:
                return self._in_string(char)
            case _Next.ESCAPE:
                self._hex_left = 4
                self._next = _Next.HEX if char == "u" else _Next.STRING
                return char in '"\\/bfnrtu'
            case _Next.HEX:
                self._hex_left -= 1
                self._next = _Next.HEX if self._hex_left else _Next.STRING
                return char in _HEX
            case _Next.LITERAL:
                fits = self._literal[0] == char
                self._literal = self._literal[1:]
                self._next = _Next.LITERAL if self._literal else _Next.COMMA
                return fits
            case _Next.NUMBER:
                if char in _NUMBER[self._number]:
                    self._number = _NUMBER[self._number][char]
                    return True
                self._next = _Next.COMMA
                if self._number not in _COMPLETE:
                    return False
        return char in WHITESPACE or self._structure(char)

    def _in_string(self, char: str) -> bool:
        if char == "\\":
            self._next = _Next.ESCAPE
            return True
        self._next = _Next.COLON if self._is_key else _Next.COMMA
        return char == '"'

    def _structure(self, char: str) -> bool:
        match self._next, char:
            case ((_Next.FIRST_KEY | _Next.KEY), '"'):
                self._next, self._is_key = _Next.STRING, True
            case _Next.COLON, ":":
                self._next = _Next.VALUE
            case _Next.COMMA, "," if self._open:
                self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
            case ((_Next.COMMA | _Next.FIRST_KEY), "}") if self._open and self._open[-1] == "{":
                self._open.pop()
                self._next = _Next.COMMA
            case ((_Next.COMMA | _Next.FIRST_ITEM), "]") if self._open and self._open[-1] == "[":
                self._open.pop()
                self._next = _Next.COMMA
            case ((_Next.VALUE | _Next.FIRST_ITEM), _):
                return self._value(char)
            case _:
                return False
        return True

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self._next = _Next.FIRST_KEY if char == "{" else _Next.FIRST_ITEM
        elif char == '"':
            self._next, self._is_key = _Next.STRING, False
        elif char in _LITERALS:
            self._next, self._literal = _Next.LITERAL, _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self._next = _Next.NUMBER
            self._number = "minus" if char == "-" else _NUMBER["minus"][char]
        else:
            return False
        return True
