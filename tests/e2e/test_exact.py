"""`--exact`: plain and speculated answers are the same to the bit in bfloat16 on the CPU, through real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from services.messages.sampling import SamplingParams
from tests.e2e.conftest import Pair, Worker, flashsplit
from tests.e2e.exact_runs import DEMO, GREEDY, SEEDED, answers, prompts, same


async def told(pair: Pair, devices: str, sampling: SamplingParams) -> list[Answer]:
    """A plain and a speculated answer, with the log-probability of every token."""
    plan = make_plan(
        target_devices=devices, layer_split=None, draft_device=None, num_layers=pair.layers, has_draft=True
    )
    found = []
    async with Cluster(plan, Checkpoints(pair.target, pair.draft, "bfloat16"), exact=True) as cluster:
        for speculate in (False, True):
            request = Request("r", (5, 6, 7, 8, 9), 60, sampling, speculate=speculate, logprobs=2)
            found.append(await generate(cluster, request, None))
    return found


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
def test_log_probabilities_are_the_same_to_the_bit(
    family: str, pairs: dict[str, Pair], start_worker: Callable[..., Worker]
) -> None:
    """Over one worker and over two, drawn by a seed with penalties."""
    one, two = (start_worker().address for _ in range(2))
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=3, repetition_penalty=1.2, frequency_penalty=0.1)
    runs = []
    for devices in (one, f"{one},{two}"):
        runs += asyncio.run(told(pairs[family], devices, sampling))

    assert runs[1].stats.draft_tokens > 0
    assert len(runs[0].token_ids) == 60
    assert runs[0].logprobs is not None
    for other in runs[1:]:
        assert (other.token_ids, other.logprobs) == (runs[0].token_ids, runs[0].logprobs)


@pytest.mark.slow
def test_the_option_holds_beside_kept_prefixes() -> None:
    """`generate --exact` with one prompt twice and one that begins alike: plain as speculated, and the second answer,
    from the prompt's kept state, as the first."""
    asked = ["--chat", "--prompt", "What is 17 * 4?", "--prompt", "What is 17 * 4?", "--prompt", "What is 17 * 9?"]
    rules = "You are a calculator. " * 12
    options = ["--model", DEMO / "target", "--draft", DEMO / "draft", "--exact", "--json"]
    sampling = ["--temperature", 1.5, "--seed", 3, "--max-tokens", 60, "--target-devices", "cpu", "--threads", 1]
    runs: list[list[dict[str, Any]]] = []
    for more in ([], ["--no-speculation"]):
        process = flashsplit("generate", *options, *asked, "--system", rules, *sampling, *more)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        runs.append([json.loads(line) for line in out.splitlines()])

    dflash, plain = runs
    assert [one["token_ids"] for one in plain] == [one["token_ids"] for one in dflash]
    for first, second, _ in runs:
        assert second["token_ids"] == first["token_ids"]
        assert second["stats"]["cached_tokens"] == second["stats"]["prompt_tokens"]
    assert dflash[0]["stats"]["draft_tokens"] > 0
    assert plain[0]["stats"]["draft_tokens"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_twenty_prompts_of_the_demo_pair(sampling: SamplingParams) -> None:
    """20 prompts of 200 tokens each in bfloat16, plain and speculated, over one worker and over two: one answer."""
    asked = prompts(12, 8)

    runs = [
        asyncio.run(answers(asked, devices, 200, speculate=speculate, exact=True, sampling=sampling))
        for devices in ("cpu", "cpu,cpu")
        for speculate in (False, True)
    ]

    assert all(len(answer.token_ids) == 200 for answer in runs[0])
    assert [same(runs[0], run) for run in runs[1:]] == [20, 20, 20]
