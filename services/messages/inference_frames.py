"""Between the dataclasses of `inference_types` and the messages of `inference.v1`, both ways.

What is wrong in itself, without knowing the model, is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from flashsplit.inference.v1 import generation_pb2, inference_pb2 as pb, server_pb2
from services.errors import InvalidArgument
from services.messages import output_frames
from services.messages.inference_types import (
    AnswerEvent,
    CacheSource,
    CompressionMode,
    CompressionParams,
    Conversation,
    Delta,
    DraftPlace,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    Model,
    PromptToken,
    ServerInfo,
    ServerLoad,
    SpeculationFigures,
    StagePlace,
    Started,
    Stopping,
    Timings,
    Usage,
)
from services.messages.sampling import sampling_from_message, sampling_to_message

MAX_NESTING = 32
"""Most levels of lists and objects within a variable of a chat template."""

T = TypeVar("T")

_FINISH_NUMBERS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_SOURCE_NUMBERS = {
    None: generation_pb2.CACHE_SOURCE_UNSPECIFIED,
    CacheSource.MEMORY: generation_pb2.CACHE_SOURCE_MEMORY,
    CacheSource.DISK: generation_pb2.CACHE_SOURCE_DISK,
}
_COMPRESSION_NUMBERS = {
    None: generation_pb2.PREFILL_COMPRESSION_UNSPECIFIED,
    CompressionMode.OFF: generation_pb2.PREFILL_COMPRESSION_OFF,
    CompressionMode.AUTO: generation_pb2.PREFILL_COMPRESSION_AUTO,
    CompressionMode.ALWAYS: generation_pb2.PREFILL_COMPRESSION_ALWAYS,
}
_COMPRESSIONS = {number: mode for mode, number in _COMPRESSION_NUMBERS.items()}
_FINISH_REASONS = {number: reason for reason, number in _FINISH_NUMBERS.items()}
_SOURCES = {number: source for source, number in _SOURCE_NUMBERS.items()}

MAX_TOKEN_IDS = 1 << 20
"""Most token ids of a request."""

MAX_MESSAGES = 1 << 14
"""Most messages of a conversation."""

MAX_VARIABLES_BYTES = 64 << 10
"""Most bytes of the chat template's variables."""

_VARIABLES_FIELD = "conversation.chat_template_kwargs"


# --- requests


def request_from_message(request: pb.GenerateRequest | pb.ChatRequest) -> GenerateRequest:
    """Return what a client asks for. Raises InvalidArgument without a prompt, and for a grammar that is none."""
    prompt: str | tuple[int, ...] | Conversation
    if isinstance(request, pb.ChatRequest):
        prompt = conversation_from_message(request.conversation)
    elif request.WhichOneof("prompt") == "text":
        prompt = request.text
    elif request.WhichOneof("prompt") == "token_ids":
        prompt = token_ids_from_message(request.token_ids.ids)
    else:
        raise InvalidArgument("prompt is missing: give text or token_ids", field="prompt")
    stopping = request.stopping
    logprobs, prompt_logprobs = given(request, "logprobs"), given(request, "prompt_logprobs")
    output_frames.check_logprobs(logprobs)
    output_frames.check_logprobs(prompt_logprobs, "prompt_logprobs")
    return GenerateRequest(
        prompt,
        sampling_from_message(request.sampling),
        Stopping(
            given(stopping, "max_tokens"),
            tuple(stopping.stop),
            tuple(stopping.stop_token_ids),
            stopping.ignore_eos,
            stopping.include_stop_str_in_output,
            stopping.keep_special_tokens,
        ),
        speculate=request.speculate if request.HasField("speculate") else True,
        model=given(request, "model"),
        logprobs=logprobs,
        grammar=output_frames.grammar_from_message(request.grammar) if request.HasField("grammar") else None,
        # A number of a later version is read as "unspecified".
        compression=CompressionParams(
            _COMPRESSIONS.get(request.prefill_compression), given(request, "prefill_keep_ratio")
        ),
        prompt_logprobs=prompt_logprobs,
    )


def request_to_message(request: GenerateRequest) -> pb.GenerateRequest | pb.ChatRequest:
    """Return the message for a request: a ChatRequest for a conversation, else a GenerateRequest."""
    common: dict[str, Any] = {
        "sampling": sampling_to_message(request.sampling, generation_pb2.Sampling),
        "stopping": generation_pb2.Stopping(**asdict(request.stopping)),
        "speculate": request.speculate,
        "model": request.model,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "prefill_compression": _COMPRESSION_NUMBERS[request.compression.mode],
        "prefill_keep_ratio": request.compression.keep_ratio,
    }
    if request.grammar is not None:
        common["grammar"] = generation_pb2.Grammar()
        output_frames.grammar_to_message(request.grammar, common["grammar"])
    if isinstance(request.prompt, Conversation):
        return pb.ChatRequest(conversation=conversation_to_message(request.prompt), **common)
    if isinstance(request.prompt, str):
        return pb.GenerateRequest(text=request.prompt, **common)
    return pb.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=request.prompt), **common)


def token_ids_from_message(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a message's token ids. Raises InvalidArgument for more than any context holds."""
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidArgument(f"token_ids has {len(ids)} tokens; at most {MAX_TOKEN_IDS} are taken", field="token_ids")
    return tuple(ids)


def conversation_from_message(message: generation_pb2.Conversation) -> Conversation:
    """Return a message's chat. Raises InvalidArgument where it is empty or has too much of something, and for
    variables that are no JSON."""
    if not 1 <= len(message.messages) <= MAX_MESSAGES:
        raise InvalidArgument(
            f"conversation has {len(message.messages)} messages; give 1 to {MAX_MESSAGES}",
            field="conversation.messages",
        )
    size = message.chat_template_kwargs.ByteSize()
    if size > MAX_VARIABLES_BYTES:
        raise InvalidArgument(
            f"chat_template_kwargs has {size} bytes; at most {MAX_VARIABLES_BYTES} are taken", field=_VARIABLES_FIELD
        )
    optional = ("content", "name", "tool_calls", "tool_call_id")
    return Conversation(
        tuple(Message(entry.role, **{name: given(entry, name) for name in optional}) for entry in message.messages),
        given(message, "tools"),
        {name: _plain(value, name) for name, value in message.chat_template_kwargs.fields.items()},
        message.continue_final_message,
    )


def conversation_to_message(conversation: Conversation) -> generation_pb2.Conversation:
    """Return the message for a chat. Raises InvalidArgument for variables that are no JSON."""
    message = generation_pb2.Conversation(
        tools=conversation.tools, continue_final_message=conversation.continue_final_message
    )
    for entry in conversation.messages:
        message.messages.add(**asdict(entry))
    try:
        message.chat_template_kwargs.update(conversation.variables)
    except ValueError as error:
        raise InvalidArgument(f"chat_template_kwargs: {error}", field=_VARIABLES_FIELD) from error
    return message


def given(message: Any, name: str) -> Any:
    """Return an optional field's value, None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_NESTING:
        raise InvalidArgument(
            f"chat_template_kwargs.{where[:80]} is nested deeper than {MAX_NESTING} levels", field=_VARIABLES_FIELD
        )
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidArgument(
                    f"chat_template_kwargs.{where[:80]} is {number}, which is no JSON", field=_VARIABLES_FIELD
                )
            # Struct has no whole numbers, and templates write 100.0 where 100 was meant.
            return int(number) if number.is_integer() else number
        case "struct_value":
            items = value.struct_value.fields.items()
            return {name: _plain(item, f"{where}.{name}", depth + 1) for name, item in items}
        case "list_value":
            return [_plain(item, f"{where}[]", depth + 1) for item in value.list_value.values]
        case "string_value" | "bool_value" as kind:
            return getattr(value, kind)
        case "null_value":
            return None
        case _:
            raise InvalidArgument(
                f"chat_template_kwargs.{where[:80]} is empty; for no value give null", field=_VARIABLES_FIELD
            )


# --- answers


def event_to_message(event: AnswerEvent, response: T) -> T:
    """Put an event into a GenerateResponse or a ChatResponse and return it."""
    message: Any = response
    match event:
        case Started():
            message.started.SetInParent()
            message.started.request_id, message.started.prompt_tokens = event.request_id, event.prompt_tokens
        case Delta():
            message.delta.SetInParent()
            message.delta.token_ids.extend(event.token_ids)
            message.delta.text = event.text
            for logprobs in event.logprobs:
                output_frames.logprobs_to_message(logprobs, message.delta.logprobs.add())
            for token in event.prompt:
                entry = message.delta.prompt.add(token_id=token.token_id)
                if token.logprobs is not None:
                    output_frames.logprobs_to_message(token.logprobs, entry.logprobs)
        case Finished():
            finished = message.finished
            finished.finish_reason = _FINISH_NUMBERS[event.finish_reason]
            usage = asdict(event.usage) | {"cache_source": _SOURCE_NUMBERS[event.usage.cache_source]}
            finished.usage.CopyFrom(generation_pb2.Usage(**usage))
            finished.timings.CopyFrom(generation_pb2.Timings(**asdict(event.timings)))
            finished.speculation.CopyFrom(generation_pb2.Speculation(**asdict(event.speculation)))
    return response


def event_from_message(response: pb.GenerateResponse | pb.ChatResponse) -> AnswerEvent | None:
    """Return a response's event, None for one of a later version. Raises InvalidArgument for bad log-probabilities."""
    match response.WhichOneof("event"):
        case "started":
            return Started(response.started.request_id, response.started.prompt_tokens)
        case "delta":
            delta = response.delta
            logprobs = output_frames.logprobs_of_tokens(delta)
            return Delta(tuple(delta.token_ids), delta.text, logprobs, tuple(map(_prompt_token, delta.prompt)))
        case "finished":
            return _finished(response.finished)
    return None


def _prompt_token(message: generation_pb2.PromptToken) -> PromptToken:
    logprobs = output_frames.logprobs_from_message(message.logprobs) if message.HasField("logprobs") else None
    return PromptToken(message.token_id, logprobs)


def _finished(message: generation_pb2.Finished) -> Finished:
    usage, timings, speculation = message.usage, message.timings, message.speculation
    return Finished(
        _FINISH_REASONS.get(message.finish_reason, FinishReason.STOP),
        Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            _SOURCES.get(usage.cache_source),
            given(usage, "original_prompt_tokens"),
        ),
        Timings(
            timings.prefill_ms,
            timings.restore_ms,
            timings.decode_ms,
            timings.decode_tokens_per_second,
            timings.draft_ms,
            timings.compress_ms,
            timings.resumed,
        ),
        SpeculationFigures(
            speculation.steps,
            speculation.draft_tokens,
            speculation.accepted_tokens,
            given(speculation, "acceptance_length"),
            tuple(speculation.notes),
            speculation.lookup_tokens,
            speculation.accepted_lookup_tokens,
            dict(speculation.draft_steps),
            dict(speculation.lookup_steps),
        ),
    )


# --- the server


def info_to_message(info: ServerInfo) -> server_pb2.ServerInfo:
    """Return the message for what a server says of itself."""
    return server_pb2.ServerInfo(**asdict(info))


def info_from_message(message: server_pb2.ServerInfo) -> ServerInfo:
    """Return what a server says of itself."""
    draft = message.draft
    return ServerInfo(
        message.version,
        model_from_message(message.model),
        tuple(StagePlace(*(getattr(stage, name) for name in StagePlace.__slots__)) for stage in message.stages),
        DraftPlace(*(getattr(draft, name) for name in DraftPlace.__slots__)) if message.HasField("draft") else None,
        message.ready,
        message.uptime_seconds,
    )


def model_from_message(message: server_pb2.Model) -> Model:
    """Return a served model."""
    return Model(message.name, tuple(message.aliases), message.context_length, message.created)


def load_from_message(message: server_pb2.Load) -> ServerLoad:
    """Return how busy a server is."""
    return ServerLoad(message.running, message.waiting, message.max_running, message.max_waiting, message.draining)
