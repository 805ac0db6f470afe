"""A prompt as tokens, and the positions at which its turns end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.answer import Compression
from coordinator.text.model_files import ModelFiles
from coordinator.text.turns import turn_boundaries
from services.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens.

    boundaries: the positions at which turns end, up to which a later request of the same chat may agree; none for plain
    text. text: what was tokenised, empty where the client sent token ids. compression: how the prompt was compressed,
    None where nobody tried.
    """

    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    text: str = ""
    compression: Compression | None = None


def chat_prompt(
    files: ModelFiles,
    messages: Sequence[Mapping[str, object]],
    /,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    **variables: Any,
) -> Prompt:
    """Return the prompt that the checkpoint's chat template makes of messages; `variables` are its own switches.

    Raises InvalidArgument when the checkpoint has no template, TemplateError when the template refuses the messages.
    """
    template, tokenizer = files.chat_template, files.tokenizer
    if template is None or tokenizer is None:
        raise InvalidArgument(f"{files.directory} has no chat template: leave out --chat", field="--chat")
    # The template writes the special tokens itself.
    text = template.render(messages, tools=tools, **variables)
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    boundaries = turn_boundaries(template, tokenizer, messages, token_ids, tools=tools, **variables)
    return Prompt(token_ids, boundaries, text)


def text_prompt(files: ModelFiles, text: str) -> Prompt:
    """Return the prompt of a plain text. Raises InvalidArgument when the checkpoint has no tokenizer."""
    if files.tokenizer is None:
        raise InvalidArgument(
            f"{files.directory} has no tokenizer.json: give the prompt as --prompt-ids", field="--prompt"
        )
    return Prompt(tuple(files.tokenizer.encode(text, add_special_tokens=True)), text=text)
