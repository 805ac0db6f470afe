"""A prompt as tokens, and the positions at which its turns end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    most: int | None = None,
    /,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> Prompt:
    """Return the prompt that the checkpoint's chat template makes of messages; `variables` are its own switches.

    add_generation_prompt: whether it opens a turn of the assistant. continue_final_message: whether it ends with the
    text of the last message instead, so that the answer goes on with it. most: how many tokens it may have.

    Raises InvalidArgument when the checkpoint has no template, TemplateError when the template refuses the messages,
    TextTooLong for more tokens, where possible before the messages are rendered.
    """
    template, tokenizer = files.chat_template, files.tokenizer
    if template is None or tokenizer is None:
        raise InvalidArgument(f"{files.path} has no chat template: leave out --chat", field="--chat")
    if most is not None:
        tokenizer.check_length(text_size(messages), most)
    # The template writes the special tokens itself.
    if continue_final_message:
        text = template.render_continued(messages, tools=tools, **variables)
    else:
        text = template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False, most=most))
    boundaries = turn_boundaries(template, tokenizer, messages, token_ids, tools=tools, **variables)
    return Prompt(token_ids, boundaries, text)


def last_tokens(prompt: Prompt, count: int) -> Prompt:
    """Return the last `count` tokens of a prompt, without its text, and all of it where it has no more."""
    cut = len(prompt.token_ids) - count
    if cut <= 0:
        return prompt
    boundaries = tuple(boundary - cut for boundary in prompt.boundaries if boundary > cut)
    return replace(prompt, token_ids=prompt.token_ids[cut:], boundaries=boundaries, text="")


def text_size(messages: Sequence[Mapping[str, object]]) -> int:
    """Return how many characters the contents of messages have together."""
    contents = (message.get("content") for message in messages)
    return sum(len(content) for content in contents if isinstance(content, str))


def text_prompt(files: ModelFiles, text: str, most: int | None = None) -> Prompt:
    """Return the prompt of a plain text. most: how many tokens it may have.

    Raises InvalidArgument when the checkpoint has no tokenizer, TextTooLong for more tokens.
    """
    if files.tokenizer is None:
        raise InvalidArgument(f"{files.path} has no tokenizer.json: give the prompt as --prompt-ids", field="--prompt")
    return Prompt(tuple(files.tokenizer.encode(text, add_special_tokens=True, most=most)), text=text)
