"""What a request asks for and what comes of it, as plain data."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, TokenLogprobs
from services.telemetry.trace_context import Trace


@dataclass(frozen=True, slots=True)
class Compression:
    """How a prompt was made shorter. original_tokens: before; None where it went on whole, and note says why."""

    original_tokens: int | None = None
    elapsed_ms: float = 0.0
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it. Sizes count tokens."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    speculate: bool = True
    prefill_chunk: int | None = None
    """Prompt tokens a step; None: what suits the workers."""
    boundaries: tuple[int, ...] = ()
    """Where turns of a chat end in the prompt: states worth keeping."""
    logprobs: int | None = None
    """Tell each token's log-probability and those of so many likeliest ones beside it (0 to 20); None: tell none."""
    grammar: Grammar | None = None
    """What the output must be; it can end in one of `stop_token_ids` only where it is that."""
    compression: Compression | None = None
    trace: Trace = field(default_factory=Trace)
    """Where the request stands in its client's trace."""
    chat: bool = False
    """Whether the prompt is a conversation."""
    unique_id: str = field(default_factory=lambda: secrets.token_hex(12))
    """For names that must differ between requests, of tool calls above all: clients may choose one request_id twice."""


@dataclass(frozen=True, slots=True)
class StageStats:
    """Where a stage is and how long decode steps spent computing there and on the way to it and back, in all."""

    address: str
    device: str
    first_layer: int
    last_layer: int
    forward_ms: float
    wire_ms: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one answer. Times in milliseconds; decode begins with the first token.

    acceptance_length: mean tokens a verify step produced, None when there was none. cached_tokens: prompt tokens that
    were not computed but taken up from `cache_source` ("memory" or "disk", None without), which took restore_ms.
    original_prompt_tokens: before the prompt was compressed, which took compress_ms; None where it was not.
    """

    prompt_tokens: int
    cached_tokens: int
    cache_source: str | None
    restore_ms: float
    completion_tokens: int
    prefill_ms: float
    decode_ms: float
    decode_tokens_per_s: float
    steps: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_length: float | None
    draft_ms: float
    stages: tuple[StageStats, ...]
    notes: tuple[str, ...] = ()
    original_prompt_tokens: int | None = None
    compress_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. text is None for a checkpoint without a tokenizer.

    logprobs: one for each of token_ids, None where the request asked for none.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_string: str | None = None
    """The one that ended it."""

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints; logprobs stand in it where they were asked for."""
        fields = asdict(self)
        if self.logprobs is None:
            del fields["logprobs"]
        return fields


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it comes. logprobs: one for each of token_ids where asked for, else none."""

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's way. Times as `time.monotonic()` gave them."""

    name: str
    began_s: float
    ended_s: float
