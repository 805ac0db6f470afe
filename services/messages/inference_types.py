"""The clients' contract as frozen dataclasses: what they may ask for, and what an answer consists of.

HTTP and gRPC share them: `coordinator/api/engine_requests.py` makes the engine's request of them.
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
    """Where an answer ends, and what of its end is text.

    max_tokens: the most tokens it may have, None where the client doesn't say. include_stop_str_in_output: whether the
    text ends with the stop string, or a stop token's text, and not in front of it. keep_special_tokens: whether special
    tokens have text.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    keep_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. tool_calls: the JSON text of an array of calls."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat. tools: the JSON text of an array of tools. variables: switches of the chat template.

    continue_final_message: whether the answer goes on with the text of the last message.
    """

    messages: tuple[Message, ...]
    tools: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


class CompressionMode(StrEnum):
    """Which prompts are compressed: none, long ones where it pays, or every one that may be."""

    OFF = "off"
    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class CompressionParams:
    """Whether a prompt may be compressed before the model reads it, and to what share of its tokens.

    None leaves either to the server's settings.
    """

    mode: CompressionMode | None = None
    keep_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for an answer.

    model: None means the one that is served. logprobs: how many of the most probable tokens to report beside each
    token with their log-probabilities, None for none at all. prompt_logprobs: the same of the prompt's tokens. grammar:
    what the answer must be, None for anything.
    """

    prompt: str | tuple[int, ...] | Conversation
    sampling: SamplingParams = SamplingParams()
    stopping: Stopping = Stopping()
    speculate: bool = True
    model: str | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    compression: CompressionParams = CompressionParams()
    prompt_logprobs: int | None = None


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


class CacheSource(StrEnum):
    """Where the state of a prompt's beginning was kept."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of an answer: the request has left the queue."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt. logprobs: None for the prompt's first token, which follows nothing."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer. logprobs: one entry for each token where they were asked for, else none.

    prompt: tokens of the prompt where their log-probabilities were asked for, which come in order and before the
    answer's; else none.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request and its answer.

    cached_tokens: how many of the prompt's were not computed but restored from `cache_source`. original_prompt_tokens:
    what the prompt had before it was compressed, None where it was not.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_source: CacheSource | None = None
    original_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """How many milliseconds the parts of an answer took. Decoding begins with the first token.

    resumed: how often the answer waited for lost workers, and went on with the same tokens.
    """

    prefill_ms: float = 0.0
    restore_ms: float = 0.0
    decode_ms: float = 0.0
    decode_tokens_per_second: float = 0.0
    draft_ms: float = 0.0
    compress_ms: float = 0.0
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What speculation did for an answer.

    acceptance_length: the mean number of tokens that a verify step produced, None without such a step. lookup_tokens,
    accepted_lookup_tokens: of draft_tokens and accepted_tokens, those that no model proposed: they followed where the
    last tokens stood before in the prompt or the answer. draft_steps, lookup_steps: by a number of draft tokens, how
    many steps verified so many of a draft model, and so many that were looked up; the others of `steps` verified none.
    """

    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_length: float | None = None
    notes: tuple[str, ...] = ()
    lookup_tokens: int = 0
    accepted_lookup_tokens: int = 0
    draft_steps: Mapping[int, int] = field(default_factory=dict)
    lookup_steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings = Timings()
    speculation: SpeculationFigures = SpeculationFigures()


AnswerEvent = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Model:
    """A model that clients can ask for. created: seconds since 1970."""

    name: str
    aliases: tuple[str, ...]
    context_length: int
    created: int


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage: its worker, and the layers [first_layer, last_layer) that it runs."""

    address: str
    host: str
    device: str
    first_layer: int
    last_layer: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """The draft and its worker. block_size: rows of one block."""

    address: str
    host: str
    device: str
    block_size: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself: its model, where that runs, and whether it takes requests."""

    version: str
    model: Model
    stages: tuple[StagePlace, ...]
    draft: DraftPlace | None
    ready: bool
    uptime_seconds: float


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How many requests of all APIs run and wait, and how many may."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    draining: bool
