"""Which request of which trace this is: W3C's `traceparent` (https://www.w3.org/TR/trace-context/), and the call that a
client made, from the server that took it down to every log line that is written on its behalf.

It knows nothing of spans; those are made in `tracing.py`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import structlog

HEADER = "traceparent"

MAX_TRACEPARENT = 256
"""The most characters of a header that is parsed; version 00 has 55, later ones may append some."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_SAMPLED = 1


def _new_trace_id() -> str:
    return secrets.token_hex(16)


def _new_span_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Trace:
    """A place in a trace.

    span_id: the span whose children begin here; None where the trace begins. sampled: whether the trace is recorded.
    """

    trace_id: str = field(default_factory=_new_trace_id)
    span_id: str | None = None
    sampled: bool = False

    @property
    def traceparent(self) -> str:
        """The header for a process that is called from here."""
        return f"00-{self.trace_id}-{self.span_id or _new_span_id()}-{int(self.sampled):02x}"

    def child(self) -> Trace:
        """Return a place below this one for a span that nobody records."""
        return replace(self, span_id=_new_span_id())


def parse_traceparent(text: str) -> Trace | None:
    """Return the place that a header names; None for what is no traceparent.

    As the recommendation says, versions later than 00 are read as far as they agree with 00.
    """
    match = _FORM.fullmatch(text) if len(text) <= MAX_TRACEPARENT else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None) or not (int(trace_id, 16) and int(span_id, 16)):
        return None
    return Trace(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def trace_of(headers: Sequence[str]) -> Trace:
    """Return the trace that a client's `traceparent` headers continue; a new one unless there is one valid header."""
    return (parse_traceparent(headers[0]) if len(headers) == 1 else None) or Trace()


@dataclass(slots=True)
class TokenCount:
    """How many tokens the answers to a call have so far, and their prompts, all of its choices together."""

    prompt: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A client's call, as the server that took it names it. tokens: grows while the call is answered."""

    request_id: str
    trace: Trace
    tokens: TokenCount = field(default_factory=TokenCount)


_call: ContextVar[Call | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def calling(request_id: str, traceparents: Sequence[str]) -> Iterator[Call]:
    """Run the block, and every task that it starts, for a call; its log lines carry both ids of the call.

    traceparents: the client's headers of that name.
    """
    call = Call(request_id, trace_of(traceparents))
    token = _call.set(call)
    try:
        with structlog.contextvars.bound_contextvars(request_id=request_id, trace_id=call.trace.trace_id):
            yield call
    finally:
        _call.reset(token)


def current_call() -> Call | None:
    """Return the call that is being answered; None outside of one."""
    return _call.get()


def log_for(request_id: str, trace: Trace | None) -> None:
    """Have the log lines of this task, and of those that it starts from now on, carry both ids."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
    if trace is not None:
        structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)
