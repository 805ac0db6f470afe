"""A request's tracing span, by OpenTelemetry's conventions for generative AI, with the request's phases below it."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.answer import Answer, Phase, Request
from services.telemetry import tracing
from services.telemetry.trace_context import Trace


class RequestSpan:
    """The span of a request from its arrival to its end."""

    def __init__(self, request: Request, model: str) -> None:
        operation = "chat" if request.chat else "text_completion"
        self._span = tracing.begin(
            f"{operation} {model}",
            request.trace,
            "server",
            gen_ai__operation__name=operation,
            gen_ai__provider__name="flashsplit",
            gen_ai__request__model=model,
            gen_ai__request__max_tokens=request.max_tokens,
            gen_ai__request__temperature=request.sampling.temperature,
            gen_ai__usage__input_tokens=len(request.prompt_ids),
            flashsplit__request_id=request.request_id,
        )

    @property
    def trace(self) -> Trace:
        """The span's place in its trace, which the stages continue."""
        return self._span.trace

    def end(self, answer: Answer | None, outcome: str, phases: Iterable[Phase]) -> None:
        """End the span. outcome: the answer's finish reason, else why there is no answer."""
        span = self._span
        for phase in phases:
            span.phase(phase.name, phase.began_s, phase.ended_s)
        span.set(flashsplit__outcome=outcome)
        if answer is not None:
            span.set(
                gen_ai__response__finish_reasons=(answer.finish_reason,),
                gen_ai__usage__output_tokens=len(answer.token_ids),
                flashsplit__cached_tokens=answer.stats.cached_tokens,
                flashsplit__acceptance_length=answer.stats.acceptance_length,
            )
        # A client that goes away is no failure of the server.
        span.end(None if answer is not None or outcome in ("cancelled", "refused") else outcome)
