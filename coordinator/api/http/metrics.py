"""Prometheus metrics of the server, if asked for also under vLLM's names, which dashboards and schedulers know."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from coordinator.engine.engine import Engine, FinishedRequest
from coordinator.engine.step_times import StepTaken
from coordinator.status.board import Board
from services.messages.steps import StepKind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LENGTHS = tuple(float(length) for length in range(1, 17))
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

# Ours, without prefix and _total -> vLLM's.
_ALIASES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "decode_seconds": "request_decode_time_seconds",
    "inference_seconds": "request_inference_time_seconds",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
}
_REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "cancelled": "abort", "request_aborted": "abort"}
"""vLLM's reasons for which requests end, by our outcomes."""

_NEVER_STARTED = frozenset(("refused", "queue_full", "draining", "invalid_argument"))
"""Outcomes of requests that vLLM would not count as finished; all others are errors to it."""


class Metrics:
    """The metrics of one engine, which grow with its steps and with every request that it finishes.

    board: says how full the workers' memory is.
    """

    def __init__(self, engine: Engine, board: Board, *, vllm_names: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._vllm_names, self._model, self._board = vllm_names, engine.name, board

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flashsplit_{name}", text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"flashsplit_{name}", text, ("model_name",), registry=self._registry, buckets=buckets)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"flashsplit_{name}", text, ("model_name",), registry=self._registry)

        running = gauge("requests_running", "Requests that run.")
        waiting = gauge("requests_waiting", "Requests that wait.")
        ready = Gauge("flashsplit_ready", "1 when a request would be taken.", registry=self._registry)
        running.labels(engine.name).set_function(lambda: engine.load.running)
        waiting.labels(engine.name).set_function(lambda: engine.load.waiting)
        ready.set_function(lambda: engine.ready)
        if engine.cluster.draft_worker is not None:
            text = "1 when answers have the draft, 0 while its worker is lost."
            draft_ready = Gauge("flashsplit_draft_ready", text, registry=self._registry)
            draft_ready.set_function(lambda: engine.cluster.draft is not None)
        self._cache_usage = gauge(
            "kv_cache_usage_ratio", "Of the memory free for caches of open sessions, what they take; fullest worker."
        )
        self._replies = Counter(
            "flashsplit_http_requests",
            "HTTP requests by what they were answered, those that were refused at the door among them.",
            ("method", "path", "status"),
            registry=self._registry,
        )
        self._requests = counter("requests", "Requests by how they ended.", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._cached = counter("cached_tokens", "Prompt tokens not computed, by where they were kept.", "source")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found there.")
        self._draft = counter("draft_tokens", "Tokens that the draft proposed.")
        self._accepted = counter("accepted_tokens", "Draft tokens that were accepted.")
        self._draft_lost = counter(
            "answers_without_draft", "Answers that were plain, all or in part: the draft was lost."
        )
        self._steps = counter("decode_steps", "Steps through all stages after the first token.")
        self._forward = counter("stage_forward_seconds", "Decode time that a stage computed.", "stage", "device")
        self._wire = counter("stage_wire_seconds", "Decode time between a stage and the one above.", "stage", "device")
        self._prompt_length = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self._answer_length = histogram("request_generation_tokens", "Tokens of a request's answer.", _TOKENS)
        self._queued = histogram("queue_seconds", "From a request's arrival to its turn.", _SECONDS)
        self._inference = histogram("inference_seconds", "From a request's turn to its end.", _SECONDS)
        self._prefill = histogram("prefill_seconds", "From a request's turn to its first token.", _SECONDS)
        self._decode = histogram("decode_seconds", "From an answer's first token to its last.", _SECONDS)
        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS)
        self._gap = histogram(
            "inter_token_latency_seconds",
            "From a token to the next; tokens of one step share its time.",
            _TOKEN_SECONDS,
        ).labels(engine.name)
        self._token = histogram("time_per_output_token_seconds", "Mean over an answer's tokens.", _TOKEN_SECONDS)
        self._total = histogram("request_seconds", "From a request's arrival to its end.", _SECONDS)
        self._restore = histogram("prefix_restore_seconds", "Taking up a kept prefix.", _SECONDS)
        self._length = histogram("acceptance_length", "Mean tokens a verify produced, by answer.", _LENGTHS)
        engine.listeners.append(self.observe)
        engine.step_listeners.append(self._step)

    def count_reply(self, method: str, path: str, status: int) -> None:
        """Count one HTTP request. path: that of a route, not what a client made up."""
        self._replies.labels(method if method in _METHODS else "other", path, str(status)).inc()

    def _step(self, step: StepTaken) -> None:
        if step.kind is not StepKind.PREFILL:
            for _ in range(step.kept):
                self._gap.observe(step.elapsed_ns / 1e9 / step.kept)

    def observe(self, finished: FinishedRequest) -> None:
        """Count one request."""
        model = self._model
        self._requests.labels(model, finished.outcome).inc()
        self._queued.labels(model).observe(finished.queued_s)
        self._total.labels(model).observe(finished.total_s)
        if finished.answer is None:
            return
        stats = finished.answer.stats
        before_first_s = (stats.restore_ms + stats.prefill_ms) / 1e3
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._generated.labels(model).inc(stats.completion_tokens)
        self._prompt_length.labels(model).observe(stats.prompt_tokens)
        self._answer_length.labels(model).observe(stats.completion_tokens)
        self._queries.labels(model).inc(stats.prompt_tokens)
        self._hits.labels(model).inc(stats.cached_tokens)
        if stats.cache_source is not None:
            self._cached.labels(model, stats.cache_source).inc(stats.cached_tokens)
            self._restore.labels(model).observe(stats.restore_ms / 1e3)
        self._draft.labels(model).inc(stats.draft_tokens)
        self._accepted.labels(model).inc(stats.accepted_tokens)
        self._draft_lost.labels(model).inc(stats.draft_lost)
        self._steps.labels(model).inc(stats.steps)
        self._inference.labels(model).observe(finished.total_s - finished.queued_s)
        self._prefill.labels(model).observe(before_first_s)
        self._decode.labels(model).observe(stats.decode_ms / 1e3)
        self._first.labels(model).observe(finished.queued_s + before_first_s)
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
            if self._vllm_names:
                yield from self._as_vllm(metric)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, as soon as the workers have said what their caches take."""
        self._cache_usage.labels(self._model).set(await self._board.cache_usage())
        return generate_latest(self)

    def _as_vllm(self, metric: Metric) -> Iterator[Metric]:
        """Return what vLLM knows as its own of one of these metrics. Its label `engine` counts replicas: here one."""
        own = metric.name.removeprefix("flashsplit_")
        if own == "requests":
            ended = Counts(_REASONS.values())
            ended.subtract(ended)
            for sample in metric.samples:
                outcome = sample.labels["outcome"]
                if sample.name.endswith("_total") and outcome not in _NEVER_STARTED:
                    ended[_REASONS.get(outcome, "error")] += int(sample.value)
            renamed = CounterMetricFamily(
                "vllm:request_success", metric.documentation, labels=("model_name", "engine", "finished_reason")
            )
            for reason, count in ended.items():
                renamed.add_metric((self._model, "0", reason), count)
            yield renamed
        elif own in _ALIASES:
            name = f"vllm:{_ALIASES[own]}"
            alias = Metric(name, metric.documentation, metric.type)
            alias.samples = [
                sample._replace(
                    name=name + sample.name.removeprefix(metric.name), labels={**sample.labels, "engine": "0"}
                )
                for sample in metric.samples
            ]
            yield alias
