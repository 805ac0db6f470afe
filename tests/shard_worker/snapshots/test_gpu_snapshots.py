"""On a machine with a GPU: prefixes out of its memory and back, through page-locked memory, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.messages.steps import StepKind
from shard_worker.device.devices import best_devices
from tests.shard_worker.chain import BLOCK, Chain, Client, MakeChain
from tests.shard_worker.session.session_memory import differing, memory_of
from tests.shard_worker.session.test_session_snapshots import go_on, save_along
from tests.shard_worker.snapshots.test_transfer import exported, imported
from tests.shard_worker.tiny import Tiny, ids

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forgotten(make_chain: MakeChain) -> Iterator[None]:
    """No test sees what another one kept."""
    yield
    for chain in make_chain.chains.values():
        chain.free_snapshots()


@pytest.mark.parametrize("draft", ["session", "sliding"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("cuts", [(), (3,)])
async def test_a_session_restored_on_a_gpu_goes_on(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], draft: str
) -> None:
    """From every kept length and from an imported prefix: tokens, draft tokens and memory are the same."""
    prompt = ids(31)
    gpu = best_devices()[0]
    here, there = make_chain(name, cuts, draft, devices=gpu), make_chain(name, (2,), draft, devices=gpu)
    async with here.session() as client:
        truth = await go_on(client, prompt, True)
    async with here.session() as client:
        memories = await save_along(client, prompt)
        assert (await go_on(client, prompt, True))[:2] == truth[:2]
    await imported(await exported(here, "at 18"), there)
    await imported(await exported(here, "at 30", 18, "at 18"), there)
    for chain in (here, there):
        for length, memory in zip((18, 30), memories[1:], strict=True):
            async with chain.session() as client:
                await client.restore(f"at {length}", prompt[:length])
                assert differing(await memory_of(client), memory) == []
                assert (await go_on(client, prompt, True))[:2] == truth[:2]
    async with here.session() as client:
        await client.restore("at 30", prompt[:30])
        resumed, _ = await client.resume(BLOCK - 1)
    async with here.session() as client:
        await client.restore("at 18", prompt[:18])
        stepped, _ = await client.step(StepKind.DECODE, prompt[18:30], BLOCK - 1)
    assert resumed.token_ids == stepped.token_ids


async def test_a_prefix_is_cut_while_its_copy_is_on_its_way(tiny: Tiny) -> None:
    """A part of a prefix taken up at once, with the GPU far behind, waits for the copy and is right."""
    gpu = best_devices()[0]
    chain = Chain(tiny.path("qwen3"), (), devices=gpu)
    prompt = ids(200)
    async with chain.session() as client:
        await client.prefill(prompt)
        memory = await memory_of(client)
        for turn, length in enumerate((150, 60, 199, 1)):
            # The GPU is busy for a good while when the copy is queued.
            await chain.threads[0].submit(torch.cuda._sleep, 400_000_000)
            assert not (await client.save(f"busy {turn}")).parts[0].refusal
            other = Client(await chain.roles[0].open(chain.request()))
            await other.restore(f"busy {turn}", prompt[:length])
            assert differing(await memory_of(other), {name: rows[:, :length] for name, rows in memory.items()}) == []
            await other.session.close()
    chain.free_snapshots()
    chain.shutdown()
