"""Draft tokens that would be left unused are spared, and those that are asked for later are as they would have been."""

from __future__ import annotations

from typing import Any

import pytest

from services.messages.description import HeadPlace
from services.messages.steps import Proposal, StepKind
from tests.combinations import covering
from tests.shard_worker.chain import BLOCK, Chain, MakeChain
from tests.shard_worker.tiny import ids

PROMPT = ids(20)
RIGHT = (0, 3, 1, BLOCK - 1, 0, 0, 5, 2)
"""How many draft tokens are right in the blocks that are verified, one behind the other."""

LEAST = (1, 3, 2, BLOCK - 1, 0, BLOCK, 4, 9)
"""Of how many the next block is made at least."""


def always(_: object) -> bool:
    return True


async def proposals(
    chain: Chain, expected: list[int], least: tuple[int, ...], vocabulary: int
) -> list[tuple[int, ...] | None]:
    """Return what is proposed behind each block of RIGHT draft tokens, None where nothing is. expected: the tokens
    behind the prompt."""
    found: list[tuple[int, ...] | None] = []
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        commit, _ = await client.step(StepKind.DECODE, PROMPT[-1:], BLOCK - 1)
        produced = [*commit.token_ids]
        for right, fewest in zip(RIGHT, least, strict=True):
            known = len(produced)
            block = expected[known : known + BLOCK - 1]
            block[right:] = [(token + 1) % vocabulary for token in block[right:]]
            rows = [produced[-1], *block]
            await client.send(client.frame(StepKind.VERIFY, rows, BLOCK - 1, least_accepted=fewest))
            commit = await client.commit()
            assert len(commit.token_ids) == right + 1
            produced += commit.token_ids
            if commit.propose_tokens:
                assert commit.propose_tokens == BLOCK - 1
                proposal = await anext(client.events)
                assert isinstance(proposal, Proposal)
                found.append(proposal.token_ids)
            else:
                found.append(None)
    assert produced == expected[: len(produced)]
    return found


@pytest.mark.parametrize(
    ("name", "cuts", "options"),
    covering(
        (
            (name, *way)
            for name in ("qwen3", "qwen3_5")
            for way in (
                ((), {}),
                ((), {"place": HeadPlace.LOADED}),
                ((1, 3), {}),
                ((1, 3), {"place": HeadPlace.PROJECTED}),
                ((1, 3), {"carries": always}),
                ((1, 3), {"carries": always, "carries_batch": always}),
            )
        ),
        1,
    ),
)
async def test_what_few_accepted_tokens_spare(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], options: dict[str, Any]
) -> None:
    """No block is made behind one of which fewer are accepted, and each other is as if all had been."""
    chain = make_chain(name, cuts, True, **options)
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 2 + sum(RIGHT) + 2 * BLOCK)
    vocabulary = chain.roles[0].loaded.stage.config.vocab_size  # type: ignore[union-attr]
    whole = await proposals(chain, expected, (0,) * len(RIGHT), vocabulary)
    spared = await proposals(chain, expected, LEAST, vocabulary)

    assert None not in whole
    assert spared == [
        block if right >= fewest else None for block, right, fewest in zip(whole, RIGHT, LEAST, strict=True)
    ]
    assert spared.count(None) == 4


@pytest.mark.gpu
async def test_what_a_gpu_has_begun_before_it_was_known_is_used(make_chain: MakeChain) -> None:
    """Where a block is queued with the step before it nothing can be spared, and all is as if it had not been asked."""
    chain = make_chain("qwen3", (), True, devices="cuda:0", dtype="bfloat16")
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 2 + sum(RIGHT) + 2 * BLOCK)
    vocabulary = chain.roles[0].loaded.stage.config.vocab_size  # type: ignore[union-attr]
    whole = await proposals(chain, expected, (0,) * len(RIGHT), vocabulary)

    assert None not in whole
    assert await proposals(chain, expected, LEAST, vocabulary) == whole
