"""Finds where the turns of a chat end in its tokens: a later request of the same chat may agree up to there.

Parts of the chat are rendered and their tokens compared, so it works for any template: for those that strip thinking
from history, add a system prompt or put it into the user's turn, and where text merges across a turn's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.text.chat_template import ChatTemplate, TemplateError
from coordinator.text.common_prefix import common_prefix_length
from coordinator.text.tokenizer import Tokenizer

_SYSTEM_ROLES = frozenset({"system", "developer"})


def turn_boundaries(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    full_ids: Sequence[int],
    /,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    **variables: object,
) -> tuple[int, ...]:
    """Return how many of the prompt's tokens each of up to three parts takes, in ascending order.

    The parts are: the system message with the tools, everything before the last user message, and all messages without
    the generation prompt. The first two end where the user's own words begin. A part that the template refuses is left
    out.

    `full_ids`, `tools` and `variables` are the whole prompt and what it was rendered with.
    """
    prompt = tuple(full_ids)
    roles = [message.get("role") for message in messages]
    system = next((index for index, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=system)
    boundaries: list[int] = []
    for cut in sorted({system, last_user, len(messages)}):
        part = [*messages[:cut]]
        if cut < len(messages):
            # Templates render history by what follows it, and many refuse to end on a system message. So the part is
            # rendered in front of other words, and what both have in common is the part.
            part.append(_other_words(messages[cut]))
        try:
            text = template.render(part, add_generation_prompt=False, tools=tools, **variables)
        except TemplateError:
            continue
        length = common_prefix_length(tuple(tokenizer.encode(text, add_special_tokens=False)), prompt)
        # A part that agrees no further than the one before it was rendered differently this time.
        if length > (boundaries[-1] if boundaries else 0):
            boundaries.append(length)
    return tuple(boundaries)


def _other_words(message: Mapping[str, object]) -> dict[str, object]:
    """Return a user message of the same form, with words that differ from the message's from the first letter on."""
    content = message.get("content")
    listed = isinstance(content, list | tuple)
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    opening = next((text.lstrip() for text in texts if isinstance(text, str)), "")
    words = "B" if opening.startswith("A") else "A"
    return {"role": "user", "content": [{"type": "text", "text": words}] if listed else words}
