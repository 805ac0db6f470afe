"""Frames that come later change nothing but the time: the tokens are those of links without delay, on every edge."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator

import pytest

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
from tests.e2e.delayed_chain import DelayedCluster
from tests.links import Fault, Link
from tests.shard_worker.chain import BLOCK, MakeChain
from tests.shard_worker.tiny import Tiny, ids

SEEDS = range(6)


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


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_delays_of_every_edge(make_chain: MakeChain, seed: int) -> None:
    """Every edge has delays of its own, new for each frame; the draft's worker may be lost at any request to it, and
    states are kept at many places. Requests run beside each other, and each has the tokens of one alone."""
    chosen = random.Random(seed)
    cuts = chosen.choice([(), (1,), (1, 3)])
    chain = make_chain(chosen.choice(["qwen3", "qwen3_5"]), cuts, True, place=HeadPlace.LOADED)
    cluster = DelayedCluster(chain, BLOCK, seed)
    requests = [
        Request(
            f"r{index}",
            tuple(ids(chosen.randrange(5, 40), seed=seed)),
            chosen.randrange(2, 60),
            # Where draws decide, an answer depends on how many draft tokens its steps have, and so on their times.
            SamplingParams(),
            prefill_chunk=chosen.choice([8, 512]),
        )
        for index in range(3)
    ]
    expected = [(await generate(cluster, request, None)).token_ids for request in requests]
    policy = KeepPolicy(min_tokens=4, checkpoint_tokens=8)
    for lost_after in (None, chosen.randrange(30), chosen.randrange(30)):
        cluster.delays_s = tuple(chosen.choice([0.0, 0.001, 0.004]) for _ in cluster.delays_s)
        cluster.draft_lost_after = lost_after
        async with asyncio.timeout(60), PrefixCache(cluster, "text", policy=policy) as prefixes:  # type: ignore[arg-type]
            answers = await asyncio.gather(
                *(generate(cluster, request, None, prefixes=prefixes) for request in requests)
            )
        assert [answer.token_ids for answer in answers] == expected
        if lost_after is None:
            assert not any("draft was lost" in note for answer in answers for note in answer.stats.notes)
