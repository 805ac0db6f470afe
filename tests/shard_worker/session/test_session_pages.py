"""Sessions whose keys and values lie in pages, as on a GPU, tried on the CPU: what is kept is shared, and stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.messages.steps import StepKind
from shard_worker.device.devices import Device, parse_devices
from tests.shard_worker.chain import MakeChain
from tests.shard_worker.session.session_memory import differing, draft_of, memory_of, stages_of
from tests.shard_worker.session.test_session_snapshots import LENGTHS, go_on, save_along
from tests.shard_worker.snapshots.test_transfer import exported, imported
from tests.shard_worker.tiny import AsGpu, ids


class Paged(AsGpu):
    """The CPU with caches in pages."""

    def synchronize(self) -> None:
        """Nothing is queued."""


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch, make_chain: MakeChain) -> Iterator[None]:
    """Pages of 8 positions, and nothing kept behind a test."""

    def paged(text: str) -> tuple[Device, ...]:
        return tuple(Paged(device.name, device.torch_device) for device in parse_devices(text))

    monkeypatch.setattr("tests.shard_worker.chain.parse_devices", paged)
    monkeypatch.setattr("shard_worker.snapshots.keeper.SnapshotKeeper.pinned", False)
    for module in ("stage.segment", "drafting.drafters.dflash"):
        monkeypatch.setattr(f"shard_worker.{module}.PAGE_ROWS", 8)
    yield
    for chain in make_chain.chains.values():
        chain.free_snapshots()


@pytest.mark.parametrize("draft", ["session", "sliding"])
@pytest.mark.parametrize(("name", "cuts"), [("qwen3", ()), ("qwen3_5", (3,))])
async def test_a_restored_session_goes_on_as_if_it_had_never_stopped(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], draft: str
) -> None:
    """From every kept length, several at once and in a longer session, here and where the prefix was imported."""
    prompt, window = ids(31), 10 if draft == "sliding" else None
    chain, there = make_chain(name, cuts, draft), make_chain(name, (2,), draft)
    async with chain.session() as client:
        truth = await go_on(client, prompt, True, window=window)
    async with chain.session() as client:
        memories = await save_along(client, prompt, window=window)
        assert (await go_on(client, prompt, True, window=window))[:2] == truth[:2]
    for length, memory in zip(LENGTHS, memories, strict=True):
        async with chain.session() as first, chain.session(max_length=350) as second:
            for client in (first, second):
                await client.restore(f"at {length}", prompt[:length])
            for client in (first, second):
                assert (await go_on(client, prompt, True, window=window))[:2] == truth[:2]
        async with chain.session() as client:
            await client.restore(f"at {length}", prompt[:length])
            assert differing(await memory_of(client, window=window), memory) == []
    await imported(await exported(chain, "at 18"), there)
    await imported(await exported(chain, "at 30", 18, "at 18"), there)
    async with there.session() as client:
        await client.restore("at 30", prompt[:30])
        assert differing(await memory_of(client, window=window), memories[2]) == []
        assert (await go_on(client, prompt, True, window=window))[:2] == truth[:2]


async def test_pages_are_shared_and_come_back(make_chain: MakeChain) -> None:
    """Two sessions of one kept prefix have its full pages at the same place, and the draft's too; once all have ended
    and nothing is kept, none is in use."""
    prompt, chain = ids(31), make_chain("qwen3", (), True)
    async with chain.session() as client:
        await save_along(client, prompt)
    async with chain.session() as one, chain.session() as other:
        places = []
        for client in (one, other):
            await client.restore("at 30", prompt[:30])
            await client.step(StepKind.DECODE, prompt[30:])
            [caches], draft = stages_of(client)[0].state.caches, draft_of(client)
            assert caches.attention is not None
            assert draft is not None
            places.append([caches.attention.addresses, *(cache.addresses for cache in draft.caches.values())])
        for first, second in zip(*places, strict=True):
            assert first[:3] == second[:3]
            assert first[3] != second[3]
    pool = stages_of(one)[0].host.stage.segments[0].pool
    assert pool.used_bytes
    chain.free_snapshots()
    del caches, draft, client, one, other
    await chain.threads[0].submit(int)
    assert pool.used_bytes == 0
