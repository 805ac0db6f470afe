"""Sessions come and go, prefixes are kept and make room for others: what is left behind does not grow."""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import dataclass

import torch

from services.messages.description import HeadPlace
from services.messages.steps import StepKind
from tests.shard_worker.allocated import allocated_bytes
from tests.shard_worker.chain import BLOCK, Chain, MakeChain

SESSIONS = 16
BUDGET = 224 << 10
"""Room for the prefixes of some of the sessions."""

CODE_BYTES = 4 << 20
"""What may be added all the same: for each number of rows from 1 to 16 that a matrix is multiplied by, oneDNN and
torch keep 0.6 MiB of code, and how many draft tokens are accepted, such a number, differs from session to session."""


@dataclass(frozen=True)
class Left:
    """What is alive while no session is open and no prefix kept: bytes of the C library, objects of Python, tensors."""

    size_bytes: int
    objects: int
    tensors: int


async def left_behind(chain: Chain) -> Left:
    chain.free_snapshots()
    for thread in chain.threads:
        await thread.submit(int)
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return Left(allocated_bytes(), sys.getallocatedblocks(), tensors)


async def run_sessions(chain: Chain, seed: int) -> None:
    """Whole sessions, others that begin with what those kept, and some that are left in the middle of a step."""
    rng = random.Random(seed)
    for number in range(SESSIONS):
        # Lengths are the same every time.
        prompt = [rng.randrange(256) for _ in range(40 + 9 * number)]
        async with chain.session() as client:
            await client.step(StepKind.PREFILL, prompt[:-1])
            await client.save(f"{seed} {number}")
            commit, draft_tokens = await client.step(StepKind.DECODE, prompt[-1:], BLOCK - 1)
            await client.step(StepKind.VERIFY, [commit.token_ids[-1], *draft_tokens], BLOCK - 1)
        async with chain.session() as client:
            await client.restore(f"{seed} {number}", prompt[:-1])
            await client.step(StepKind.DECODE, prompt[-1:], BLOCK - 1)
        async with chain.session() as client:
            await client.send(client.frame(StepKind.PREFILL, prompt))
    assert all(len(store) < SESSIONS for store in chain.stores)


async def test_nothing_is_left_behind(make_chain: MakeChain) -> None:
    """After twice as many sessions on two stages and a draft of its own there are no more tensors than after half of
    them, few more objects, and no more bytes than some code takes."""
    chain = make_chain("qwen3_5", (3,), True, place=HeadPlace.LOADED, budget=BUDGET)
    for seed in range(2):
        await run_sessions(chain, seed)
    half = await left_behind(chain)
    for seed in range(2, 4):
        await run_sessions(chain, seed)
    whole = await left_behind(chain)
    assert whole.tensors <= half.tensors
    # Less than two for each session.
    assert whole.objects - half.objects < 250
    assert whole.size_bytes - half.size_bytes < CODE_BYTES
