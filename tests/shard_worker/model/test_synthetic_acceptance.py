"""Draft tokens that are accepted by chance, for measuring: how many, of whom, and that nobody gets them unasked."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch

from coordinator.bench.shapes import BLOCK_SIZE, acceptance_chance
from services.errors import InvalidArgument
from services.messages.steps import Commit, StepKind
from shard_worker.model.synthetic_acceptance import SyntheticAcceptance, read_synthetic_acceptance
from shard_worker.sampling.acceptance import accept
from tests.shard_worker.chain import BLOCK, Chain
from tests.shard_worker.session.test_following import follow
from tests.shard_worker.tiny import VOCAB, Tiny, ids

CPU = torch.device("cpu")


@pytest.mark.parametrize("asked", [0.0, 1.0, 5.0, 14.0, 15.0])
def test_so_many_draft_tokens_of_a_block_count_on_average(asked: float) -> None:
    """Whatever the draft proposes, at whatever position."""
    synthetic = SyntheticAcceptance(acceptance_chance(asked), VOCAB, CPU)
    draw, counts = random.Random(1), []
    for _ in range(4000):
        block = draw.choices(range(VOCAB), k=BLOCK_SIZE)
        chosen = draw.choices(range(VOCAB), k=BLOCK_SIZE)
        found = synthetic.choose(block, draw.randrange(100_000), chosen)
        assert len(found) == BLOCK_SIZE
        assert found[-1] == chosen[-1]
        counts.append(len(accept(block[1:], found, frozenset())) - 1)
    assert sum(counts) / len(counts) == pytest.approx(asked, abs=0.3)


def test_only_random_weights_may_have_it() -> None:
    """A configuration that says nothing has none; a chance beside weights, or one that is none, is refused."""
    assert read_synthetic_acceptance({"random_weights": True}, VOCAB, CPU) is None
    with pytest.raises(InvalidArgument, match="synthetic_acceptance is for measuring with random weights"):
        read_synthetic_acceptance({"synthetic_acceptance": 0.5}, VOCAB, CPU)
    for chance in (1.5, -0.1, True, "0.5"):
        with pytest.raises(InvalidArgument, match="must be a number from 0 to 1"):
            read_synthetic_acceptance({"random_weights": True, "synthetic_acceptance": chance}, VOCAB, CPU)


async def test_sessions_are_accepted_alike_alone_and_together(tiny: Tiny, tmp_path: Path) -> None:
    """A pair of tiny shapes: with a certain chance whole blocks count, with none a token a step; between them what
    counts of a session is the same among others as alone."""
    assert await counts_of(tiny, tmp_path / "all", 1.0) == [[BLOCK] * 6] * 4
    assert await counts_of(tiny, tmp_path / "none", 0.0) == [[1] * 6] * 4
    some = await counts_of(tiny, tmp_path / "some", 0.7)
    assert len({tuple(counts) for counts in some}) > 1


async def counts_of(tiny: Tiny, folder: Path, chance: float) -> list[list[int]]:
    """Return how many tokens the verify steps of four sessions produced, which must be the same alone and together."""
    chain = Chain(
        without_weights(tiny.path("qwen3"), folder / "target", synthetic_acceptance=chance),
        draft=without_weights(tiny.draft("qwen3", "session", target_layer_ids=(2, 0, 3)), folder / "draft"),
    )

    async def run(seed: int) -> list[Commit]:
        async with chain.session(batch_invariant_rows=16) as client:
            prompt = ids(20 + seed, seed=seed)
            await client.prefill(prompt[:-1])
            commit, block = await client.step(StepKind.DECODE, prompt[-1:], BLOCK - 1)
            await client.send(client.frame(StepKind.VERIFY, [*commit.token_ids, *block]))
            first = await client.commit()
            assert first.token_ids[:-1] == block[: len(first.token_ids) - 1]
            return (await follow(client, first.token_ids[-1], 6, BLOCK - 1))[1:]

    try:
        alone = [await run(seed) for seed in range(4)]
        together = await asyncio.gather(*(run(seed) for seed in range(4)))
    finally:
        chain.shutdown()
    assert [tokens(commits) for commits in together] == [tokens(commits) for commits in alone]
    return [[len(commit.token_ids) for commit in commits] for commits in alone]


def tokens(commits: list[Commit]) -> list[tuple[int, ...]]:
    return [commit.token_ids for commit in commits]


def without_weights(checkpoint: Path, folder: Path, **more: object) -> Path:
    """Write a checkpoint of the same shape with random weights."""
    folder.mkdir(parents=True)
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "random_weights": True, **more}))
    return folder
