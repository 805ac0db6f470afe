"""How models write tool calls: one module for each format, found by its name.

A format module has what the protocol `Format` lists; `tag` there takes one of `parsers.tags.TAGS`. Harmony, the format
`openai`, says more: how every answer is cut into messages, reasoning among them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from coordinator.text.parsers.events import Event
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema
from services.errors import InvalidArgument

NONE = "none"
HARMONY = "openai"
ALIASES = {"qwen3_coder": "qwen3_xml"}
"""Other names that users know formats by."""
GEMMA4 = "gemma4"
WITH_SPECIAL_TOKENS = frozenset({HARMONY, GEMMA4})
"""Formats whose markers are special tokens, so that an answer's text must have these."""


class ToolParser(Protocol):
    """Finds content and calls in an answer's text, from which the reasoning has been split off."""

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain now, possibly none."""

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events of the text that was held back, now that no more can come.

        cut: whether the answer's length ended the text, and not the model. A call whose function is known ends with
        `ToolCallCut` then; what may only have become one is dropped.
        """


class Format(Protocol):
    """What a format's module offers."""

    def Parser(self, tools: Sequence[ToolSchema]) -> ToolParser:
        """Return a parser for one answer."""

    def is_taught_by(self, template: str) -> bool:
        """Return whether a chat template, as source text, teaches the format."""

    def call_grammar(self, tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
        """Return Lark lines whose `rule` is one call of the tool; `tag` turns a tag into a term."""


def known_formats() -> list[str]:
    """Return the names of all formats."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def format_of(name: str) -> Format:
    """Return the module of a format. Raises InvalidArgument, listing the known formats, for any other name."""
    name = ALIASES.get(name, name)
    if name not in known_formats():
        raise InvalidArgument(
            f"tool-call format {name!r} is not known; known formats: {', '.join(known_formats())}", field="tool_format"
        )
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return module


@functools.lru_cache(16)
def detect(template: str) -> str:
    """Return the format that a chat template teaches, "none" if it teaches no known one."""
    return next((name for name in known_formats() if format_of(name).is_taught_by(template)), NONE)


def new_parser(name: str, tools: Sequence[ToolSchema]) -> ToolParser:
    """Return a parser for one answer. Without tools nothing can be called, so all its text is content, unless the
    format frames it."""
    return format_of(name if tools or name == HARMONY else NONE).Parser(tools)
