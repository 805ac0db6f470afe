"""Sessions whose keys and values lie in pages, as on a GPU, tried on the CPU: what is kept is shared, and stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from services.errors import ResourceExhausted
from services.messages.steps import StepKind
from shard_worker.device.devices import Device, parse_devices
from shard_worker.stage.stage import StageState
from tests.combinations import covering
from tests.shard_worker.chain import BLOCK, Chain, Client, MakeChain
from tests.shard_worker.session.session_memory import differing, draft_of, memory_of, stages_of
from tests.shard_worker.session.test_following import follow
from tests.shard_worker.session.test_session_snapshots import LENGTHS, go_on, save_along
from tests.shard_worker.session.watched_stage import watch
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


@pytest.mark.parametrize(
    ("name", "cuts", "draft"),
    covering(
        (
            (name, cuts, draft)
            for name, cuts in (("qwen3", ()), ("qwen3_5", (3,)), ("qwen3-sliding", (3,)), ("gpt_oss", ()))
            for draft in ("session", "sliding")
        ),
        1,
    ),
)
async def test_a_restored_session_goes_on_as_if_it_had_never_stopped(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], draft: str
) -> None:
    """From every kept length, several at once and in a longer session, here and where the prefix was imported."""
    prompt = ids(31)
    chain, there = make_chain(name, cuts, draft), make_chain(name, (2,), draft)
    async with chain.session() as client:
        truth = await go_on(client, prompt, True)
    async with chain.session() as client:
        memories = await save_along(client, prompt)
        assert (await go_on(client, prompt, True))[:2] == truth[:2]
    for length, memory in zip(LENGTHS, memories, strict=True):
        async with chain.session() as first, chain.session(max_length=350) as second:
            for client in (first, second):
                await client.restore(f"at {length}", prompt[:length])
            for client in (first, second):
                assert (await go_on(client, prompt, True))[:2] == truth[:2]
        async with chain.session() as client:
            await client.restore(f"at {length}", prompt[:length])
            assert differing(await memory_of(client), memory) == []
    await imported(await exported(chain, "at 18"), there)
    await imported(await exported(chain, "at 30", 18, "at 18"), there)
    async with there.session() as client:
        await client.restore("at 30", prompt[:30])
        assert differing(await memory_of(client), memories[2]) == []
        assert (await go_on(client, prompt, True))[:2] == truth[:2]


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


async def send_chunks(client: Client, prompt: list[int]) -> None:
    """Send a prompt in chunks, of which the next one does not wait for the answer to the last."""
    for first in range(0, len(prompt), 4):
        await client.send(client.frame(StepKind.PREFILL, prompt[first : first + 4]))
        client.length += 4


async def decode(client: Client, prompt: list[int]) -> None:
    """Take steps that follow by themselves."""
    await follow(client, prompt[-1], 60)


async def verify(client: Client, prompt: list[int]) -> None:
    """Take steps that verify the draft's blocks and follow by themselves."""
    await follow(client, prompt[-1], 30, BLOCK - 1)


def used_bytes(chain: Chain) -> list[int]:
    """What the pages take that sessions hold on each stage, and in the draft."""
    stages = [role.loaded.stage for role in chain.roles if role.loaded is not None]
    assert chain.draft_role is not None
    assert chain.draft_role.loaded is not None
    pools = [*(stage.segments[0].pool for stage in stages), chain.draft_role.loaded.engine.draft.pool]
    return [pool.used_bytes for pool in pools]


@contextlib.contextmanager
def without_cycles() -> Iterator[None]:
    """Nobody looks for cycles of references, which Python does now and then at best."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("blocked", [0, 1])
@pytest.mark.parametrize("going_on", [send_chunks, decode, verify])
async def test_pages_of_a_session_that_is_closed_are_free_behind_its_step(
    make_chain: MakeChain, going_on: Callable[[Client, list[int]], Coroutine[Any, Any, None]], blocked: int
) -> None:
    """Behind the step that a stage computes just then nothing of it is computed, whatever waits or would follow by
    itself, and all its pages are free without anybody looking for cycles. Another session keeps its own."""
    prompt, chain = ids(40), make_chain("qwen3", (2,), True)
    began, free = threading.Event(), threading.Event()
    # By their ids: who holds a state holds its pages.
    leaving, computed = set[int](), list[int]()

    def note(state: StageState) -> None:
        if id(state) in leaving:
            computed.append(id(state))
        if len(computed) == 3:
            began.set()
            free.wait(10)

    watch(chain.roles[blocked], before_step=note)
    async with chain.session() as other:
        await other.prefill(prompt)
        before = used_bytes(chain)
        session = await chain.roles[0].open(chain.request())
        client = Client(session)
        if going_on is not send_chunks:
            await client.prefill(prompt[:-1])
        leaving.add(id(stages_of(client)[blocked].state))
        going = asyncio.ensure_future(going_on(client, prompt))
        await asyncio.to_thread(began.wait)
        more = [used > kept for used, kept in zip(used_bytes(chain), before, strict=True)]
        assert more == [True, True, going_on is verify]
        with without_cycles():
            await session.close()
            going.cancel()
            await asyncio.wait([going])
            free.set()
            for thread in chain.threads:
                await thread.submit(int)
            assert used_bytes(chain) == before
        assert len(computed) == 3
        await other.plain([prompt[-1], 7], 3)
    watch(chain.roles[blocked])


@pytest.mark.parametrize("count", [1, 3])
async def test_pages_of_sessions_that_find_no_memory_are_free_when_they_end(make_chain: MakeChain, count: int) -> None:
    """Their error, which goes far, keeps nothing of the step that it comes of: alone, and of several sessions."""
    prompt, chain = ids(40), make_chain("qwen3", (), True)

    def fail() -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    async def lacking(client: Client) -> None:
        with pytest.raises(ResourceExhausted, match="no memory left"):
            await decode(client, prompt)

    before = used_bytes(chain)
    failing: list[bool] = []
    watch(chain.roles[0], before_step=lambda _: failing and fail(), before_together=lambda _: failing and fail())
    clients = [Client(await chain.roles[0].open(chain.request(draft=None))) for _ in range(count)]
    for client in clients:
        await client.prefill(prompt[:-1])
    failing.append(True)
    with without_cycles():
        await asyncio.gather(*(lacking(client) for client in clients))
        for client in clients:
            await client.session.close()
        del clients, client
        await chain.threads[0].submit(int)
        assert used_bytes(chain) == before
    watch(chain.roles[0])
