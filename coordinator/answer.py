"""A request to the engine and its answer, as plain data."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from services.messages.inference_types import PromptToken
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, TokenLogprobs
from services.telemetry.trace_context import Trace


@dataclass(frozen=True, slots=True)
class Compression:
    """How a prompt was compressed.

    original_tokens: its length before, None where it was left whole; `note` says why then. elapsed_ms: what it took.
    """

    original_tokens: int | None = None
    elapsed_ms: float = 0.0
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it. Lengths count tokens."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the text has what ended it, a stop string or a stop token that is text."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""
    speculate: bool = True
    prefill_chunk: int | None = None
    """Prompt tokens of one prefill step; None takes what suits the workers."""
    boundaries: tuple[int, ...] = ()
    """Positions of the prompt at which turns of a chat end; the states there are worth keeping."""
    logprobs: int | None = None
    """How many of the most probable tokens to report beside each token (0 to 20); None reports no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. All of the prompt is computed then, whatever is kept of it."""
    grammar: Grammar | None = None
    """What the output must be; a stop token can end it only where it is complete by this grammar."""
    grammar_field: str = "grammar"
    """The client's field that the grammar was made of, which a refusal names."""
    compression: Compression | None = None
    trace: Trace = field(default_factory=Trace)
    """Where the request stands in its client's trace."""
    chat: bool = False
    """Whether the prompt is a conversation."""
    unique_id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Part of ids that must be unique, such as those of tool calls; clients may choose one request_id twice."""


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage: where it is, and how long an answer's decode steps computed there and travelled to it and back."""

    address: str
    device: str
    first_layer: int
    last_layer: int
    forward_ms: float
    wire_ms: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one answer. Times in milliseconds; decode begins with the first token.

    draft_tokens: those that were verified; accepted_tokens: those of them that are part of the answer. lookup_tokens
    and accepted_lookup_tokens: the ones among both that were looked up in the text, and are no draft model's.
    draft_steps, lookup_steps: by a number of draft tokens, how many steps verified so many of a draft model, and so
    many that were looked up; the others of `steps` verified none.
    acceptance_length: the mean number of tokens that a verify step produced, None without one. cached_tokens: prompt
    tokens that were not computed but restored from `cache_source` ("memory" or "disk", None where there were none),
    which took restore_ms. draft_lost: whether a draft that the answer should have had was lost. original_prompt_tokens:
    the prompt's length before it was compressed, which took compress_ms; None where it was not. resumed: how often the
    answer went on behind a chain that was lost.
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
    draft_lost: bool = False
    original_prompt_tokens: int | None = None
    compress_ms: float = 0.0
    resumed: int = 0
    lookup_tokens: int = 0
    accepted_lookup_tokens: int = 0
    draft_steps: Mapping[int, int] = field(default_factory=dict)
    lookup_steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. text is None for a checkpoint without a tokenizer.

    logprobs: one for each of token_ids, None where the request asked for none. prompt: the prompt's tokens, None where
    the request did not ask for their log-probabilities.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_string: str | None = None
    """The stop string that ended the answer, if one did."""
    prompt: tuple[PromptToken, ...] | None = None

    @property
    def cut(self) -> bool:
        """Whether max_tokens ended the answer, and not the model."""
        return self.finish_reason == "length"

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints; it has logprobs and prompt only where they were asked for."""
        fields = asdict(self)
        for name in ("logprobs", "prompt"):
            if fields[name] is None:
                del fields[name]
        return fields


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it comes. logprobs: one for each of token_ids where they were asked for, else none.

    prompt: the next tokens of the prompt, where their log-probabilities were asked for, else none. Such pieces come
    first, and nothing else is in them.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoicePart:
    """A piece of the answer of choice `index`, or at its end the whole answer. came_at: when, in Unix seconds."""

    index: int
    content: Piece | Answer
    came_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's way through the server. Its times are those of `time.monotonic()`."""

    name: str
    began_s: float
    ended_s: float
