"""A client's ids and its trace, from both APIs to every worker: in log lines, and as OpenTelemetry's spans."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.messages.inference_types import GenerateRequest, Stopping
from services.messages.sampling import SamplingParams
from services.net.channel import connect
from services.rpc.inference import RemoteInference
from tests.e2e.conftest import Worker, until
from tests.e2e.server import PAIR, Server, serving

HTTP_TRACE, GRPC_TRACE = "0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "b7ad6b7169203331"
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


def ask_over_http(server: Server, **headers: str) -> tuple[dict[str, Any], str]:
    """A chat's answer, and the id that its header names."""
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer), answer.headers["x-request-id"]


async def ask_over_grpc(server: Server, request_id: str, traceparent: str) -> None:
    channel = await connect(server.grpc, timeout_s=5)
    try:
        client = RemoteInference(channel, server.grpc)
        ask = GenerateRequest("Once upon a time", SamplingParams(temperature=0), Stopping(12))
        async for _ in client.answer(ask, request_id, traceparent=traceparent):
            pass
    finally:
        await channel.close()


def lines(log: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The JSON lines of a log, those of one event where it is named."""
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if event in (None, line.get("event"))]


def api_lines(log: Path) -> list[dict[str, Any]]:
    return [*lines(log, "http.request"), *lines(log, "grpc.request")]


def placed(draft: Worker, *stages: Worker) -> tuple[object, ...]:
    addresses = ",".join(stage.address for stage in stages)
    return (*PAIR, "--target-devices", addresses, "--draft-device", draft.address, "--kv-cache-min-tokens", "16")


@pytest.mark.slow
def test_both_doors_ids_reach_every_log(tmp_path: Path, start_worker: Callable[..., Worker]) -> None:
    """Two stages and a draft of its own write both ids of a request over HTTP and of one over gRPC."""
    logs = [tmp_path / f"worker-{index}.log" for index in range(3)]
    stages_and_draft = [start_worker("--log-level", "debug", log=log) for log in logs]
    with serving(tmp_path, *placed(stages_and_draft[2], *stages_and_draft[:2])) as server:
        headers = {"x-request-id": "from-http", "traceparent": f"00-{HTTP_TRACE}-{SPAN}-01"}
        answer, named = ask_over_http(server, **headers)
        assert (answer["id"], named) == ("chatcmpl-from-http", "from-http")
        asyncio.run(ask_over_grpc(server, "from-grpc", f"00-{GRPC_TRACE}-{SPAN}-00"))
        # Of a client that names neither, and of one whose header is none.
        _, unnamed = ask_over_http(server)
        _, broken = ask_over_http(server, traceparent=f"00-{HTTP_TRACE.upper()}-{SPAN}-01")
        ids = ["from-http", "from-grpc", unnamed, broken]
        until(lambda: all(len(lines(log, "session.closed")) >= len(ids) for log in logs), 10)

        until(lambda: len(api_lines(server.log)) >= len(ids), 10)
        calls = {line["request_id"]: line for line in api_lines(server.log)}
        finished = {line["request_id"]: line for line in lines(server.log, "request.finished")}
    traces = {request_id: calls[request_id]["trace_id"] for request_id in ids}
    assert traces["from-http"] == HTTP_TRACE
    assert traces["from-grpc"] == GRPC_TRACE
    assert len(set(traces.values())) == len(ids)
    assert {request_id: line["trace_id"] for request_id, line in finished.items()} == traces
    for index, log in enumerate(logs):
        closed = {line["request_id"]: line for line in lines(log, "session.closed")}
        assert {request_id: line["trace_id"] for request_id, line in closed.items()} == traces
        assert all(line["steps"] > 0 and line["tokens"] > 0 and line["forward_ms"] > 0 for line in closed.values())
        assert {line["ended"] for line in closed.values()} <= ({"closed"} if index == 0 else {"closed", "cancelled"})
        assert [line.get("stage") for line in closed.values()] == [index if index < 2 else None] * len(ids)
        assert len({line.get("layers") for line in closed.values()}) == 1
        # Every line that a session wrote names it: from its beginning, on each prefix kept and taken up.
        written = [line for line in lines(log) if line["event"].startswith(("session.", "snapshot."))]
        assert {line["event"] for line in written} >= {"session.opened", "snapshot.saved", "snapshot.restored"}
        assert all(traces[line["request_id"]] == line["trace_id"] for line in written)


@pytest.mark.slow
def test_ids_of_many_answers_at_once(tmp_path: Path) -> None:
    """Each choice of each prompt has an id of its own; one id of several clients is harmless."""
    with serving(tmp_path, *PAIR, "--target-devices", "cpu") as server:
        body = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-request-id": "many"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)
        assert (said["id"], len(said["choices"])) == ("cmpl-many", 4)
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda _: ask_over_http(server, **{"x-request-id": "same"}), range(3)))
        assert {named for _, named in together} == {"same"}
        assert len({answer["choices"][0]["message"]["content"] for answer, _ in together}) == 1
        finished = lines(server.log, "request.finished")
    numbered = sorted(line["request_id"] for line in finished if line["request_id"] != "same")
    assert numbered == ["many", "many-1", "many-2", "many-3"]
    assert len({line["trace_id"] for line in finished}) == 4


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what comes over OTLP: each span with the name of the service that it is of."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: grpc.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        for sent in request.resource_spans:
            [service] = [at.value.string_value for at in sent.resource.attributes if at.key == "service.name"]
            self.spans += [(service, span) for scope in sent.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> dict[str, Any]:
        """The spans of one trace by their names."""
        return {span.name: span for _, span in self.spans if span.trace_id.hex() == trace_id}

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    made = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield made
    made.stop()


def values(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def test_spans_of_all_processes_form_one_tree(
    tmp_path: Path, start_worker: Callable[..., Worker], receiver: Receiver
) -> None:
    """Below the client's span the request's, below it its phases, the stages and the draft, with their figures."""
    one, other, draft = (start_worker(log=tmp_path / f"{name}.log") for name in ("one", "other", "draft"))
    with serving(tmp_path, *placed(draft, one, other), "--served-model-name", "demo") as server:
        ask_over_http(server, **{"x-request-id": "cold", "traceparent": f"00-{HTTP_TRACE}-{SPAN}-01"})
        ask_over_http(server, **{"x-request-id": "warm", "traceparent": f"00-{GRPC_TRACE}-{SPAN}-01"})
        # Without a client's trace the request's span is the root of one that the log names.
        ask_over_http(server, **{"x-request-id": "root"})
        [own] = [line["trace_id"] for line in lines(server.log, "request.finished") if line["request_id"] == "root"]
        # And a client that records nothing wants nothing recorded.
        ask_over_http(server, traceparent=f"00-{'ab' * 16}-{SPAN}-00")
        below = {"queue", "prefill", "decode", "stage 0", "stage 1", "draft"}
        until(lambda: all(receiver.of(trace).keys() >= {"chat demo", *below} for trace in (HTTP_TRACE, own)), 20)
        until(lambda: receiver.of(GRPC_TRACE).keys() >= {"chat demo", *below, "restore"}, 20)
        assert receiver.of("ab" * 16) == {}

    for trace_id, parent, more in ((HTTP_TRACE, SPAN, set()), (GRPC_TRACE, SPAN, {"restore"}), (own, "", {"restore"})):
        spans = receiver.of(trace_id)
        root = spans.pop("chat demo")
        assert root.parent_span_id.hex() == parent
        assert spans.keys() == below | more
        assert {span.parent_span_id for span in spans.values()} == {root.span_id}
        # Phases follow each other within the request.
        order = [spans[name] for name in ("queue", "restore", "prefill", "decode") if name in spans]
        times = [time for span in order for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
        margin_ns = 50_000_000
        assert times == sorted(times)
        assert root.start_time_unix_nano - margin_ns <= times[0] <= times[-1] <= root.end_time_unix_nano + margin_ns
    said = values(receiver.of(HTTP_TRACE)["chat demo"])
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "demo"
    assert said["gen_ai.usage.output_tokens"] == 12
    assert said["gen_ai.usage.input_tokens"] > 50
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["flashsplit.request_id"] == "cold"
    stage = values(receiver.of(HTTP_TRACE)["stage 1"])
    assert (stage["flashsplit.stage"], stage["flashsplit.device"]) == (1, "cpu")
    assert stage["flashsplit.layers"].endswith(")")
    assert stage["flashsplit.steps"] > 0
    assert stage["flashsplit.forward_ms"] > 0
    assert stage["flashsplit.queued_ms"] >= 0
    services = {span.name: service for service, span in receiver.spans}
    assert (services["chat demo"], services["stage 0"]) == ("flashsplit", "flashsplit-worker")
