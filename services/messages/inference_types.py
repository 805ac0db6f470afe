"""The words of the clients' contract as frozen dataclasses: what they may ask for, and what comes of it.

The doors share them: `coordinator/api/requests.py` makes the engine's request of them, whatever protocol they came by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Stopping:
    """Where an answer shall end. max_tokens None: not said."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. tool_calls: JSON text of an array."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat. tools: JSON text of an array. variables: the chat template's own."""

    messages: tuple[Message, ...]
    tools: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class CompressionMode(StrEnum):
    """OFF: never; AUTO: long prompts, where it pays; ALWAYS: every prompt that may be."""

    OFF = "off"
    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class CompressionWish:
    """Whether a prompt may be made shorter before it is read, and to what share of it; None: as the server does."""

    mode: CompressionMode | None = None
    keep_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for an answer. model None: the one that is served. logprobs: how many alternatives beside each token,
    None for off. grammar None: the answer may be anything."""

    prompt: str | tuple[int, ...] | Conversation
    sampling: SamplingParams = SamplingParams()
    stopping: Stopping = Stopping()
    speculate: bool = True
    model: str | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    compression: CompressionWish = CompressionWish()


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


class CacheSource(StrEnum):
    """Where a prompt's state was kept."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Started:
    """The request's turn has come."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer. logprobs: one for each token where they were asked for, else none."""

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. cached_tokens of the prompt's were taken up from cache_source. original_prompt_tokens: of
    the prompt before it was compressed, None where it was not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_source: CacheSource | None = None
    original_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds; decoding begins with the first token."""

    prefill_ms: float = 0.0
    restore_ms: float = 0.0
    decode_ms: float = 0.0
    decode_tokens_per_second: float = 0.0
    draft_ms: float = 0.0
    compress_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What the draft did. acceptance_length: mean tokens a verify produced, None when there was none."""

    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_length: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is over."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings = Timings()
    speculation: SpeculationFigures = SpeculationFigures()


AnswerEvent = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Model:
    """What clients can ask for. created: seconds since 1970."""

    name: str
    aliases: tuple[str, ...]
    context_length: int
    created: int


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Layers [first_layer, last_layer) and who runs them."""

    address: str
    host: str
    device: str
    first_layer: int
    last_layer: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """The draft and who runs it."""

    address: str
    host: str
    device: str
    block_size: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server as it stands."""

    version: str
    model: Model
    stages: tuple[StagePlace, ...]
    draft: DraftPlace | None
    ready: bool
    uptime_seconds: float


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests of all doors, now and at most."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    draining: bool
