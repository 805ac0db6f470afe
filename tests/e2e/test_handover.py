"""A worker is drained while it answers: another one goes on with its answers, whose tokens are computed once."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.answer import Request
from coordinator.engine.engine import Engine
from coordinator.engine.handover import Handover
from coordinator.text.model_files import read_model_files
from services.messages.sampling import SamplingParams
from tests.e2e.conftest import Pair, alive
from tests.e2e.prefix_client import TOKENS, PauseWithinPrompt, client, tokens_of

Cases = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

SAMPLED = SamplingParams(temperature=0.8, seed=7, presence_penalty=0.7)


@pytest.mark.parametrize(
    ("draft_device", "workers"),
    [(None, ["stage 1"]), pytest.param("cpu", ["0", "stage 1", "draft"], marks=pytest.mark.slow)],
)
async def test_answers_go_on_where_a_worker_is_drained(
    draft_device: str | None,
    workers: list[str],
    pairs: dict[str, Pair],
    prefix_cases: Cases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of prompts and answers, drafted and plain: a worker's place is taken by another one, all tokens are
    the same, and each is computed once; what the worker kept is kept."""
    pair, (prompt, greedy) = pairs["qwen3_5"], prefix_cases["qwen3_5"]
    longer = prompt[::-1] * 4
    async with client(pair, "cpu,cpu", draft_device=draft_device) as one:
        sampled = await one.ask(prompt, sampling=SAMPLED, speculate=False, cached=False)
        behind = await one.ask(longer, cached=False)
        engine = Engine(one.cluster, read_model_files(pair.target), one.cache, name="tiny")
        within = PauseWithinPrompt.of(engine, Request("longer", longer, TOKENS, prefill_chunk=4), monkeypatch)
        for worker in workers:
            before = {process.process_id for process in one.cluster.processes.values()}
            one.cache.drop_all()
            await one.settle()
            within.forget()
            requests = [
                Request("greedy", prompt, TOKENS),
                Request("sampled", prompt, TOKENS, SAMPLED, speculate=False),
            ]
            asked = [asyncio.create_task(tokens_of(engine, each, waits_for=within.prefilled)) for each in requests]
            done = await Handover(engine).drain(worker, "cpu")
            assert await asyncio.gather(*asked) == [greedy, sampled.token_ids]
            assert await within.asked.pop() == behind.token_ids
            assert done.anew == 0
            assert done.prefixes > 0
            lengths = {"greedy": len(prompt), "sampled": len(prompt), "longer": len(longer)}
            assert within.kept == {name: length + TOKENS - 1 for name, length in lengths.items()}
            [ended] = before - {process.process_id for process in one.cluster.processes.values()}
            assert ended is not None
            assert not alive(ended)
            await one.settle()
            again = await one.ask(prompt)
            assert again.token_ids == greedy
            assert again.stats.cached_tokens == len(prompt)
