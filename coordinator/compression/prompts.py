"""Prompts as the engine will see them: which part of one may be shortened, and the prompt with that part shortened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.answer import Compression
from coordinator.compression.compressor import Compressor, Shortened
from coordinator.compression.settings import CompressionSettings
from coordinator.text.model_files import ModelFiles
from coordinator.text.prompt import Prompt, chat_prompt, text_prompt
from services.text_threads import on_text_thread


async def shorten_chat(
    compressor: Compressor,
    settings: CompressionSettings,
    request_id: str,
    files: ModelFiles,
    prompt: Prompt,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    structured: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt of a conversation with its longest message of the user shortened.

    prompt: the prompt of all messages, which is returned where nothing may be or need be shortened. variables: the
    chat template's.
    """
    index = compressible(messages, tools=bool(tools), structured=structured)
    if index is None:
        return prompt
    text = str(messages[index]["content"])
    shortened = await compressor.shorten(request_id, text, len(prompt.token_ids), settings)
    if shortened.text is None:
        return _with_note(prompt, shortened)
    shorter = [*messages[:index], {**messages[index], "content": shortened.text}, *messages[index + 1 :]]
    shorter_prompt = await on_text_thread(
        len(shortened.text), chat_prompt, files, shorter, tools=tools, **(variables or {})
    )
    return _with_figures(shorter_prompt, prompt, shortened)


async def shorten_text(
    compressor: Compressor,
    settings: CompressionSettings,
    request_id: str,
    files: ModelFiles,
    prompt: Prompt,
    *,
    structured: bool = False,
) -> Prompt:
    """Return a plain prompt with its text shortened; one of token ids, which has no text, is left as it is."""
    if structured or not prompt.text:
        return prompt
    shortened = await compressor.shorten(request_id, prompt.text, len(prompt.token_ids), settings)
    if shortened.text is None:
        return _with_note(prompt, shortened)
    shorter_prompt = await on_text_thread(len(shortened.text), text_prompt, files, shortened.text)
    return _with_figures(shorter_prompt, prompt, shortened)


def _with_note(prompt: Prompt, shortened: Shortened) -> Prompt:
    return prompt if shortened.note is None else replace(prompt, compression=Compression(note=shortened.note))


def _with_figures(shorter: Prompt, whole: Prompt, shortened: Shortened) -> Prompt:
    return replace(shorter, compression=Compression(len(whole.token_ids), shortened.elapsed_ms))


def compressible(messages: Sequence[Mapping[str, object]], *, tools: bool, structured: bool) -> int | None:
    """Return the index of the message whose text may be shortened, the user's longest; None where nothing may be.

    Tools and the form of structured output are described in words that must all stay, and so must system messages. A
    conversation that goes on keeps its earlier turns as they were answered: another choice would make its kept state
    useless.
    """
    if tools or structured or any(message.get("role") not in ("system", "developer", "user") for message in messages):
        return None
    texts = {
        index: len(content)
        for index, message in enumerate(messages)
        if message.get("role") == "user" and isinstance(content := message.get("content"), str)
    }
    return max(texts, key=lambda index: (texts[index], index), default=None)
