"""Finds tags in text that is still coming."""

from __future__ import annotations

THINK = "<think>"
END_THINK = "</think>"
TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"

# Of Harmony, gpt-oss's format: a message begins with its role, and what is between channel and message says where it
# goes. The last three end one; the last two end the answer too.
START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"

# Of Gemma 4: around a call, around a text in its arguments, and around reasoning, whose channel is called "thought".
GEMMA_CALL = "<|tool_call>"
END_GEMMA_CALL = "<tool_call|>"
GEMMA_QUOTE = '<|"|>'
GEMMA_CHANNEL = "<|channel>"
END_GEMMA_CHANNEL = "<channel|>"

# Many tokenizers hold these as one token each.
TAGS = (
    *(THINK, END_THINK, TOOL_CALL, END_TOOL_CALL),
    *(START, CHANNEL, CONSTRAIN, MESSAGE, END),
    *(GEMMA_CALL, END_GEMMA_CALL, GEMMA_QUOTE, GEMMA_CHANNEL, END_GEMMA_CHANNEL),
)

WHITESPACE = " \t\r\n"


def begins(text: str, position: int, tag: str) -> bool | None:
    """Return whether a tag stands at a position, None where only more text can tell."""
    if text.startswith(tag, position):
        return True
    return None if tag.startswith(text[position : position + len(tag)]) else False


def skip_whitespace(text: str, position: int) -> int:
    """Return the next position that is not white space, or the text's end."""
    while position < len(text) and text[position] in WHITESPACE:
        position += 1
    return position


def unfinished(text: str, *tags: str) -> int:
    """Return how many of the last characters may be the beginning of a tag."""
    for length in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(len(tag) > length and text.endswith(tag[:length]) for tag in tags):
            return length
    return 0
