"""A server outlives its workers: one that is lost is called again until it is back, and loads what it must hold."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

import coordinator.engine.engine
from coordinator.answer import Request
from coordinator.cluster.supervisor import supervised
from coordinator.engine.engine import Engine
from coordinator.text.model_files import read_model_files
from services.layers import LayerRange
from tests import forking
from tests.e2e.conftest import ROOT, Pair, children, end, until
from tests.e2e.prefix_client import TOKENS, PauseWithinPrompt, client, tokens_of
from tests.e2e.server import DEMO, PAIR, Server, get, serving
from tests.services.fakes import until as until_async

CLUSTER = """
model: {demo}/target
draft: {demo}/draft
dtype: float32
workers:
  - {{at: "unix:{here}/first.sock", layers: 0:5}}
  - {{at: "unix:{here}/second.sock", layers: 5:12}}
  - {{at: "unix:{here}/draft.sock", roles: [draft]}}
"""


def worker(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A worker of another supervisor's, say a pod: its address stays, whoever runs there."""
    socket = folder / f"{name}.sock"
    socket.unlink(missing_ok=True)
    command = [sys.executable, "-m", "shard_worker", "--listen", f"unix:{socket}", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen([*command, "--log-level", "error"], cwd=ROOT)
    until(socket.exists, 60)
    return process


def ask(server: Server) -> tuple[str, int]:
    """An answer, and how many draft tokens were accepted for it."""
    body = {"messages": [{"role": "user", "content": "Calculate 4729 + 3485."}], "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    return answer["choices"][0]["message"]["content"], accepted


def ready(server: Server) -> bool:
    return get(f"{server.url}/ready")[0] == 200


@pytest.mark.parametrize("lost", ["second", pytest.param("draft", marks=pytest.mark.slow)])
def test_workers_that_come_back(lost: str, tmp_path: Path) -> None:
    """A stage or the draft's worker is killed while nobody asks: not ready without the stage, plain decode without the
    draft, and as before with a new one."""
    names = ("first", "second", "draft")
    workers = {name: worker(tmp_path, name) for name in names}
    config = tmp_path / "cluster.yaml"
    config.write_text(CLUSTER.format(demo=DEMO, here=tmp_path))
    try:
        with serving(tmp_path, "--config", config) as server:
            before = ask(server)
            assert before[1] > 0
            workers[lost].send_signal(signal.SIGKILL)
            workers[lost].wait()
            until(lambda: f"{lost}.sock broke" in server.log.read_text(), 10)
            assert get(f"{server.url}/health")[0] == 200
            if lost == "draft":
                assert ask(server) == (before[0], 0)
            else:
                assert not ready(server)
            workers[lost] = worker(tmp_path, lost)
            until(lambda: "cluster.restored" in server.log.read_text(), 40)
            assert ready(server)
            assert ask(server) == before
    finally:
        for process in workers.values():
            end(process)


SUMS = [(4729, 3485), (17, 4), (812, 9), (5555, 4321)]


async def calculate(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event) -> tuple[str, bool]:
    """The answer to one of SUMS, and whether its timings say that the draft was lost. begun: set at its first piece."""
    first, second = SUMS[number % len(SUMS)]
    text, notes = "", []
    async with await client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": f"Calculate {first} + {second}."}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        async for chunk in chunks:
            begun.set()
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            notes += (chunk.model_extra or {}).get("timings", {}).get("notes", [])
    return text, any("the draft was lost" in note for note in notes)


def metric(server: Server, name: str) -> float:
    """The value of one of the server's metrics."""
    lines = [line for line in get(f"{server.url}/metrics")[1].splitlines() if line.startswith(f"flashsplit_{name}")]
    return float(lines[0].split()[-1])


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_answers_go_on_when_the_drafts_worker_is_killed_or_stopped(fault: signal.Signals, tmp_path: Path) -> None:
    """Under 8 requests that run and 2 that wait: all get the tokens that they get alone, some of them plainly, and the
    draft is back when its worker is."""
    options = ("--target-devices", "cpu,cpu", "--draft-device", "cpu", "--threads", 1)
    with serving(tmp_path, *PAIR, *options, "--max-concurrent-requests", 8) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            alone = [await calculate(client, number, asyncio.Event()) for number in range(len(SUMS))]
            assert not any(lost for _, lost in alone)
            drafter = next(pid for pid in children(server.process.pid) if is_drafter(pid))
            begun = [asyncio.Event() for _ in range(10)]
            asking = [asyncio.ensure_future(calculate(client, number, event)) for number, event in enumerate(begun)]
            await asyncio.wait(
                [asyncio.ensure_future(event.wait()) for event in begun], return_when=asyncio.FIRST_COMPLETED
            )
            os.kill(forking.forked(drafter), fault)
            answers = await asyncio.gather(*asking)
            assert [text for text, _ in answers] == [alone[number % len(SUMS)][0] for number in range(10)]
            assert any(lost for _, lost in answers)
            assert metric(server, "answers_without_draft_total") >= sum(lost for _, lost in answers)
            until(lambda: metric(server, "draft_ready") == 1, 60)
            assert [await calculate(client, number, asyncio.Event()) for number in range(len(SUMS))] == alone


PEOPLE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 100, "extra_body": {"ignore_eos": True}},
    {"temperature": 0.9, "seed": 7, "max_tokens": 100, "extra_body": {"ignore_eos": True, "speculate": False}},
    {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.3, "max_tokens": 90, "logprobs": True},
    {"temperature": 0.7, "seed": 3, "max_tokens": 90, "stop": ["never said"], "extra_body": {"ignore_eos": True}},
    {
        "temperature": 0.8,
        "seed": 11,
        "max_tokens": 90,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PEOPLE}},
    },
]
"""What answers that lose a worker ask for; extra_body is the SDK's."""


async def whole_answer(client: openai.AsyncOpenAI, fields: dict[str, Any], begun: asyncio.Event) -> tuple[Any, int]:
    """Text, log-probabilities and finish reason of a streamed answer, and how often it was resumed."""
    first, second = SUMS[0]
    text, logprobs, reason, resumed = "", list[Any](), None, 0
    async with await client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": f"Calculate {first} + {second}."}],
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    ) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                if choice.logprobs is not None and choice.logprobs.content:
                    logprobs += [(token.token, round(token.logprob, 4)) for token in choice.logprobs.content]
                begun.set()
            resumed += (chunk.model_extra or {}).get("timings", {}).get("resumed", 0)
    return (text, logprobs, reason), resumed


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("standby", [(), pytest.param(("--standby", "cpu"), marks=pytest.mark.slow)])
async def test_answers_outlive_their_workers(stage: int, standby: tuple[str, ...], tmp_path: Path) -> None:
    """Streams of all kinds, drafted and plain, go on with the same tokens when a worker that was killed is back, or
    another one has its place; their clients see a pause."""
    options = ("--target-devices", "cpu,cpu", "--exact", "--threads", 1, *standby)
    with serving(tmp_path, *PAIR, *options) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            until(lambda: all(one["error"] is None for one in stands_by(server)), 60)
            alone = [await whole_answer(client, fields, asyncio.Event()) for fields in MIXED]
            assert [resumed for _, resumed in alone] == [0] * len(MIXED)
            begun = [asyncio.Event() for _ in MIXED]
            asking = [
                asyncio.ensure_future(whole_answer(client, fields, event))
                for fields, event in zip(MIXED, begun, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            os.kill(forking.forked(sorted(children(server.process.pid))[stage]), signal.SIGKILL)
            answers = await asyncio.gather(*asking)
    assert ("cluster.replaced" in server.log.read_text()) == bool(standby)
    assert [answer for answer, _ in answers] == [answer for answer, _ in alone]
    assert sum(resumed for _, resumed in answers) >= 2
    taken_up = re.findall(r'"held": \[(\d+), (\d+)\]', server.log.read_text())
    # The other stage has computed nothing anew for any of them, but for a draft beside the last one.
    plain = answers[1][1]
    assert len(taken_up) == (plain if stage == 0 else sum(resumed for _, resumed in answers))


def readiness(server: Server) -> dict[str, Any]:
    return dict(json.loads(get(f"{server.url}/ready")[1]))


def status(server: Server) -> dict[str, Any]:
    return dict(json.loads(get(f"{server.url}/v1/status")[1]))


def layers(server: Server) -> list[tuple[int, int]]:
    """The layers of each stage, as the server's status has them."""
    return [(worker["layers"]["first"], worker["layers"]["last"]) for worker in status(server)["workers"]]


def cached_tokens(answer: Any) -> int:
    """Tokens of an answer's prompt that were taken from a kept prefix."""
    return int(answer.usage.prompt_tokens_details.cached_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "anew"), [(1, [(0, 6), (6, 12)]), pytest.param(2, [(0, 6), (6, 12)], marks=pytest.mark.slow)]
)
async def test_answers_go_on_over_the_workers_that_are_left(
    lost: int, anew: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The layers of a worker that does not come back are split anew over the two others: answers that had begun and new
    ones have the same tokens there; when it is back, each has its own layers again."""
    workers = [worker(tmp_path, str(number)) for number in range(3)]
    addresses = ",".join(f"unix:{tmp_path}/{number}.sock" for number in range(3))
    options = ("--target-devices", addresses, "--exact", "--replace-after", 0)
    try:
        with serving(tmp_path, *PAIR, *options) as server:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
            ) as client:
                assert readiness(server)["degraded"] is None
                alone = [await whole_answer(client, fields, asyncio.Event()) for fields in MIXED[:3]]
                begun = [asyncio.Event() for _ in alone]
                asking = [
                    asyncio.ensure_future(whole_answer(client, fields, event))
                    for fields, event in zip(MIXED, begun, strict=False)
                ]
                await asyncio.gather(*(event.wait() for event in begun))
                os.kill(forking.forked(workers[lost].pid), signal.SIGKILL)
                workers[lost].wait()
                answers = await asyncio.gather(*asking)
                assert [answer for answer, _ in answers] == [answer for answer, _ in alone]
                assert sum(resumed for _, resumed in answers) >= 1
                assert "2 of 3 workers" in readiness(server)["degraded"]
                assert ready(server)
                assert layers(server) == anew
                assert await whole_answer(client, MIXED[0], asyncio.Event()) == alone[0]
                story = {"model": "target", "prompt": "A long story. " * 40, "max_tokens": 8}
                told = await client.completions.create(**story)
                workers[lost] = worker(tmp_path, str(lost))
                # Workers are asked at most every half second, but what is said of them agrees with what is said of all.
                until(lambda: status(server)["degraded"] is None, 60)
                assert layers(server) == [(0, 4), (4, 8), (8, 12)]
                assert await whole_answer(client, MIXED[0], asyncio.Event()) == alone[0]
                # What the two had in memory of it is now with the three.
                again = await client.completions.create(**story)
                assert again.choices[0].text == told.choices[0].text
                assert cached_tokens(again) > 100 > cached_tokens(told)
    finally:
        for process in workers:
            end(process)


@pytest.mark.slow
async def test_layers_go_back_in_the_midst_of_answers(
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a server is never idle: its answers wait while each worker gets its own layers back, and go on from where
    they were, with the same tokens and none computed twice. One is in the midst of its prompt."""
    monkeypatch.setattr(coordinator.engine.engine, "IDLE_S", 0.0)
    pair, (prompt, greedy) = pairs["qwen3"], prefix_cases["qwen3"]
    longer = prompt[::-1] * 4
    workers = [worker(tmp_path, str(number)) for number in range(2)]
    try:
        async with client(pair, ",".join(f"unix:{tmp_path}/{number}.sock" for number in range(2))) as one:
            behind = await one.ask(longer, cached=False)
            cluster = one.cluster
            engine = Engine(cluster, read_model_files(pair.target), one.cache, name="tiny", resume_timeout_s=60)
            async with supervised(cluster, replace_after_s=0.0, quiet=engine.quiet):
                workers[1].kill()
                workers[1].wait()
                await until_async(lambda: cluster.degraded is not None, 30)
                longest = Request("longer", longer, TOKENS, prefill_chunk=4)
                within = PauseWithinPrompt.of(engine, longest, monkeypatch)
                greedily = Request("greedy", prompt, TOKENS)
                asked = asyncio.create_task(tokens_of(engine, greedily, waits_for=within.prefilled))
                await until_async(lambda: engine.load.running == 1, 30)
                workers[1] = await asyncio.to_thread(worker, tmp_path, "1")
                await until_async(lambda: cluster.degraded is None, 30)
                assert [place.layers for place in cluster.snapshot_places(with_draft=False)] == [
                    LayerRange(0, 3), LayerRange(3, 6),
                ]  # fmt: skip
                assert await asked == greedy
                assert await within.asked.pop() == behind.token_ids
                assert within.kept == {"greedy": len(prompt) + TOKENS - 1, "longer": len(longer) + TOKENS - 1}
    finally:
        for process in workers:
            end(process)


@pytest.mark.slow
async def test_a_worker_that_is_told_to_stop_hands_over(tmp_path: Path) -> None:
    """SIGTERM while it answers, where another one stands by: the answers go on there as if nothing had been, and it
    ends by itself."""
    workers = [worker(tmp_path, str(number)) for number in range(3)]
    first, second, third = (f"unix:{tmp_path}/{number}.sock" for number in range(3))
    options = ("--target-devices", f"{first},{second}", "--standby", third, "--exact")
    try:
        with serving(tmp_path, *PAIR, *options) as server:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
            ) as client:
                until(lambda: all(one["error"] is None for one in stands_by(server)), 60)
                longer: list[dict[str, Any]] = [{**fields, "max_tokens": 300} for fields in MIXED[:2]]
                alone = [await whole_answer(client, fields, asyncio.Event()) for fields in longer]
                begun = [asyncio.Event() for _ in alone]
                asking = [
                    asyncio.ensure_future(whole_answer(client, fields, event))
                    for fields, event in zip(longer, begun, strict=True)
                ]
                await asyncio.gather(*(event.wait() for event in begun))
                workers[1].terminate()
                assert await asyncio.gather(*asking) == alone
                until(lambda: workers[1].poll() is not None, 30)
                assert "worker.drained" in server.log.read_text()
                assert await whole_answer(client, MIXED[0], asyncio.Event())
    finally:
        for process in workers:
            end(process)


def stands_by(server: Server) -> list[dict[str, Any]]:
    """The workers that stand by, as the server's status has them."""
    return list(json.loads(get(f"{server.url}/v1/status")[1])["standbys"])


def is_drafter(pid: int) -> bool:
    """Whether a process is the draft's own worker."""
    return b"--roles\0draft\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
