"""Whether and how one text is made shorter; what that cost, and what it saves, is measured as it goes.

A failure never loses a request: it goes on with its whole prompt, and says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from coordinator.compression.bridge import Reading, Span, read
from coordinator.compression.drafter_worker import DrafterWorker
from coordinator.compression.settings import CompressionSettings
from coordinator.text.tokenizer import Tokenizer
from services.errors import FlashsplitError
from services.messages.compression import MAX_TOKENS
from services.messages.inference_types import CompressionMode
from services.processes.worker_process import failure_fields

REMEMBERED = 64
"""Prompts whose choice is kept: the same prompt asked again is not read again."""

_WEIGHT = 0.3
"""Of the latest measurement in a moving average."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Shortened:
    """text: what is left, None where all of it goes on; then note says why, if there is anything to say."""

    text: str | None
    note: str | None = None
    elapsed_ms: float = 0.0


class Rate:
    """Tokens a second as a moving average; None before the first measurement."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        if tokens < 1 or seconds <= 0:
            return
        new = tokens / seconds
        self.tokens_per_s = (
            new if self.tokens_per_s is None else self.tokens_per_s + _WEIGHT * (new - self.tokens_per_s)
        )


class Compressor:
    """Texts through a drafter. tokenizer: the drafter's own."""

    def __init__(self, worker: DrafterWorker, tokenizer: Tokenizer, settings: CompressionSettings) -> None:
        self.worker, self._tokenizer, self.settings = worker, tokenizer, settings
        self._reading, self._prefill = Rate(), Rate()
        self._chosen: OrderedDict[bytes, tuple[Span, ...]] = OrderedDict()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """What the target took to compute prompt tokens."""
        self._prefill.add(tokens, seconds)

    async def shorten(self, request_id: str, text: str, prompt_tokens: int, settings: CompressionSettings) -> Shortened:
        """The text with only what its end looks at. prompt_tokens: of the whole prompt, in the target's vocabulary."""
        if settings.mode is CompressionMode.OFF or (
            settings.mode is CompressionMode.AUTO and prompt_tokens < settings.threshold
        ):
            return Shortened(None)
        started = time.monotonic()
        reading = await asyncio.to_thread(read, self._tokenizer, text)
        ratio = settings.keep.ratio(prompt_tokens)
        if settings.mode is CompressionMode.AUTO and not self._pays(len(reading.token_ids), prompt_tokens, ratio):
            return Shortened(None, "not compressed: reading it would take longer than it saves")
        if len(reading.token_ids) > MAX_TOKENS:
            return Shortened(None, f"not compressed: more than {MAX_TOKENS} tokens of the drafter")
        try:
            kept = await self._choose(request_id, reading, ratio)
        except FlashsplitError as error:
            log.warning("compress.failed", request_id=request_id, reason=error.reason, **failure_fields(error))
            return Shortened(None, f"not compressed: {error.message}")
        shorter = reading.cut(kept)
        elapsed_ms = (time.monotonic() - started) * 1e3
        return Shortened(shorter if len(shorter) < len(text) else None, elapsed_ms=elapsed_ms)

    async def close(self) -> None:
        await self.worker.close()

    def _pays(self, drafter_tokens: int, prompt_tokens: int, ratio: float) -> bool:
        """Whether reading takes less time than not computing saves, as far as both were measured."""
        reading, prefill = self._reading.tokens_per_s, self._prefill.tokens_per_s
        if reading is None or prefill is None:
            return True
        return drafter_tokens / reading < prompt_tokens * (1 - ratio) / prefill

    async def _choose(self, request_id: str, reading: Reading, ratio: float) -> tuple[Span, ...]:
        key = hashlib.sha256(f"{ratio!r}\n{reading.text}".encode()).digest()
        if key in self._chosen:
            self._chosen.move_to_end(key)
            return self._chosen[key]
        found = await self.worker.compress(request_id, reading.token_ids, ratio)
        self._reading.add(len(reading.token_ids), found.forward_ns / 1e9)
        self._chosen[key] = found.kept
        while len(self._chosen) > REMEMBERED:
            self._chosen.popitem(last=False)
        return found.kept
