"""Reads values as Python writes them, and words as JSON does, and writes them as JSON.

Nothing is evaluated. Strings may hold line breaks; a tuple is a list, and neighbouring strings are one.
"""

from __future__ import annotations

import re

from coordinator.text.parsers.argument_values import quote

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
        | (?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![0-9A-Za-z_.])
        | (?P<word>[A-Za-z_]+)(?![0-9A-Za-z_])
        | (?P<mark>[\[\](){},:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "", "/": "/"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MAX_NESTING = 100


class NotALiteral(ValueError):
    """A text that is no value of strings, numbers, words, lists and dictionaries."""


def python_to_json(text: str) -> str:
    """Return the JSON text of a value. Raises NotALiteral."""
    tokens = _Tokens(text)
    value = _value(tokens, _MAX_NESTING)
    if tokens.kind:
        raise NotALiteral
    return value


class _Tokens:
    """The tokens of a text, one after the other. kind: of the one that is next, empty behind the last. text: its."""

    def __init__(self, text: str) -> None:
        self._all, self._at = text.rstrip(), 0
        self.kind = self.text = ""
        self.next()

    def next(self) -> str:
        """Return the next token, and go on behind it. Raises NotALiteral for what is none."""
        before = self.text
        if self._at == len(self._all):
            self.kind = self.text = ""
            return before
        match = _TOKEN.match(self._all, self._at)
        if match is None or match.lastgroup is None:
            raise NotALiteral
        self.kind, self.text, self._at = match.lastgroup, match[match.lastgroup], match.end()
        return before


def _value(tokens: _Tokens, nesting: int) -> str:
    if tokens.kind == "string":
        return quote(_strings(tokens))
    if tokens.kind == "number":
        return tokens.next()
    if tokens.kind == "word" and tokens.text in _WORDS:
        return _WORDS[tokens.next()]
    if tokens.text not in _CLOSING or not nesting:
        raise NotALiteral
    opening = tokens.next()
    parts = []
    while tokens.text != _CLOSING[opening]:
        parts.append(_entry(tokens, nesting) if opening == "{" else _value(tokens, nesting - 1))
        if tokens.text == ",":
            tokens.next()
        elif tokens.text != _CLOSING[opening]:
            raise NotALiteral
    tokens.next()
    inside = ", ".join(parts)
    return f"{{{inside}}}" if opening == "{" else f"[{inside}]"


def _entry(tokens: _Tokens, nesting: int) -> str:
    if tokens.kind != "string":
        raise NotALiteral
    key = quote(_strings(tokens))
    if tokens.next() != ":":
        raise NotALiteral
    return f"{key}: {_value(tokens, nesting - 1)}"


def _strings(tokens: _Tokens) -> str:
    parts = []
    while tokens.kind == "string":
        parts.append(_ESCAPE.sub(_unescaped, tokens.next()[1:-1]))
    # Characters may be written as pairs of surrogates, as in JSON; one alone is no character.
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped(match: re.Match[str]) -> str:
    escaped = match[1]
    if len(escaped) == 1:
        return _ESCAPED.get(escaped, escaped if escaped in "\\'\"" else match[0])
    code = int(escaped[1:], 16)
    if code > 0x10FFFF:
        raise NotALiteral
    return chr(code)
