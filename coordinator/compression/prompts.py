"""A long prompt as the engine will see it: its compressible part shortened, and what became of that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.answer import Compression
from coordinator.compression.chat import compressible
from coordinator.compression.compressor import Compressor, Shortened
from coordinator.compression.settings import CompressionSettings
from coordinator.text.model_files import ModelFiles
from coordinator.text.prompt import Prompt, chat_prompt, text_prompt


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
    """prompt: of all messages, which is returned where nothing may be or need be shortened."""
    index = compressible(messages, tools=bool(tools), structured=structured)
    if index is None:
        return prompt
    text = str(messages[index]["content"])
    found = await compressor.shorten(request_id, text, len(prompt.token_ids), settings)
    if found.text is None:
        return _whole(prompt, found)
    shorter = [*messages[:index], {**messages[index], "content": found.text}, *messages[index + 1 :]]
    made = await asyncio.to_thread(chat_prompt, files, shorter, tools=tools, **(variables or {}))
    return _shortened(made, prompt, found)


async def shorten_text(
    compressor: Compressor,
    settings: CompressionSettings,
    request_id: str,
    files: ModelFiles,
    prompt: Prompt,
    *,
    structured: bool = False,
) -> Prompt:
    """A plain prompt; one of token ids is left as it is."""
    if structured or not prompt.text:
        return prompt
    found = await compressor.shorten(request_id, prompt.text, len(prompt.token_ids), settings)
    if found.text is None:
        return _whole(prompt, found)
    return _shortened(await asyncio.to_thread(text_prompt, files, found.text), prompt, found)


def _whole(prompt: Prompt, found: Shortened) -> Prompt:
    return prompt if found.note is None else replace(prompt, compression=Compression(note=found.note))


def _shortened(made: Prompt, prompt: Prompt, found: Shortened) -> Prompt:
    return replace(made, compression=Compression(len(prompt.token_ids), found.elapsed_ms))
