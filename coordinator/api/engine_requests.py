"""Makes the engine's request of what a client asked for, over whatever protocol. Refusals name the field at fault."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coordinator.answer import Request
from coordinator.compression.prompts import shorten_chat, shorten_text
from coordinator.compression.settings import CompressionSettings
from coordinator.engine.context_overflow import ContextOverflow
from coordinator.engine.engine import Engine
from coordinator.text.bad_words import bad_token_sequences
from coordinator.text.bounded_json import parse_json
from coordinator.text.chat_template import RESERVED_VARIABLES
from coordinator.text.prompt import Prompt, chat_prompt, text_prompt, text_size
from coordinator.text.tokenizer import TextTooLong
from services.errors import InvalidArgument, NotFound
from services.messages.inference_types import CompressionMode, CompressionParams, Conversation, Message, Stopping
from services.messages.sampling import SamplingParams
from services.telemetry.trace_context import Trace, current_call
from services.text_threads import on_text_thread

MAX_STOPS = 64
"""Most stop strings of one request."""

MAX_STOP_LENGTH = 4096
"""Most characters of a stop string."""

MAX_LISTED_TOKENS = 1 << 14
"""Most tokens of a list such as stop_token_ids, where the vocabulary has fewer."""

MESSAGE_SIZE = 256
"""How many characters take as long to work on as a message or tool takes besides its text."""

MAX_COUNTED_TOKENS = 1 << 17
"""Most tokens of a prompt that is only counted, where the context is shorter."""


def check_model(engine: Engine, model: str | None) -> None:
    """Check which model a client asks for; None means the one that is served. Raises NotFound for another one."""
    if model is not None and not engine.serves(model):
        raise NotFound(
            f"model {model!r} is not served here: use {engine.name!r}", reason="MODEL_NOT_FOUND", field="model"
        )


async def make_request(
    engine: Engine,
    prompt: Prompt,
    sampling: SamplingParams,
    stopping: Stopping,
    *,
    prompt_field: str = "prompt",
    chat: bool = False,
) -> Request:
    """Return the engine's request, with the id and in the trace of the call that is being answered.

    What the client doesn't say is as the model's defaults have it. What needs no check or default here, such as
    log-probabilities and a grammar, is left to the caller.

    prompt_field: what the client calls its prompt. Raises ContextOverflow for a prompt that leaves no room for an
    answer, InvalidArgument for too many stop strings, tokens outside of the vocabulary, min_tokens above max_tokens,
    bad words as `bad_token_sequences`, and sampling parameters as `SamplingParams.completed` does.
    """
    call, defaults = current_call(), engine.files.defaults
    room = engine.max_model_len - len(prompt.token_ids)
    if room < (0 if stopping.max_tokens == 0 else 1):
        answer = 1 if stopping.max_tokens is None else stopping.max_tokens
        raise ContextOverflow(engine.max_model_len, len(prompt.token_ids), answer, chat=chat, field=prompt_field)
    if len(stopping.stop) > MAX_STOPS:
        raise InvalidArgument(f"stop has {len(stopping.stop)} strings; at most {MAX_STOPS} are accepted", field="stop")
    longest = max(map(len, stopping.stop), default=0)
    if longest > MAX_STOP_LENGTH:
        raise InvalidArgument(
            f"stop has a string of {longest} characters; at most {MAX_STOP_LENGTH} are accepted", field="stop"
        )
    vocabulary = engine.cluster.target.vocab_size
    listed = {
        "stop_token_ids": stopping.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_token_sequences": [token for sequence in sampling.bad_token_sequences for token in sequence],
    }
    for field, tokens in listed.items():
        if len(tokens) > max(vocabulary, MAX_LISTED_TOKENS):
            raise InvalidArgument(
                f"{field} has {len(tokens)} tokens; at most {max(vocabulary, MAX_LISTED_TOKENS)} are accepted",
                field=field,
            )
        foreign = [token for token in tokens if not 0 <= token < vocabulary]
        if foreign:
            raise InvalidArgument(f"{field} has {foreign[0]}; they must be from 0 to {vocabulary - 1}", field=field)
    max_tokens = stopping.max_tokens
    if max_tokens is None:
        # Where the prompt alone is too long for the workers' memory, the engine refuses it with the numbers.
        max_tokens = defaults.answer_tokens(max(1, engine.longest - len(prompt.token_ids)), chat=chat)
    if (sampling.min_tokens or 0) > max_tokens:
        raise InvalidArgument(
            f"min_tokens is {sampling.min_tokens}; it must be at most max_tokens, {max_tokens}", field="min_tokens"
        )
    bad = sampling.bad_token_sequences
    if sampling.bad_words:
        size = sum(map(len, sampling.bad_words))
        bad += await on_text_thread(size, bad_token_sequences, engine.files.tokenizer, sampling.bad_words)
    own = frozenset() if stopping.ignore_eos else engine.files.stop_token_ids
    return Request(
        request_id=_call_id(),
        prompt_ids=prompt.token_ids,
        boundaries=prompt.boundaries,
        max_tokens=max_tokens,
        sampling=replace(sampling, bad_words=(), bad_token_sequences=bad).completed(defaults.sampling),
        stop_token_ids=own | frozenset(stopping.stop_token_ids),
        stop_strings=tuple(stop for stop in stopping.stop if stop),
        include_stop=stopping.include_stop_str_in_output,
        skip_special_tokens=not stopping.keep_special_tokens,
        compression=prompt.compression,
        trace=Trace() if call is None else call.trace,
        chat=chat,
    )


@dataclass(frozen=True, slots=True)
class TemplateChat:
    """A conversation in the form that chat templates take.

    variables: the template's own switches. continued: whether the answer goes on with the last message. opened: whether
    the prompt opens a turn of the assistant, where it does not. field: what the client calls the conversation.
    """

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    variables: dict[str, Any]
    continued: bool = False
    opened: bool = True
    field: str = "messages"


async def template_chat(conversation: Conversation) -> TemplateChat:
    """Convert a conversation of the gRPC API; its JSON is read on a thread.

    Raises InvalidArgument for tools and tool calls that are no such JSON.
    """
    texts = [conversation.tools, *(message.tool_calls for message in conversation.messages)]
    size = sum(len(text or "") for text in texts) + MESSAGE_SIZE * len(conversation.messages)
    return await on_text_thread(size, _template_chat, conversation)


def _template_chat(conversation: Conversation) -> TemplateChat:
    tools = None
    if conversation.tools:
        tools = _objects(conversation.tools, "tools", "conversation.tools")
    return TemplateChat(
        [_template_message(message, index) for index, message in enumerate(conversation.messages)],
        tools or None,
        dict(conversation.variables),
        conversation.continue_final_message,
        field="conversation",
    )


async def render(
    engine: Engine,
    chat: TemplateChat,
    compression: CompressionParams | None = None,
    *,
    structured: bool = False,
    most: int | None = None,
) -> Prompt:
    """Return the prompt that the chat template makes of a conversation; it is rendered and tokenised on a thread.

    compression: how far the prompt may be compressed by this request and the server's settings; None forbids it.
    structured: whether a grammar binds the answer. most: how many tokens the prompt may have; None takes
    `max_told_tokens`. Raises InvalidArgument where the model has no chat template and for variables whose names are
    taken, TemplateError where the template refuses the conversation, ContextOverflow for more tokens.
    """
    if engine.files.chat_template is None or engine.files.tokenizer is None:
        raise InvalidArgument("this model has no chat template: send a plain prompt", field="messages")
    reserved = RESERVED_VARIABLES.intersection(chat.variables)
    if reserved:
        raise InvalidArgument(
            f"chat_template_kwargs has {min(reserved)}, which is set by the request itself: leave it out",
            field="chat_template_kwargs",
        )
    most = most or max_told_tokens(engine)
    if len(chat.messages) > most:
        # Templates write at least one token for each.
        raise _overflow(engine, len(chat.messages), chat.field, chat=True, is_lower_bound=True)
    # Besides their texts messages and tools take time by their number.
    size = text_size(chat.messages) + MESSAGE_SIZE * (len(chat.messages) + len(chat.tools or ()))
    with naming(chat.field), bounded(engine, chat.field, chat=True):
        prompt = await on_text_thread(
            size,
            chat_prompt,
            engine.files,
            chat.messages,
            most,
            tools=chat.tools,
            add_generation_prompt=chat.opened,
            continue_final_message=chat.continued,
            **chat.variables,
        )
    settings = _compression(engine, compression)
    if engine.compressor is None or settings is None or chat.continued or not chat.opened:
        return prompt
    return await shorten_chat(
        engine.compressor,
        settings,
        _call_id(),
        engine.files,
        prompt,
        chat.messages,
        tools=chat.tools,
        structured=structured,
        variables=chat.variables,
    )


async def compressed_text(
    engine: Engine, prompt: Prompt, compression: CompressionParams | None, *, structured: bool = False
) -> Prompt:
    """Return a plain prompt, compressed where that is allowed and worth it; the arguments are those of `render`."""
    settings = _compression(engine, compression)
    if engine.compressor is None or settings is None:
        return prompt
    return await shorten_text(engine.compressor, settings, _call_id(), engine.files, prompt, structured=structured)


def allowed_compression(wish: CompressionParams, prompt_logprobs: int | None) -> CompressionParams | None:
    """Return what a request wishes of compression; None, which forbids it, where log-probabilities of the prompt are
    asked for: they are those of every token of it. Raises InvalidArgument where the request asks for both."""
    if prompt_logprobs is None:
        return wish
    if wish.mode is CompressionMode.ALWAYS:
        raise InvalidArgument(
            "prefill_compression is always, and log-probabilities of the prompt are asked for, which are those of the "
            "whole prompt: leave out one of them",
            field="prefill_compression",
        )
    return None


def _compression(engine: Engine, compression: CompressionParams | None) -> CompressionSettings | None:
    if compression is None:
        return None
    if engine.compressor is None:
        if compression.mode is CompressionMode.ALWAYS:
            raise InvalidArgument(
                "prefill_compression is always, and this server has no model for it: start it with --prefill-drafter, "
                "or leave it out",
                field="prefill_compression",
            )
        return None
    return engine.compressor.settings.for_request(compression)


def _call_id() -> str:
    call = current_call()
    return secrets.token_hex(12) if call is None else call.request_id


async def plain_prompt(
    engine: Engine, prompt: str | Sequence[int], *, add_special_tokens: bool = True, most: int | None = None
) -> Prompt:
    """Return a prompt of text or token ids; a text is tokenised on a thread.

    most: how many tokens it may have; None takes `max_told_tokens`. Raises InvalidArgument for a text where
    the model has no tokenizer, ContextOverflow for more tokens.
    """
    most = most or max_told_tokens(engine)
    if not isinstance(prompt, str):
        if len(prompt) > most:
            raise _overflow(engine, len(prompt), "prompt", chat=False)
        return Prompt(tuple(prompt))
    tokenizer = engine.files.tokenizer
    if tokenizer is None:
        raise InvalidArgument("this model has no tokenizer: send token ids", field="prompt")
    with naming("prompt"), bounded(engine, "prompt", chat=False):
        if add_special_tokens:
            return await on_text_thread(len(prompt), text_prompt, engine.files, prompt, most)
        encode = partial(tokenizer.encode, add_special_tokens=False, most=most)
        return Prompt(tuple(await on_text_thread(len(prompt), encode, prompt)))


def max_told_tokens(engine: Engine) -> int:
    """Return how many tokens a prompt may have to be refused, where it is too long, with its exact number of them."""
    return 2 * engine.max_prompt_tokens


def max_counted_tokens(engine: Engine) -> int:
    """Return how many tokens a prompt may have whose tokens are only listed or counted."""
    return max(max_told_tokens(engine), MAX_COUNTED_TOKENS)


@contextlib.contextmanager
def bounded(engine: Engine, field: str, *, chat: bool) -> Iterator[None]:
    """Turn TextTooLong into ContextOverflow in the block. field: the client's; chat: whether it is a conversation."""
    try:
        yield
    except TextTooLong as error:
        raise _overflow(engine, error.token_count, field, chat=chat, is_lower_bound=error.is_lower_bound) from None


def _overflow(engine: Engine, tokens: int, field: str, *, chat: bool, is_lower_bound: bool = False) -> ContextOverflow:
    return ContextOverflow(engine.max_model_len, tokens, 1, chat=chat, field=field, is_lower_bound=is_lower_bound)


async def text_of(engine: Engine, token_ids: Sequence[int], field: str, *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens. Raises InvalidArgument, naming the client's field, where the model has no tokenizer,
    for more tokens than are ever listed, and for numbers that are no tokens."""
    tokenizer, most = engine.files.tokenizer, max_counted_tokens(engine)
    if tokenizer is None:
        raise InvalidArgument("this model has no tokenizer", field=field)
    if len(token_ids) > most:
        raise InvalidArgument(f"{field} has {len(token_ids)} tokens; at most {most} are taken at once", field=field)
    with naming(field):
        decode = partial(tokenizer.decode_known, skip_special_tokens=skip_special_tokens)
        return await on_text_thread(len(token_ids), decode, token_ids)


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Give refusals in the block that name no field the name of this one."""
    try:
        yield
    except InvalidArgument as error:
        raise error.located(field=field) from None


def tool_call(identifier: str | None, name: str, arguments: str | Mapping[str, Any] | None, index: int) -> object:
    """Return a tool call in the form that chat templates take, with its arguments as an object.

    Raises InvalidArgument for arguments of message `index` that are no JSON object.
    """
    value: object = arguments
    if not isinstance(arguments, Mapping):
        try:
            value = parse_json(arguments or "{}")
        except (TypeError, ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise InvalidArgument(
            f"messages.{index}.tool_calls has arguments {str(arguments)[:80]!r}; they must be a JSON object",
            field=f"messages.{index}.tool_calls",
        )
    return {"type": "function", "id": identifier, "function": {"name": name, "arguments": dict(value)}}


def _template_message(message: Message, index: int) -> dict[str, object]:
    field = f"messages.{index}.tool_calls"
    plain: dict[str, object] = {"role": message.role, "content": message.content or ""}
    plain |= {} if message.name is None else {"name": message.name}
    plain |= {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    calls = []
    for call in _objects(message.tool_calls, field, field) if message.tool_calls else []:
        function, identifier = call.get("function"), call.get("id")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise InvalidArgument(f'{field} has {str(call)[:80]}; each needs "function" with a "name"', field=field)
        calls.append(tool_call(None if identifier is None else str(identifier), name, function.get("arguments"), index))
    return plain | ({"tool_calls": calls} if calls else {})


def _objects(text: str, what: str, field: str) -> list[dict[str, object]]:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidArgument(f"{what} is {text[:80]!r}; it must be the JSON text of an array of objects", field=field)
    return value
