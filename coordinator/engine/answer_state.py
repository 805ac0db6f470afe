"""What an answer is so far, whatever chain of stages computes it: its tokens, its text, what ends it, its figures.

It outlives the attempts to compute it: where a chain is lost, the next one goes on behind the tokens that are here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.answer import Answer, Compression, Phase, Piece, Request, StageStats, Stats
from coordinator.engine.prompt_lookup import PromptLookup
from coordinator.engine.speculation import Speculation
from coordinator.engine.step_times import StepTimes
from coordinator.text.text_stream import TextStream
from coordinator.text.tokenizer import Tokenizer
from services.errors import InternalError
from services.messages.inference_types import PromptToken
from services.messages.steps import Commit, StageIdentity, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Cached:
    """How many tokens of a prompt were restored, from where, and how many milliseconds that took."""

    tokens: int = 0
    source: str | None = None
    restore_ms: float = 0.0


class AnswerState:
    """The answer to one request so far.

    token_ids: its tokens. finish_reason: what ended it, None while it goes on. accepted: draft tokens that are part of
    it; accepted_lookups: those of them that were looked up in the text. speculation: what is known of how well its
    draft guesses. lookup: its text, where draft tokens are looked up in it; None where they are not. times: of its
    decode steps. phases: when it restored, prefilled and decoded. resumed: how often it went on behind a chain that was
    lost.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._text = TextStream(
            tokenizer,
            request.stop_strings,
            min_tokens=request.sampling.min_tokens or 0,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
        )
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt: list[PromptToken] = []
        self.finish_reason: str | None = None
        self.accepted = self.accepted_lookups = 0
        self.speculation = Speculation(1)
        self.lookup: PromptLookup | None = None
        self.times = StepTimes()
        self.prefill_s = self.decode_s = 0.0
        self.phases: list[Phase] = []
        self.resumed = 0
        self._end_told = False
        """Whether the text that was held back to the end was told by a process that has ended."""
        self._told_tokens = 0
        """How many tokens were, which took this one no time."""
        self._first_token_at = 0.0

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self.request.max_tokens - len(self.token_ids)

    def take_up(self, told: Sequence[Piece]) -> None:
        """Take what was told of the answer by a process that has ended, before anything is added to it."""
        for piece in told:
            self._prompt += piece.prompt
            if piece.token_ids:
                self._add(piece.token_ids, piece.logprobs)
            # Text without tokens is what was held back to the end: none comes behind it.
            self._end_told = bool(piece.text) and not piece.token_ids and not piece.prompt
        self.resumed += bool(told)
        self._told_tokens, self._first_token_at, self.decode_s = len(self.token_ids), 0.0, 0.0
        if self.lookup is not None and self.token_ids:
            self.lookup.read(self.request.prompt_ids)
            self.lookup.follow(self.token_ids)

    def add_prompt(self, first: int, token_ids: tuple[int, ...], commit: Commit) -> Piece:
        """Add a prefill step's tokens, with their log-probabilities, to those of the prompt; return those that are new.

        first: the place of the first one in the prompt. Raises InternalError where log-probabilities are missing.
        """
        logprobs = [*([None] if not first else []), *commit.prompt_logprobs]
        if len(logprobs) != len(token_ids):
            raise missing_logprobs()
        added = tuple(map(PromptToken, token_ids, logprobs))[max(0, len(self._prompt) - first) :]
        self._prompt += added
        return Piece((), prompt=added)

    def add(self, commit: Commit) -> Piece:
        """Add a step's tokens to the answer, one by one, up to the one that ends it, and return them as a piece."""
        return self._add(commit.token_ids, commit.logprobs)

    def _add(self, token_ids: Sequence[int], logprobs: tuple[TokenLogprobs, ...]) -> Piece:
        request = self.request
        texts: list[str] = []
        added: list[int] = []
        for token_id in token_ids[: self.remaining]:
            added.append(token_id)
            self.token_ids.append(token_id)
            if token_id in request.stop_token_ids:
                if request.include_stop:
                    texts.append(self._text.push(token_id)[0])
                self.finish_reason = "stop"
                break
            text, stopped = self._text.push(token_id)
            texts.append(text)
            if stopped:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and not self.remaining:
            self.finish_reason = "length"
        logprobs = logprobs[: len(added)]
        self._logprobs += logprobs
        now = time.monotonic()
        self._first_token_at = self._first_token_at or now
        self.decode_s = now - self._first_token_at
        return Piece(tuple(added), "".join(texts), logprobs)

    def end(self) -> Piece | None:
        """Return the text that was held back, if there is any."""
        text, stopped = self._text.finish()
        if stopped:
            self.finish_reason = "stop"
        return Piece((), text) if text and not self._end_told else None

    def answer(self, stages: tuple[StageIdentity, ...], cached: Cached) -> Answer:
        """Return the whole answer. stages: those that computed its end. cached: of the prompt, for them."""
        request = self.request
        assert self.finish_reason is not None
        return Answer(
            tuple(self.token_ids),
            self._text.text,
            self.finish_reason,
            self._stats(stages, cached),
            tuple(self._logprobs) if request.logprobs is not None else None,
            self._text.stop_string,
            tuple(self._prompt) if request.prompt_logprobs is not None else None,
        )

    def _stats(self, stages: tuple[StageIdentity, ...], cached: Cached) -> Stats:
        speculation, times = self.speculation, self.times
        zeros = [0] * len(stages)
        shares = tuple(
            StageStats(
                address=stage.location.address,
                device=stage.location.device,
                first_layer=stage.layers.first,
                last_layer=stage.layers.last,
                forward_ms=forward_ns / 1e6,
                wire_ms=wire_ns / 1e6,
            )
            for stage, forward_ns, wire_ns in zip(
                stages, times.forward_ns or zeros, times.wire_ns or zeros, strict=True
            )
        )
        decoded = max(0, len(self.token_ids) - max(1, self._told_tokens))
        compressed = self.request.compression or Compression()
        return Stats(
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=cached.tokens,
            cache_source=cached.source,
            restore_ms=cached.restore_ms,
            completion_tokens=len(self.token_ids),
            prefill_ms=self.prefill_s * 1e3,
            decode_ms=self.decode_s * 1e3,
            decode_tokens_per_s=decoded / self.decode_s if self.decode_s else 0.0,
            steps=speculation.steps,
            draft_tokens=speculation.offered,
            accepted_tokens=self.accepted,
            lookup_tokens=speculation.looked_up,
            accepted_lookup_tokens=self.accepted_lookups,
            draft_steps=dict(sorted(speculation.draft_steps.items())),
            lookup_steps=dict(sorted(speculation.lookup_steps.items())),
            acceptance_length=speculation.acceptance_length,
            draft_ms=times.draft_ns / 1e6,
            stages=shares,
            notes=(*(() if compressed.note is None else (compressed.note,)), *speculation.notes),
            draft_lost=speculation.draft_lost,
            original_prompt_tokens=compressed.original_tokens,
            compress_ms=compressed.elapsed_ms,
            resumed=self.resumed,
        )


def missing_logprobs() -> InternalError:
    """Return the error for log-probabilities that were asked for and are missing."""
    return InternalError("the last stage told no log-probabilities: install the same flashsplit on all hosts")
