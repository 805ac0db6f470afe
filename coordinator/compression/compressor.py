"""Makes a text shorter where that pays; what it takes, and what it saves, is measured as requests come.

A failure never loses a request: the request goes on with its whole prompt, and says so.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from coordinator.compression.drafter_text import DrafterText, Span, tokenize
from coordinator.compression.drafter_worker import DrafterWorker
from coordinator.compression.settings import CompressionSettings
from coordinator.text.tokenizer import Tokenizer
from services.errors import FlashsplitError
from services.messages.compression import MAX_TOKENS
from services.messages.inference_types import CompressionMode
from services.processes.worker_process import failure_fields
from services.text_threads import on_text_thread

REMEMBERED = 64
"""How many texts' choices are remembered, so that the same text is not read again."""

_WEIGHT = 0.3
"""The weight of the latest measurement in a moving average."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Shortened:
    """The result for one text.

    text: the shorter text; None where the text goes on whole. note: why it does, where the user should know.
    elapsed_ms: how long shortening took.
    """

    text: str | None
    note: str | None = None
    elapsed_ms: float = 0.0


class Rate:
    """Tokens a second, as a moving average that is None before the first measurement."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measurement."""
        if tokens < 1 or seconds <= 0:
            return
        new = tokens / seconds
        self.tokens_per_s = (
            new if self.tokens_per_s is None else self.tokens_per_s + _WEIGHT * (new - self.tokens_per_s)
        )


class Compressor:
    """Shortens texts by what a drafter says of them. tokenizer: the drafter's. settings: those of the server."""

    def __init__(self, worker: DrafterWorker, tokenizer: Tokenizer, settings: CompressionSettings) -> None:
        self.worker, self._tokenizer, self.settings = worker, tokenizer, settings
        self._reading, self._prefill = Rate(), Rate()
        self._remembered: OrderedDict[bytes, tuple[Span, ...]] = OrderedDict()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Note how long the target took to compute so many prompt tokens."""
        self._prefill.add(tokens, seconds)

    async def shorten(self, request_id: str, text: str, prompt_tokens: int, settings: CompressionSettings) -> Shortened:
        """Return a text with only the parts that its end pays attention to.

        prompt_tokens: how many tokens of the target the whole prompt has. Never raises for the drafter's sake.
        """
        if settings.mode is CompressionMode.OFF or (
            settings.mode is CompressionMode.AUTO and prompt_tokens < settings.threshold
        ):
            return Shortened(None)
        started = time.monotonic()
        drafter_text = await on_text_thread(len(text), tokenize, self._tokenizer, text)
        ratio = settings.keep.ratio(prompt_tokens)
        if settings.mode is CompressionMode.AUTO and not self._pays(len(drafter_text.token_ids), prompt_tokens, ratio):
            return Shortened(None, "not compressed: reading it would take longer than it saves")
        if len(drafter_text.token_ids) > MAX_TOKENS:
            return Shortened(None, f"not compressed: more than {MAX_TOKENS} tokens of the drafter")
        try:
            token_ranges = await self._choose(request_id, drafter_text, ratio)
        except FlashsplitError as error:
            log.warning("compress.failed", request_id=request_id, reason=error.reason, **failure_fields(error))
            return Shortened(None, f"not compressed: {error.message}")
        shorter = drafter_text.excerpt(token_ranges)
        elapsed_ms = (time.monotonic() - started) * 1e3
        return Shortened(shorter if len(shorter) < len(text) else None, elapsed_ms=elapsed_ms)

    async def close(self) -> None:
        """End the drafter's worker. Safe to call twice."""
        await self.worker.close()

    def _pays(self, drafter_tokens: int, prompt_tokens: int, ratio: float) -> bool:
        """Tell whether reading takes less time than the shorter prompt saves; true until both were measured."""
        reading, prefill = self._reading.tokens_per_s, self._prefill.tokens_per_s
        if reading is None or prefill is None:
            return True
        return drafter_tokens / reading < prompt_tokens * (1 - ratio) / prefill

    async def _choose(self, request_id: str, drafter_text: DrafterText, ratio: float) -> tuple[Span, ...]:
        """Return the ranges of tokens to keep."""
        key = hashlib.sha256(f"{ratio!r}\n{drafter_text.text}".encode()).digest()
        if key in self._remembered:
            self._remembered.move_to_end(key)
            return self._remembered[key]
        compressed = await self.worker.compress(request_id, drafter_text.token_ids, ratio)
        self._reading.add(len(drafter_text.token_ids), compressed.forward_ns / 1e9)
        self._remembered[key] = compressed.kept
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return compressed.kept
