"""Which part of a conversation may be compressed: what the user brought along, never what others rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def compressible(messages: Sequence[Mapping[str, object]], *, tools: bool, structured: bool) -> int | None:
    """The message whose text may be shortened: the longest of the user's, None where nothing may be.

    Tools and the form of structured output are told in words that must all stay, as do system messages. A conversation
    that goes on keeps its earlier turns as they were answered: another choice would make its kept state useless.
    """
    if tools or structured or any(message.get("role") not in ("system", "developer", "user") for message in messages):
        return None
    texts = {
        index: len(content)
        for index, message in enumerate(messages)
        if message.get("role") == "user" and isinstance(content := message.get("content"), str)
    }
    return max(texts, key=lambda index: (texts[index], index), default=None)
