"""What a session reports of itself: a log line when it begins and when it ends, and a tracing span in between.

It owns these figures. It must not know what the session computes.
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
    """The record of one session on a stage or with a draft; it begins when it is created.

    steps: forwards of the stage, or blocks that the draft proposed. forward_ns: how long they took in all. queued_ns:
    how long those of a stage waited for the device, with what others computed meanwhile.
    """

    def __init__(self, request_id: str, trace: Trace | None, location: Location, layers: LayerRange | None) -> None:
        """layers: those of the stage, None for a draft."""
        self.steps = self.forward_ns = self.queued_ns = 0
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
        """Run a job, on the device thread, and count its time. Returns its result."""
        started_ns = time.monotonic_ns()
        try:
            return job(*args)
        finally:
            self.forward_ns += time.monotonic_ns() - started_ns

    def failed(self, reason: str) -> None:
        """Note why the session failed. The first reason is reported, whatever ends the session then."""
        self._failure = self._failure or reason.lower()

    def end(self, why: str, tokens: int) -> None:
        """End the record; later calls do nothing.

        why: what ended the session, as `services.errors.ending` says. tokens: its length at the end, prompt included.
        """
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
            flashsplit__queued_ms=round(self.queued_ns / 1e6, 3),
            flashsplit__ended=ended,
        )
        self._span.end(None if ended in (CLOSED, "cancelled") else ended)
