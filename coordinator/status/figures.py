"""Counts what the engine reports of its requests: steps as they are answered, answers as they end.

It owns the counts and the feeds of those who watch, and knows nothing of workers and protocols.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from coordinator.engine.engine import Engine, FinishedRequest
from coordinator.engine.prompt_lookup import BLOCK_ROWS
from coordinator.engine.step_times import StepTaken
from coordinator.status.rolling import Rolling
from services.messages.steps import StepKind

MAX_UNREAD = 1024
"""How many steps wait for a watcher; for one that reads slowly the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A decode step as those who watch see it.

    rows: how many rows were sent. kept: how many of them count. elapsed_ms: how long it took, drafting included.
    """

    request_id: str
    rows: int
    kept: int
    elapsed_ms: float


@dataclass(slots=True)
class Hits:
    """How many requests began from a kept prefix, and how many tokens those prefixes had."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Totals:
    """Counts since the server began. outcomes: requests by how they ended. hits: by where prefixes were kept."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    hits: dict[str, Hits] = field(default_factory=dict)


class Figures:
    """The figures of one engine: `rolling` sums over its steps, `totals` counts its requests.

    clock: returns seconds, as `time.monotonic` does.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        draft = engine.cluster.draft
        rows = max(1 if draft is None else draft.block_size, BLOCK_ROWS if engine.prompt_lookup else 1)
        self.rolling = Rolling(len(engine.cluster.workers), rows, clock)
        self.totals = Totals()
        self._clock, self._began = clock, clock()
        self._feeds: list[deque[WatchedStep]] = []
        engine.step_listeners.append(self._step)
        engine.listeners.append(self._finished)

    @property
    def uptime_s(self) -> float:
        """How many seconds ago counting began."""
        return self._clock() - self._began

    @contextlib.contextmanager
    def watched(self) -> Iterator[deque[WatchedStep]]:
        """Yield a queue to whose right end steps are appended as they are answered; the watcher pops them left."""
        feed: deque[WatchedStep] = deque(maxlen=MAX_UNREAD)
        self._feeds.append(feed)
        try:
            yield feed
        finally:
            # Compared by identity, because feeds with the same steps are equal.
            self._feeds = [other for other in self._feeds if other is not feed]

    def _step(self, step: StepTaken) -> None:
        self.rolling.add(step)
        if step.kind is not StepKind.PREFILL:
            for feed in self._feeds:
                feed.append(WatchedStep(step.request_id, step.rows, step.kept, step.elapsed_ns / 1e6))

    def _finished(self, finished: FinishedRequest) -> None:
        totals = self.totals
        totals.outcomes[finished.outcome] += 1
        if finished.answer is None:
            return
        stats = finished.answer.stats
        totals.prompt_tokens += stats.prompt_tokens
        totals.completion_tokens += stats.completion_tokens
        if stats.cache_source is not None:
            hits = totals.hits.setdefault(stats.cache_source, Hits())
            hits.requests += 1
            hits.tokens += stats.cached_tokens
