"""Frames that come later, or in another order, change nothing but the time: the tokens are those of good links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from coordinator.answer import Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from coordinator.prefix.cache import PrefixCache
from coordinator.prefix.policy import KeepPolicy
from services.messages.description import HeadPlace
from services.messages.sampling import SamplingParams
from services.processes.launch import Launch
from services.rpc.payload_transport import PayloadTransport
from tests.e2e.conftest import Pair, Worker
from tests.e2e.ordered_chain import OrderedCluster, Post
from tests.links import Fault, Link
from tests.shard_worker.chain import BLOCK, MakeChain
from tests.shard_worker.tiny import Tiny, ids


@pytest.fixture(scope="module")
def make_chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeChain]:
    make = MakeChain(Tiny(tmp_path_factory.mktemp("tiny")))
    yield make
    for chain in make.chains.values():
        chain.shutdown()


FAULTS = {
    "late": Fault(delay_s=0.03),
    "uneven": Fault(delay_s=0.005, jitter_s=0.05),
    "slow": Fault(bytes_per_s=1e6),
}


@pytest.mark.slow
async def test_links_with_delay(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """Real workers behind TCP links that are late, uneven or slow: requests beside each other, greedy and drawn,
    with a draft in a worker of its own and with kept prefixes, have the tokens of a good link."""
    pair, workers = pairs["qwen3"], [start_worker("--payload-transport", "stream").address for _ in range(3)]
    long = tuple(ids(120, seed=5))
    requests = [
        Request("greedy", tuple(ids(20, seed=1)), 16),
        Request("drawn", tuple(ids(20, seed=2)), 12, SamplingParams(temperature=0.9, seed=3), speculate=False),
        Request("chunks", long, 8, prefill_chunk=16),
        Request("again", (*long, 7, 9), 8, prefill_chunk=16, logprobs=2),
    ]
    async with contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(Link(address)) for address in workers]
        first, second, draft = (link.address for link in links)
        plan = make_plan(
            target_devices=f"{first},{second}",
            layer_split=None,
            draft_device=draft,
            num_layers=pair.layers,
            has_draft=True,
        )
        launch = Launch(transport=PayloadTransport.STREAM)
        checkpoints = Checkpoints(pair.target, pair.draft, "float32")
        cluster = await stack.enter_async_context(Cluster(plan, checkpoints, launch=launch))
        prefixes = await stack.enter_async_context(PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=16)))
        expected = [(await generate(cluster, request, None)).token_ids for request in requests]
        for name, fault in FAULTS.items():
            for link in links:
                link.fault = fault
            async with asyncio.timeout(120):
                answers = await asyncio.gather(*(generate(cluster, each, None, prefixes=prefixes) for each in requests))
            assert [answer.token_ids for answer in answers] == expected, name
            assert answers[0].stats.draft_tokens, name


CASES = given(
    model=st.sampled_from(["qwen3", "qwen3_5"]),
    cuts=st.sampled_from([(), (1,), (1, 3)]),
    picks=st.lists(st.integers(0, 1000), min_size=1, max_size=50),
    shapes=st.tuples(*[st.tuples(st.integers(5, 40), st.integers(2, 40), st.sampled_from([8, 512]))] * 3),
    lost_after=st.none() | st.integers(0, 30),
    abandoned_at=st.none() | st.integers(0, 300),
)


@pytest.mark.parametrize("cases", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_frames_arrive_in_any_order(make_chain: MakeChain, cases: int) -> None:
    """Whatever frame of whatever edge arrives next: requests beside each other have the tokens of one alone, while the
    draft's worker is lost at any request to it, the first request's client goes at any moment, and states are kept at
    many places. Those who sent a frame never get another answer than the one that is due."""

    @settings(max_examples=cases, database=None, derandomize=True)
    @CASES
    def check(**drawn: Any) -> None:
        check_an_order(make_chain, **drawn)

    check()


def check_an_order(
    make_chain: MakeChain,
    model: str,
    cuts: tuple[int, ...],
    picks: list[int],
    shapes: tuple[tuple[int, int, int], ...],
    lost_after: int | None,
    abandoned_at: int | None,
) -> None:
    """shapes: of each request the tokens of its prompt and of its answer, and the rows of a chunk of the prompt."""

    async def run() -> None:
        chain = make_chain(model, cuts, True, place=HeadPlace.LOADED)
        cluster = OrderedCluster(chain, BLOCK)
        requests = [
            # Where draws decide, an answer depends on how many draft tokens its steps have, and so on their times.
            Request(f"r{index}", tuple(ids(prompt, seed=7)), answer, SamplingParams(), prefill_chunk=chunk)
            for index, (prompt, answer, chunk) in enumerate(shapes)
        ]
        expected = [(await generate(cluster, replace(each, speculate=False), None)).token_ids for each in requests]
        cluster.post, cluster.draft_lost_after = Post(picks, chain.threads), lost_after
        policy = KeepPolicy(min_tokens=4, checkpoint_tokens=8)
        async with asyncio.timeout(60), cluster.post, PrefixCache(cluster, "text", policy=policy) as prefixes:  # type: ignore[arg-type]
            answers = [asyncio.ensure_future(generate(cluster, each, None, prefixes=prefixes)) for each in requests]
            if abandoned_at is not None:
                while cluster.post.delivered < abandoned_at and not answers[0].done():
                    await asyncio.sleep(0)
                answers.pop(0).cancel()
                expected.pop(0)
            done = await asyncio.gather(*answers)
        assert [answer.token_ids for answer in done] == expected
        if lost_after is None:
            assert not any(answer.stats.draft_lost for answer in done)

    asyncio.run(run())
