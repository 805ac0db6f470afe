"""Prometheus metrics of the server, if asked for also under vLLM's names, which dashboards and schedulers know."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from coordinator.engine.engine import Engine, FinishedRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LENGTHS = tuple(float(length) for length in range(1, 17))

# Ours, without prefix and _total -> vLLM's.
_ALIASES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
}


class Metrics:
    """The metrics of one engine, which grow with every request that it finishes."""

    def __init__(self, engine: Engine, *, vllm_names: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._vllm_names, self._model = vllm_names, engine.name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flashsplit_{name}", text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"flashsplit_{name}", text, ("model_name",), registry=self._registry, buckets=buckets)

        running = Gauge("flashsplit_requests_running", "Requests that run.", ("model_name",), registry=self._registry)
        waiting = Gauge("flashsplit_requests_waiting", "Requests that wait.", ("model_name",), registry=self._registry)
        ready = Gauge("flashsplit_ready", "1 when a request would be taken.", registry=self._registry)
        running.labels(engine.name).set_function(lambda: engine.load.running)
        waiting.labels(engine.name).set_function(lambda: engine.load.waiting)
        ready.set_function(lambda: engine.ready)
        self._requests = counter("requests", "Requests by how they ended.", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._cached = counter("cached_tokens", "Prompt tokens not computed, by where they were kept.", "source")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found there.")
        self._draft = counter("draft_tokens", "Tokens that the draft proposed.")
        self._accepted = counter("accepted_tokens", "Draft tokens that were accepted.")
        self._steps = counter("decode_steps", "Steps through all stages after the first token.")
        self._forward = counter("stage_forward_seconds", "Decode time that a stage computed.", "stage", "device")
        self._wire = counter("stage_wire_seconds", "Decode time between a stage and the one above.", "stage", "device")
        self._queued = histogram("queue_seconds", "From a request's arrival to its turn.", _SECONDS)
        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS)
        self._token = histogram("time_per_output_token_seconds", "Mean over an answer's tokens.", _TOKEN_SECONDS)
        self._total = histogram("request_seconds", "From a request's arrival to its end.", _SECONDS)
        self._restore = histogram("prefix_restore_seconds", "Taking up a kept prefix.", _SECONDS)
        self._length = histogram("acceptance_length", "Mean tokens a verify produced, by answer.", _LENGTHS)
        engine.listeners.append(self.observe)

    def observe(self, finished: FinishedRequest) -> None:
        """Count one request."""
        model = self._model
        self._requests.labels(model, finished.outcome).inc()
        self._queued.labels(model).observe(finished.queued_s)
        self._total.labels(model).observe(finished.total_s)
        if finished.answer is None:
            return
        stats = finished.answer.stats
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._generated.labels(model).inc(stats.completion_tokens)
        self._queries.labels(model).inc(stats.prompt_tokens)
        self._hits.labels(model).inc(stats.cached_tokens)
        if stats.cache_source is not None:
            self._cached.labels(model, stats.cache_source).inc(stats.cached_tokens)
            self._restore.labels(model).observe(stats.restore_ms / 1e3)
        self._draft.labels(model).inc(stats.draft_tokens)
        self._accepted.labels(model).inc(stats.accepted_tokens)
        self._steps.labels(model).inc(stats.steps)
        self._first.labels(model).observe(finished.queued_s + (stats.restore_ms + stats.prefill_ms) / 1e3)
        if stats.completion_tokens > 1:
            self._token.labels(model).observe(stats.decode_ms / 1e3 / (stats.completion_tokens - 1))
        if stats.acceptance_length is not None:
            self._length.labels(model).observe(stats.acceptance_length)
        for index, stage in enumerate(stats.stages):
            self._forward.labels(model, str(index), stage.device).inc(stage.forward_ms / 1e3)
            self._wire.labels(model, str(index), stage.device).inc(stage.wire_ms / 1e3)

    def collect(self) -> Iterator[Metric]:
        """Return all metrics, and those that vLLM has again under its names where that was asked for."""
        for metric in self._registry.collect():
            yield metric
            alias = _ALIASES.get(metric.name.removeprefix("flashsplit_"))
            if self._vllm_names and alias is not None:
                name = f"vllm:{alias}"
                renamed = Metric(name, metric.documentation, metric.type)
                renamed.samples = [
                    sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
                ]
                yield renamed

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self)
