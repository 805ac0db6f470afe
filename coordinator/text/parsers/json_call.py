"""Reads one call that a model writes as a JSON object with a name and arguments; formats of that kind share this.

The arguments stream as the model writes them when the name comes first, as it does; the other way round, or where the
arguments are left out, the call comes in one piece. The object has to be JSON to the letter and to hold nothing else.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence

from coordinator.text.parsers.json_scanner import JsonScanner
from coordinator.text.parsers.tagged_calls import Outcome, Step
from coordinator.text.parsers.tags import WHITESPACE, skip_whitespace
from coordinator.text.parsers.tool_schema import OfferedTool


class JsonCallReader:
    """Reads the object of one call."""

    def __init__(
        self, tools: Mapping[str, OfferedTool], keys: Sequence[str] = ("arguments",), type_name: str | None = None
    ) -> None:
        """keys: under which of them the arguments may stand, and no two at once. type_name: what `type` may say, None
        where there must be none."""
        self.name: str | None = None
        self._tools, self._keys, self._type_name = tools, keys, type_name
        self._head_pattern = _head_pattern(tuple(keys))
        self._scanner = JsonScanner()
        self._head: list[str] = []  # the object so far, while the name isn't known
        self._length = 0
        self._inner: list[int] = []  # where in it the first value inside begins and ends, if that is no scalar

    def read(self, text: str) -> Step:
        """See `CallReader`."""
        position = 0 if self._length else skip_whitespace(text, 0)
        if position == len(text):
            return Step(Outcome.READING, 0)
        if not self._length and text[position] != "{":
            return Step(Outcome.BROKEN, 0)
        arguments: list[str] = []
        outcome = Outcome.READING
        while position < len(text) and outcome is Outcome.READING:
            depth = self._scanner.depth
            end = self._scanner.step(text, position)
            if end < 0:
                return Step(Outcome.BROKEN, position, "".join(arguments))
            piece, position = text[position:end], end
            read = self._read_head if self.name is None else self._read_arguments
            outcome = read(piece, depth, arguments)
        return Step(outcome, position, "".join(arguments))

    def _read_head(self, piece: str, depth: int, arguments: list[str]) -> Outcome:
        self._head.append(piece)
        self._length += len(piece)
        match depth, self._scanner.depth:
            case 1, 2 if not self._inner:
                self._inner = [self._length - 1]
                if head := self._head_pattern.fullmatch("".join(self._head)):
                    return self._call(json.loads(head[1]), "{", arguments)
            case 2, 1 if len(self._inner) == 1:
                self._inner.append(self._length)
            case 1, 0:
                return self._read_whole(arguments)
        return Outcome.READING

    def _read_arguments(self, piece: str, depth: int, arguments: list[str]) -> Outcome:
        if depth > 1:
            arguments.append(piece)
            return Outcome.READING
        if self._scanner.depth == 0:
            return Outcome.WHOLE
        return Outcome.READING if piece in WHITESPACE else Outcome.BROKEN

    def _read_whole(self, arguments: list[str]) -> Outcome:
        """Read a call whose object is complete and didn't begin with its name and its arguments."""
        text = "".join(self._head)
        try:
            # Objects as tuples of pairs, so that a key that is there twice is seen.
            pairs = json.loads(text, object_pairs_hook=tuple)
        except (ValueError, RecursionError):  # a number too long, or nesting too deep, for Python
            return Outcome.BROKEN
        fields = dict(pairs)
        twice = len(fields) < len(pairs)
        name = fields.pop("name", None)
        if self._type_name is not None and fields.get("type") == self._type_name:
            del fields["type"]
        key = next((key for key in self._keys if key in fields), None)
        known = isinstance(name, str) and (key is None or isinstance(fields.pop(key), tuple))
        if not known or fields or twice:
            return Outcome.BROKEN
        outcome = self._call(name, text[slice(*self._inner)] if self._inner else "{}", arguments)
        return Outcome.WHOLE if outcome is Outcome.READING else outcome

    def _call(self, name: str, arguments: str, pieces: list[str]) -> Outcome:
        if name not in self._tools:
            return Outcome.BROKEN
        self.name = name
        pieces.append(arguments)
        return Outcome.READING


@functools.cache
def _head_pattern(keys: tuple[str, ...]) -> re.Pattern[str]:
    """Return what stands in front of the arguments, their brace included, in text that is known to begin a JSON
    object."""
    return re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:' + "|".join(keys) + r')"\s*:\s*\{')
