"""What a session tells of itself: a line in the log when it begins and when it ends, and a span from one to the other.

Owns its figures. Knows nothing of what the session computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from services.errors import CLOSED
from services.layers import LayerRange
from services.messages.steps import Location
from services.telemetry import tracing
from services.telemetry.trace_context import Trace

T = TypeVar("T")

log = structlog.get_logger()


class SessionRecord:
    """Of one session on a stage, or with a draft, whose layers are None. steps: forwards, or guessed blocks."""

    def __init__(self, request_id: str, trace: Trace | None, location: Location, layers: LayerRange | None) -> None:
        self.steps = self.forward_ns = 0
        self._began = time.monotonic()
        self._failure: str | None = None
        self._ended = False
        names = {"stage": location.stage, "layers": None if layers is None else str(layers)}
        self._log = log.bind(
            request_id=request_id,
            **({} if trace is None else {"trace_id": trace.trace_id}),
            role="draft" if layers is None else "target",
            **{name: value for name, value in names.items() if value is not None},
        )
        self._span = tracing.begin(
            "draft" if layers is None else f"stage {location.stage}",
            trace,
            flashsplit__request_id=request_id,
            flashsplit__stage=location.stage,
            flashsplit__layers=names["layers"],
            flashsplit__host=location.host,
            flashsplit__device=location.device,
        )
        self._log.debug("session.opened", device=location.device)

    def timed(self, job: Callable[..., T], *args: object) -> T:
        """The job's result, its time counted; for the device thread."""
        started_ns = time.monotonic_ns()
        try:
            return job(*args)
        finally:
            self.forward_ns += time.monotonic_ns() - started_ns

    def failed(self, reason: str) -> None:
        """What went wrong; the first reason counts, and more than how the session is closed."""
        self._failure = self._failure or reason.lower()

    def end(self, why: str, tokens: int) -> None:
        """why: as `services.errors.ending` says. tokens: the session's length at the end, prompt included."""
        if self._ended:
            return
        self._ended = True
        ended, forward_ms = self._failure or why, round(self.forward_ns / 1e6, 3)
        self._log.info(
            "session.closed",
            steps=self.steps,
            tokens=tokens,
            forward_ms=forward_ms,
            ms=round((time.monotonic() - self._began) * 1e3, 1),
            ended=ended,
        )
        self._span.set(
            flashsplit__steps=self.steps,
            flashsplit__tokens=tokens,
            flashsplit__forward_ms=forward_ms,
            flashsplit__ended=ended,
        )
        self._span.end(None if ended in (CLOSED, "cancelled") else ended)
