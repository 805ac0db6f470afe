"""/metrics over a scripted engine: requests that were refused at the door, gaps between tokens, vLLM's names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.http.metrics import Metrics
from coordinator.engine.engine import Engine
from coordinator.status.board import Board
from coordinator.status.figures import Figures
from coordinator.status.worker_poll import PolledWorker
from services.errors import InvalidArgument
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import Script, engine, says
from tests.services.fakes import WORKER, until

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}
KEY = {"x-api-key": "secret"}


async def replies(client: Client) -> dict[tuple[str, str, str], float]:
    """How many requests were answered, by method, path and status."""
    text = (await client.http.get("/metrics", headers=KEY)).text
    return {
        (sample.labels["method"], sample.labels["path"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "flashsplit_http_requests_total"
    }


async def test_requests_that_are_refused_at_the_door_count(connect: Connect) -> None:
    """Whatever the reason: by method, path and status. A path that a client made up is none."""
    release = asyncio.Event()
    served = engine(Script(hold=release), max_running=1, max_waiting=0)
    client = await connect(served, "secret")
    http = client.http
    running = asyncio.ensure_future(client.post(CHAT, HI, **KEY))
    await until(lambda: served.load.running == 1)
    refused = {
        ("POST", CHAT, "400"): [
            await http.post(CHAT, content=b"{", headers={**JSON, **KEY}),
            await http.post(CHAT, json={**HI, "temperature": "hot"}, headers=KEY),
            await http.post(CHAT, json={**HI, "max_tokens": 1 << 20}, headers=KEY),
        ],
        ("POST", CHAT, "401"): [await http.post(CHAT, json=HI)],
        ("POST", CHAT, "404"): [await http.post(CHAT, json={**HI, "model": "other"}, headers=KEY)],
        ("POST", CHAT, "413"): [
            await http.post(CHAT, content=b"", headers={**JSON, **KEY, "content-length": str(1 << 40)})
        ],
        ("POST", CHAT, "429"): [await http.post(CHAT, json=HI, headers=KEY)],
        ("GET", CHAT, "405"): [await http.get(CHAT, headers=KEY)],
        ("GET", "/v1/models/{name:path}", "404"): [await http.get("/v1/models/other", headers=KEY)],
        ("GET", "other", "404"): [await http.get(f"/{path}", headers=KEY) for path in ("a", "b/c")],
        ("other", CHAT, "405"): [await http.request("BREW", CHAT, headers=KEY)],
    }
    release.set()
    await running

    counted = await replies(client)
    for (method, path, status), answers in refused.items():
        assert {str(reply.status_code) for reply in answers} == {status}, (path, status)
        assert counted.pop((method, path, status)) == len(answers), (method, path, status)
    assert counted == {("POST", CHAT, "200"): 1}


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by a sample's name and labels."""


async def numbers(served: Engine, *, vllm: bool = True, ask: Any = None) -> Samples:
    """The values of all samples, by name and labels but for the model's name, after a chat was asked."""
    async with Board(served) as board:
        metrics = Metrics(served, board, vllm_names=vllm)
        if ask is not None:
            await ask()
        text = (await metrics.text()).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name", "demo") == "demo"
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


@pytest.mark.parametrize("block_size", [0, 4])
async def test_every_gap_between_tokens_counts(block_size: int, connect: Connect) -> None:
    """One observation for each token behind the first, also where a step brings several."""
    served = engine(Script(says("forty-two")), block_size=block_size)
    client = await connect(served)

    async def ask() -> None:
        assert (await client.post(CHAT, HI))[0] == 200

    found = await numbers(served, ask=ask)
    tokens = found["flashsplit_generation_tokens_total", frozenset()]
    assert tokens == len("forty-two") + 1
    assert found["flashsplit_inter_token_latency_seconds_count", frozenset()] >= tokens - 1
    assert found["flashsplit_time_per_output_token_seconds_count", frozenset()] == 1


@pytest.mark.parametrize(("kind", "block_size", "lookup"), [("model", 4, False), ("ngram", 0, True)])
async def test_draft_tokens_are_counted_by_kind_and_place(
    connect: Connect, kind: str, block_size: int, lookup: bool
) -> None:
    """Each place of all blocks, of which the accepted ones are the first; together as many as an answer's figures say.
    Blocks that are looked up are longer than those of no draft model, which the status counts too."""
    served = engine(Script(says("again and " * 20)), block_size=block_size, prompt_lookup=lookup)
    Figures(served)
    client = await connect(served)

    told: dict[str, Any] = {}

    async def ask() -> None:
        status, reply = await client.post(CHAT, HI | {"max_tokens": 150})
        assert status == 200
        told.update(reply["timings"])

    found = await numbers(served, ask=ask)
    steps = {name: sum(told[name].values()) for name in ("draft_steps", "lookup_steps")}
    assert {name for name, count in steps.items() if count} == {"draft_steps" if kind == "model" else "lookup_steps"}
    assert sum(steps.values()) + told["plain_steps"] == told["steps"]
    verified = [int(count) * taken for name in steps for count, taken in told[name].items()]
    assert sum(verified) == told["draft_n"]
    offered, accepted = (
        {int(dict(labels)["place"]): value for (name, labels), value in found.items() if name == wanted}
        for wanted in ("flashsplit_draft_tokens_by_place_total", "flashsplit_accepted_tokens_by_place_total")
    )
    kinds = {dict(labels)["draft"] for name, labels in found if name.endswith("_by_place_total")}
    assert kinds == {kind}
    assert sum(offered.values()) == found["flashsplit_draft_tokens_total", frozenset()] > 0
    assert sum(accepted.values()) >= found["flashsplit_accepted_tokens_total", frozenset()] > 0
    assert all(offered[place] >= accepted[place] for place in offered)
    assert [*accepted.values()] == sorted(accepted.values(), reverse=True)


async def test_what_a_client_did_wrong_is_no_failure_of_the_server(connect: Connect) -> None:
    """A grammar that a worker refuses counts as refused input, which alerts leave out, and not as vLLM's errors."""
    served = engine(Script(open_error=InvalidArgument("no such rule", reason="GRAMMAR")))
    client = await connect(served)

    async def ask() -> None:
        assert (await client.post(CHAT, HI))[0] == 400

    found = await numbers(served, ask=ask)
    assert found["flashsplit_requests_total", frozenset({("outcome", "invalid_argument")})] == 1
    assert not [labels for (name, labels), value in found.items() if name == "vllm:request_success_total" and value > 0]


async def test_the_names_of_vllm(connect: Connect) -> None:
    """What its dashboards and the schedulers made for it ask for, with its labels; without the flag none of it."""
    served = engine(Script(says("hello")))
    client = await connect(served)

    async def ask() -> None:
        await client.post(CHAT, HI)
        await client.post(CHAT, {**HI, "max_tokens": 2})

    assert not [name for name, _ in await numbers(served, vllm=False) if name.startswith("vllm:")]
    found = {
        (name, labels - {("engine", "0")}): value
        for (name, labels), value in (await numbers(served, ask=ask)).items()
        if name.startswith("vllm:") and ("engine", "0") in labels
    }
    ended = {
        reason: found["vllm:request_success_total", frozenset({("finished_reason", reason)})]
        for reason in ("stop", "length", "abort")
    }
    assert ended == {"stop": 1, "length": 1, "abort": 0}
    plain = {name: value for (name, labels), value in found.items() if not labels}
    assert plain["vllm:generation_tokens_total"] == len("hello") + 1 + 2
    assert plain["vllm:prompt_tokens_total"] == plain["vllm:request_prompt_tokens_sum"]
    assert plain["vllm:num_requests_running"] == plain["vllm:num_requests_waiting"] == 0
    assert 0 <= plain["vllm:kv_cache_usage_perc"] <= 1
    for name in (
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ):
        assert plain[f"vllm:{name}_count"] == 2, name
    assert plain["vllm:inter_token_latency_seconds_count"] >= len("hello") + 1


async def test_what_workers_count_of_their_steps_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A histogram of each stage's rows and the memory of its pages; vLLM's own has the batches once."""

    async def workers(board: Board) -> list[PolledWorker]:
        return [
            *(PolledWorker(f"stage {n}", f"h:{n}", WORKER, stage=n) for n in (0, 1)),
            PolledWorker("draft", "h:2", WORKER),
        ]

    monkeypatch.setattr(Board, "workers", workers)
    found = await numbers(engine(Script()))
    for stage in ("0", "1"):
        own = frozenset({("stage", stage)})
        rows = {
            dict(labels).get("le"): value
            for (name, labels), value in found.items()
            if name == "flashsplit_batch_rows_bucket" and own <= labels
        }
        assert (rows["1.0"], rows["2.0"], rows["4.0"], rows["512.0"], rows["+Inf"]) == (1, 1, 3, 4, 5)
        assert (found["flashsplit_batch_rows_sum", own], found["flashsplit_batch_rows_count", own]) == (40, 5)
        assert found["flashsplit_batch_sessions_total", own] == 9
        assert (found["flashsplit_kv_pool_bytes", own], found["flashsplit_kv_pool_used_bytes", own]) == (
            60 << 30,
            5 << 30,
        )
    assert not [labels for name, labels in found if ("stage", "None") in labels]
    vllm = [value for (name, _), value in found.items() if name == "vllm:iteration_tokens_total_sum"]
    assert vllm == [40]
    assert found["vllm:num_preemptions_total", frozenset({("engine", "0")})] == 0
