"""Converts the bodies of HTTP requests into prompts, conversations and the engine's requests.

What HTTP and gRPC share is in `coordinator.api.engine_requests`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.answer import Request
from coordinator.api import engine_requests
from coordinator.api.engine_requests import (
    TemplateChat,
    allowed_compression,
    bounded,
    compressed_text,
    max_counted_tokens,
    max_told_tokens,
    plain_prompt,
    tool_call,
)
from coordinator.api.http.schemas import MAX_PROMPTS, ChatMessage, SamplingFields, Tool
from coordinator.api.http.structured import AnswerBound
from coordinator.engine.engine import Engine
from coordinator.text.fill_in import fill_in_ids
from coordinator.text.prompt import Prompt, last_tokens
from services.errors import InvalidArgument
from services.messages.inference_types import CompressionParams, Stopping
from services.text_threads import on_text_thread


async def make_request(
    engine: Engine,
    fields: SamplingFields,
    prompt: Prompt,
    max_tokens: int | None,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    bound: AnswerBound | None = None,
    chat: bool = True,
) -> Request:
    """Return the engine's request.

    max_tokens: None takes the default. bound: what the answer must be.
    """
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    stopping = Stopping(
        max_tokens,
        stops,
        tuple(fields.stop_token_ids or ()),
        fields.ignore_eos,
        fields.include_stop_str_in_output,
        not fields.skip_special_tokens,
    )
    request = await engine_requests.make_request(
        engine,
        prompt,
        fields.sampling_params(),
        stopping,
        prompt_field="messages" if chat else "prompt",
        chat=chat,
    )
    request = replace(request, speculate=fields.speculate, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return request if bound is None else replace(request, grammar=bound.grammar, grammar_field=bound.field)


def truncated(engine: Engine, fields: SamplingFields, prompt: Prompt, max_tokens: int | None) -> Prompt:
    """Return the prompt, or as many of its last tokens as `truncate_prompt_tokens` asks for.

    max_tokens: what -1 leaves room for; one token where the client doesn't say. Raises InvalidArgument for 0.
    """
    count = fields.truncate_prompt_tokens
    if count is None:
        return prompt
    if count == 0:
        raise InvalidArgument(
            "truncate_prompt_tokens is 0, which leaves nothing of the prompt; it must be at least 1, or -1 for as many "
            "tokens as there is room for",
            field="truncate_prompt_tokens",
        )
    return last_tokens(prompt, max(1, engine.max_model_len - (max_tokens or 1)) if count == -1 else count)


def most_tokens(engine: Engine, fields: SamplingFields) -> int:
    """Return how many tokens a prompt may have before `truncate_prompt_tokens` shortens it."""
    return (max_told_tokens if fields.truncate_prompt_tokens is None else max_counted_tokens)(engine)


def compression_params(fields: SamplingFields, prompt_logprobs: int | None = None) -> CompressionParams | None:
    """Return whether and how far the client wants its prompt compressed; arguments as of `allowed_compression`."""
    params = CompressionParams(fields.prefill_compression, fields.prefill_keep_ratio)
    return allowed_compression(params, prompt_logprobs)


def choices_of(request: Request, count: int, before: int = 0) -> list[Request]:
    """Return one request for each choice, with an id and a seed of its own; the first is the request itself.

    before: how many choices of other prompts come first in the same reply.
    """
    seed = request.sampling.seed or 0
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{before + index}" if before + index else request.request_id,
            sampling=replace(request.sampling, seed=(seed + index) % 2**64),
        )
        for index in range(count)
    ]


def make_chat(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any] | None,
    *,
    continued: bool = False,
    opened: bool = True,
) -> TemplateChat:
    """Return the conversation in the form that chat templates take; continued and opened are those of `TemplateChat`.

    Raises InvalidArgument for content that is not text and for tool calls whose arguments are no JSON object.
    """
    return TemplateChat(
        [_plain_message(message, index) for index, message in enumerate(messages)],
        [tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        dict(variables or {}),
        continued,
        opened,
    )


async def plain_prompts(
    engine: Engine,
    prompt: str | list[str] | list[int] | list[list[int]],
    compression: CompressionParams | None,
    *,
    suffix: str | None = None,
    add_special_tokens: bool = True,
    structured: bool = False,
    most: int | None = None,
) -> list[Prompt]:
    """Return each prompt of a completion, compressed as far as `compression` allows.

    suffix: what comes behind the answer, where the model fills in the middle of a text. structured: whether a grammar
    binds the answers. most: how many tokens each may have. Raises InvalidArgument for an empty list, for one of more
    than MAX_PROMPTS, and for a suffix beside token ids or where the model has no tokens for it, ContextOverflow for
    more tokens.
    """
    several = _several(prompt)
    if suffix:
        return [await _fill_in(engine, one, suffix) for one in several]
    plain_ones = [await plain_prompt(engine, one, add_special_tokens=add_special_tokens, most=most) for one in several]
    return [await compressed_text(engine, plain, compression, structured=structured) for plain in plain_ones]


async def _fill_in(engine: Engine, prefix: str | list[int], suffix: str) -> Prompt:
    if not isinstance(prefix, str):
        raise InvalidArgument("suffix needs a prompt of text, and this one is of token ids", field="suffix")
    tokenizer, most = engine.files.tokenizer, max_told_tokens(engine)
    with bounded(engine, "prompt", chat=False):
        return Prompt(await on_text_thread(len(prefix) + len(suffix), fill_in_ids, tokenizer, prefix, suffix, most))


def _several(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids. Raises InvalidArgument for none and for too many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidArgument("prompt is an empty list: give a text or token ids", field="prompt")
    # Lists hold one type; to look at each item of a long one would hold up others.
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidArgument(f"prompt has {len(prompt)} prompts; at most {MAX_PROMPTS} are taken", field="prompt")
    return prompt  # type: ignore[return-value]


def _plain_message(message: ChatMessage, index: int) -> dict[str, object]:
    plain: dict[str, object] = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    if isinstance(message.content, list):
        for part in message.content:
            if part.text is None:
                raise InvalidArgument(
                    f"messages.{index}.content has a part of type {part.type!r}; this model reads text only",
                    field=f"messages.{index}.content",
                )
        plain["content"] = "".join(part.text or "" for part in message.content)
    else:
        plain["content"] = message.content if message.content is not None else ""
    if message.tool_calls:
        plain["tool_calls"] = [
            tool_call(call.id, call.function.name, call.function.arguments, index) for call in message.tool_calls
        ]
    return plain
