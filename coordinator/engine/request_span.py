"""A request's span: named and described by OpenTelemetry's conventions for generative AI, its phases below it."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.answer import Answer, Phase, Request
from services.telemetry import tracing
from services.telemetry.trace_context import Trace


class RequestSpan:
    """From arrival to end. trace: what the stages continue."""

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
        return self._span.trace

    def end(self, answer: Answer | None, outcome: str, phases: Iterable[Phase]) -> None:
        """outcome: the finish reason, or why it ended otherwise."""
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
        # A client that goes is no failure.
        span.end(None if answer is not None or outcome in ("cancelled", "refused") else outcome)
