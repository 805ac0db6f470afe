"""Prometheus metrics of the server, if asked for also under vLLM's names, which dashboards and schedulers know."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.engine.engine import Engine, FinishedRequest
from coordinator.engine.step_times import StepTaken
from coordinator.status.board import Board
from coordinator.status.worker_poll import PolledWorker
from services.messages.description import BATCH_ROW_BOUNDS
from services.messages.steps import StepKind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LENGTHS = tuple(float(length) for length in range(1, 17))
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # Without prefix and _total: what it counts, and its labels beside the model's name.
    "requests": ("Requests by how they ended.", ("outcome",)),
    "prompt_tokens": ("Tokens of prompts.", ()),
    "generation_tokens": ("Tokens of answers.", ()),
    "cached_tokens": ("Prompt tokens not computed, by where they were kept.", ("source",)),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", ()),
    "prefix_cache_hits": ("Prompt tokens found there.", ()),
    "draft_tokens": ("Draft tokens that were verified.", ()),
    "accepted_tokens": ("Draft tokens that were accepted.", ()),
    "lookup_tokens": ("Of the draft tokens verified, those looked up in the text.", ()),
    "accepted_lookup_tokens": ("Of the draft tokens accepted, those looked up in the text.", ()),
    "draft_tokens_by_place": (
        "Draft tokens that were verified, by the kind of draft (model, ngram) and their place in the block.",
        ("draft", "place"),
    ),
    "accepted_tokens_by_place": ("Of those, the accepted ones.", ("draft", "place")),
    "answers_without_draft": ("Answers that were plain, all or in part: the draft was lost.", ()),
    "answers_resumed": ("Times that answers went on behind lost workers, or behind having been set aside.", ()),
    "decode_steps": ("Steps through all stages after the first token.", ()),
    "stage_forward_seconds": ("Decode time that a stage computed.", ("stage", "device")),
    "stage_wire_seconds": ("Decode time between a stage and the one above.", ("stage", "device")),
}
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of a request's answer.", _TOKENS),
    "queue_seconds": ("From a request's arrival to its turn.", _SECONDS),
    "inference_seconds": ("From a request's turn to its end.", _SECONDS),
    "prefill_seconds": ("From a request's turn to its first token.", _SECONDS),
    "decode_seconds": ("From an answer's first token to its last.", _SECONDS),
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("From a token to the next; tokens of one step share its time.", _TOKEN_SECONDS),
    "time_per_output_token_seconds": ("Mean over an answer's tokens.", _TOKEN_SECONDS),
    "request_seconds": ("From a request's arrival to its end.", _SECONDS),
    "prefix_restore_seconds": ("Taking up a kept prefix.", _SECONDS),
    "acceptance_length": ("Mean tokens a verify produced, by answer.", _LENGTHS),
}

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
    "batch_rows": "iteration_tokens_total",
    "preemptions": "num_preemptions",
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
        self._registry = registry = CollectorRegistry()
        self._vllm_names, self._model, self._board = vllm_names, engine.name, board
        self._counters = {
            name: Counter(f"flashsplit_{name}", text, ("model_name", *labels), registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"flashsplit_{name}", text, ("model_name",), registry=registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._replies = Counter(
            "flashsplit_http_requests",
            "HTTP requests by what they were answered, those that were refused at the door among them.",
            ("method", "path", "status"),
            registry=registry,
        )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"flashsplit_{name}", text, ("model_name",), registry=registry).labels(engine.name)

        gauge("requests_running", "Requests that run.").set_function(lambda: engine.load.running)
        gauge("requests_set_aside", "Running requests that wait for the workers' memory.").set_function(
            lambda: engine.load.set_aside
        )
        gauge("requests_waiting", "Requests that wait.").set_function(lambda: engine.load.waiting)
        self._engine = engine
        self._workers: Sequence[PolledWorker] = ()
        """As they described themselves last."""
        gauge(
            "kv_cache_usage_ratio", "Of the memory free for caches of open sessions, what they take; fullest worker."
        ).set_function(lambda: round(max((worker.cache_usage for worker in self._workers), default=0.0), 6))
        ready = Gauge("flashsplit_ready", "1 when a request would be taken.", registry=registry)
        ready.set_function(lambda: engine.ready)
        text = "1 while lost workers' layers are split over the others."
        degraded = Gauge("flashsplit_degraded", text, registry=registry)
        degraded.set_function(lambda: engine.cluster.degraded is not None)
        if engine.cluster.draft_worker is not None:
            text = "1 when answers have the draft, 0 while its worker is lost."
            draft_ready = Gauge("flashsplit_draft_ready", text, registry=registry)
            draft_ready.set_function(lambda: engine.cluster.draft is not None)
        engine.listeners.append(self.observe)
        engine.step_listeners.append(self._step)

    def count_reply(self, method: str, path: str, status: int) -> None:
        """Count one HTTP request. path: that of a route, not what a client made up."""
        self._replies.labels(method if method in _METHODS else "other", path, str(status)).inc()

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._model, *labels).inc(amount)

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        histogram = self._histograms[name].labels(self._model)
        for _ in range(times):
            histogram.observe(value)

    def _step(self, step: StepTaken) -> None:
        if step.kind is not StepKind.PREFILL and step.kept:
            self._observe("inter_token_latency_seconds", step.elapsed_ns / 1e9 / step.kept, step.kept)
        if step.kind is StepKind.VERIFY:
            draft = "ngram" if step.looked_up else "model"
            for place in range(1, step.rows):
                self._add("draft_tokens_by_place", 1, draft, str(place))
                self._add("accepted_tokens_by_place", int(place < step.kept), draft, str(place))

    def observe(self, finished: FinishedRequest) -> None:
        """Count one request."""
        self._add("requests", 1, finished.outcome)
        self._observe("queue_seconds", finished.queued_s)
        self._observe("request_seconds", finished.total_s)
        if finished.answer is None:
            return
        stats = finished.answer.stats
        prefill_s, decode_s = (stats.restore_ms + stats.prefill_ms) / 1e3, stats.decode_ms / 1e3
        self._add("prompt_tokens", stats.prompt_tokens)
        self._add("generation_tokens", stats.completion_tokens)
        self._add("prefix_cache_queries", stats.prompt_tokens)
        self._add("prefix_cache_hits", stats.cached_tokens)
        self._add("draft_tokens", stats.draft_tokens)
        self._add("accepted_tokens", stats.accepted_tokens)
        self._add("lookup_tokens", stats.lookup_tokens)
        self._add("accepted_lookup_tokens", stats.accepted_lookup_tokens)
        self._add("answers_without_draft", stats.draft_lost)
        self._add("answers_resumed", stats.resumed)
        self._add("decode_steps", stats.steps)
        self._observe("request_prompt_tokens", stats.prompt_tokens)
        self._observe("request_generation_tokens", stats.completion_tokens)
        self._observe("inference_seconds", finished.total_s - finished.queued_s)
        self._observe("prefill_seconds", prefill_s)
        self._observe("decode_seconds", decode_s)
        self._observe("time_to_first_token_seconds", finished.queued_s + prefill_s)
        if stats.cache_source is not None:
            self._add("cached_tokens", stats.cached_tokens, stats.cache_source)
            self._observe("prefix_restore_seconds", stats.restore_ms / 1e3)
        if stats.completion_tokens > 1:
            self._observe("time_per_output_token_seconds", decode_s / (stats.completion_tokens - 1))
        if stats.acceptance_length is not None:
            self._observe("acceptance_length", stats.acceptance_length)
        for index, stage in enumerate(stats.stages):
            self._add("stage_forward_seconds", stage.forward_ms / 1e3, str(index), stage.device)
            self._add("stage_wire_seconds", stage.wire_ms / 1e3, str(index), stage.device)

    def collect(self) -> Iterator[Metric]:
        """Return all metrics, and those that vLLM has again under its names where that was asked for."""
        for metric in (*self._registry.collect(), *self._of_workers(), self._preemptions()):
            yield metric
            if self._vllm_names:
                yield from self._as_vllm(metric)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, as soon as the workers have said what their caches take."""
        self._workers = await self._board.workers()
        return generate_latest(self)

    def _of_workers(self) -> Iterator[Metric]:
        """Yield what the workers count themselves: the rows of steps, and the memory of pages."""
        labels = ("model_name", "stage")
        rows = HistogramMetricFamily(
            "flashsplit_batch_rows", "Rows of a step that a stage computed, of all sessions in it.", labels=labels
        )
        sessions = CounterMetricFamily(
            "flashsplit_batch_sessions", "Sessions in the steps that a stage computed.", labels=labels
        )
        pool = GaugeMetricFamily(
            "flashsplit_kv_pool_bytes", "The most that pages of keys and values may take.", labels=labels
        )
        used = GaugeMetricFamily(
            "flashsplit_kv_pool_used_bytes", "What pages of sessions and of kept prefixes take of it.", labels=labels
        )
        for worker in self._workers:
            values, counts = (self._model, str(worker.stage)), worker.description.batches
            if worker.stage is None:
                continue
            pool.add_metric(values, sum(device.pool_bytes for device in worker.description.devices))
            used.add_metric(values, sum(device.pool_used_bytes for device in worker.description.devices))
            if counts is not None:
                bounds = [*(f"{float(bound)}" for bound in BATCH_ROW_BOUNDS), "+Inf"]
                buckets = [*zip(bounds, map(float, accumulate(counts.steps_by_rows)), strict=True)]
                rows.add_metric(values, buckets, counts.rows)
                sessions.add_metric(values, counts.sessions)
        yield from (rows, sessions, pool, used)

    def _preemptions(self) -> Metric:
        counter = CounterMetricFamily(
            "flashsplit_preemptions", "Times that requests were set aside for lack of memory.", labels=("model_name",)
        )
        counter.add_metric((self._model,), self._engine.preemptions)
        return counter

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
                    name=name + sample.name.removeprefix(metric.name),
                    labels={**{key: value for key, value in sample.labels.items() if key != "stage"}, "engine": "0"},
                )
                # All stages compute the same batches.
                for sample in metric.samples
                if sample.labels.get("stage", "0") == "0"
            ]
            yield alias
