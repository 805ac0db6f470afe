"""Spans for OpenTelemetry; no other module knows of that library.

Tracing is off, and nothing of OpenTelemetry is imported, unless OTEL_EXPORTER_OTLP_ENDPOINT is set or
OTEL_TRACES_EXPORTER is "console". It needs the extra `otel`. Spans begin and end with requests and sessions, never with
steps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

import structlog

from services.telemetry.trace_context import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span as OtelSpan, Tracer

Value: TypeAlias = str | int | float | bool | tuple[str, ...]

SEND_TIMEOUT_S = 2
"""How long sending one batch of spans may take, unless the environment says otherwise.

A collector that is gone must not hold up the end of a process.
"""

log = structlog.get_logger()

_tracer: Tracer | None = None
_root_trace_id = 0
"""The trace id of the root span that is being begun; log lines have it already."""


def start_tracing(service: str) -> None:
    """Start tracing where the environment asks for it; called once, when the process starts.

    service: the process's name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give one. Spans that are not yet
    sent when the process ends are sent then.
    """
    global _tracer
    exporter = _chosen_exporter()
    if exporter is None:
        return
    try:
        _tracer = _provider(service, exporter).get_tracer("flashsplit")
    except ImportError as error:
        log.warning("tracing.unavailable", why=f"{error}: install flashsplit[otel]")


def begin(
    name: str, parent: Trace | None, kind: Literal["server", "internal"] = "internal", **attributes: Value | None
) -> Span:
    """Begin a span. parent: the place below which it hangs; without a span id there, or with None, it is a root.

    Two underscores in an attribute's name stand for a dot; an attribute that is None is left out.
    """
    trace = parent or Trace()
    if _tracer is None:
        return Span(trace.child(), None)
    from opentelemetry.trace import SpanKind

    span = _start(_tracer, name, trace, SpanKind.SERVER if kind == "server" else SpanKind.INTERNAL)
    context = span.get_span_context()
    place = Trace(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled)
    wrapped = Span(place, span)
    wrapped.set(**attributes)
    return wrapped


class Span:
    """A span, which does nothing where tracing is off; `begin` makes one.

    The attribute `trace` is the place in the trace from which processes called within the span go on.
    """

    __slots__ = ("_clock_ns", "_otel", "trace")

    def __init__(self, trace: Trace, otel: OtelSpan | None) -> None:
        self.trace, self._otel = trace, otel
        # What to add to monotonic time to get calendar time.
        self._clock_ns = time.time_ns() - time.monotonic_ns()

    def set(self, **attributes: Value | None) -> None:
        """Set attributes; their names are written as in `begin`."""
        if self._otel is not None:
            self._otel.set_attributes(
                {name.replace("__", "."): value for name, value in attributes.items() if value is not None}
            )

    def phase(self, name: str, began_s: float, ended_s: float) -> None:
        """Add a child span for something that is over. Times are those of `time.monotonic()`."""
        if self._otel is None:
            return
        from opentelemetry.trace import set_span_in_context

        assert _tracer is not None
        began_ns, ended_ns = (round(at_s * 1e9) + self._clock_ns for at_s in (began_s, ended_s))
        _tracer.start_span(name, set_span_in_context(self._otel), start_time=began_ns).end(ended_ns)

    def end(self, error: str | None = None) -> None:
        """End the span. error: what kind of error it was, in a word, where the work failed."""
        if self._otel is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._otel.set_attribute("error.type", error)
            self._otel.set_status(Status(StatusCode.ERROR))
        self._otel.end()


def _chosen_exporter() -> Literal["otlp", "console"] | None:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter == "console":
        return "console"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return "otlp" if exporter == "otlp" and any(os.environ.get(name) for name in endpoints) else None


def _provider(service: str, exporter: Literal["otlp", "console"]) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Gives a root span the trace id that its request's log lines name."""

        def generate_trace_id(self) -> int:
            return _root_trace_id or super().generate_trace_id()

    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    resource = resource.merge(Resource({"process.pid": os.getpid()}))
    provider = TracerProvider(resource=resource, id_generator=Ids())
    provider.add_span_processor(_processor(exporter))
    # The exporter's own warnings, such as that nobody listens, go where all log lines go.
    notices = logging.getLogger("opentelemetry")
    notices.addHandler(_ToLog(logging.WARNING))
    notices.propagate = False
    return provider


def _processor(exporter: Literal["otlp", "console"]) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor

    if exporter == "console":
        return SimpleSpanProcessor(
            ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: f"{span.to_json(indent=None)}\n")
        )
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    variables = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
    is_set = any(os.environ.get(name) for name in variables)
    return BatchSpanProcessor(OTLPSpanExporter(timeout=None if is_set else SEND_TIMEOUT_S))


def _start(tracer: Tracer, name: str, trace: Trace, kind: object) -> OtelSpan:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

    global _root_trace_id
    assert isinstance(kind, SpanKind)
    number = int(trace.trace_id, 16)
    if trace.span_id is not None:
        flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
        above = NonRecordingSpan(SpanContext(number, int(trace.span_id, 16), is_remote=True, trace_flags=flags))
        return tracer.start_span(name, set_span_in_context(above, Context()), kind)
    # All spans begin on the event loop's thread, so no other root span begins meanwhile.
    _root_trace_id = number
    try:
        return tracer.start_span(name, Context(), kind)
    finally:
        _root_trace_id = 0


class _ToLog(logging.Handler):
    """Hands the records of the standard library's logging to this project's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record."""
        log.warning("tracing.notice", text=record.getMessage())
