"""Earlier turns as the chat template of gpt-oss takes them: beside calls it shows one text, and refuses two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.text.chat_template import REASONING_NAMES


def with_one_text_beside_calls(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the messages, those with calls, reasoning and content with the content behind the reasoning.

    The template shows either of them on the channel of reasoning.
    """
    return [_joined(message) for message in messages]


def _joined(message: Mapping[str, object]) -> dict[str, object]:
    name = next((name for name in REASONING_NAMES if message.get(name)), None)
    content = message.get("content")
    if name is None or not content or not message.get("tool_calls"):
        return dict(message)
    others = {key: value for key, value in message.items() if key not in ("content", *REASONING_NAMES)}
    return {**others, name: f"{message[name]}\n{content}"}
