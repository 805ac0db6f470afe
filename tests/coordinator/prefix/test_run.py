"""One request and the prefix cache: what it begins from, what it saves on its way, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.prefix import cache as cache_module
from coordinator.prefix.cache import PrefixCache
from coordinator.prefix.policy import KeepPolicy
from coordinator.prefix.run import PrefixRun
from services.errors import Unavailable
from services.messages.steps import (
    Location,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
)
from tests.coordinator.cluster.toy_worker import LAYERS, MODEL, ToyHost
from tests.coordinator.conftest import Hosts
from tests.coordinator.prefix.disk.exports import ids
from tests.services.fakes import OPEN, FakeStage, FakeStageSession, until

POLICY = KeepPolicy(min_tokens=8, checkpoint_tokens=100)


@pytest.fixture
async def workers(hosts: Hosts) -> list[ToyHost]:
    return await hosts(2)


@pytest.fixture
async def cache(workers: list[ToyHost]) -> AsyncIterator[PrefixCache]:
    """The cache of two workers that hold a model whose states can be trimmed."""
    plan = make_plan(
        target_devices=",".join(host.address for host in workers),
        layer_split=None,
        draft_device=None,
        num_layers=LAYERS,
        has_draft=False,
    )
    async with (
        Cluster(plan, Checkpoints(MODEL, None, None)) as cluster,
        PrefixCache(cluster, "text", policy=POLICY) as cache,
    ):
        yield cache


class KeepingSession(FakeStageSession):
    """All workers keep what it is told to save."""

    async def save_snapshot(self, save: SnapshotSave) -> None:
        self.saves.append(save)
        self.out.put_nowait(saved(save))


class SilentSession(FakeStageSession):
    """It never confirms a save."""

    async def save_snapshot(self, save: SnapshotSave) -> None:
        self.saves.append(save)


def committed(token_ids: tuple[int, ...]) -> Callable[[], Coroutine[Any, Any, tuple[int, ...]]]:
    """Return what says that a session has committed these tokens."""

    async def say() -> tuple[int, ...]:
        return token_ids

    return say


async def begin(cache: PrefixCache, prompt: tuple[int, ...], *boundaries: int) -> PrefixRun:
    run = PrefixRun(cache, prompt, boundaries, with_draft=False)
    await run.begin()
    return run


def parts(*evicted: str, refusal: str = "") -> tuple[SnapshotPart, ...]:
    return (
        SnapshotPart(Location(0, "alpha", "cpu", "a"), 10, 2_000_000, evicted),
        SnapshotPart(Location(1, "beta", "cpu", "b"), 10, 1_000_000, (), refusal),
    )


def saved(save: SnapshotSave, *evicted: str, refusal: str = "") -> SnapshotSaved:
    return SnapshotSaved(save.snapshot_id, save.length, parts(*evicted, refusal=refusal))


async def save(run: PrefixRun, token_ids: tuple[int, ...]) -> SnapshotSave:
    request = await run.save(token_ids)
    assert request is not None
    return request


async def keep(cache: PrefixCache, token_ids: tuple[int, ...]) -> SnapshotSave:
    """Have a prefix kept by a request of its own."""
    run = await begin(cache, token_ids)
    request = await save(run, token_ids)
    run.record(saved(request))
    return request


# --- beginning


async def test_a_cold_run_restores_nothing(cache: PrefixCache) -> None:
    """Where nothing is kept, a request begins at its first token, and saves where the policy says."""
    run = await begin(cache, ids(50), 12, 30, 40)
    assert run.hit is None
    assert run.restore() is None
    assert run.points == (12, 30, 40, 50)


async def test_a_kept_prefix_is_restored(cache: PrefixCache) -> None:
    """A longer prompt begins behind the prefix that another request had kept."""
    first = await keep(cache, ids(20))
    run = await begin(cache, ids(50))
    assert run.restore() == SnapshotRestore(first.snapshot_id, 20, ids(20))
    assert run.hit is not None
    assert run.hit.source == "memory"


async def test_a_trimmable_state_serves_shorter_prefixes(cache: PrefixCache) -> None:
    """A prompt that leaves a kept prefix in its middle restores what they have in common; its save builds on no more
    than that."""
    long = await keep(cache, ids(60))
    other = (*ids(40), 1, 2, 3)
    run = await begin(cache, other)
    assert run.restore() == SnapshotRestore(long.snapshot_id, 40, ids(40))
    assert (await save(run, other)).parent_id is None


async def test_a_prefix_too_short_to_fetch_is_computed(cache: PrefixCache) -> None:
    """Below the policy's least number of tokens computing is faster."""
    await keep(cache, ids(60))
    run = await begin(cache, (*ids(POLICY.min_tokens - 1), 9, 9, 9))
    assert run.hit is None


async def test_a_restore_is_timed(cache: PrefixCache) -> None:
    """restored_ms is what all workers together took."""
    kept = await keep(cache, ids(20))
    run = await begin(cache, ids(50))
    run.record(SnapshotRestored(kept.snapshot_id, 20, parts()))
    assert run.restored_ms == pytest.approx(3.0)


async def test_a_hit_that_is_gone(cache: PrefixCache, workers: list[ToyHost]) -> None:
    """The request runs cold, the prefix is found no more, and all workers are told to free it and what builds on it."""
    short = await keep(cache, ids(20))
    run = await begin(cache, ids(50))
    longer = await save(run, ids(50))
    run.record(saved(longer))
    run = await begin(cache, ids(30))
    assert run.hit is not None
    run.forget_hit()
    assert run.hit is None
    assert run.restore() is None
    await until(lambda: all(host.snapshots.freed for host in workers), 5)
    assert {name for host in workers for call in host.snapshots.freed for name in call} >= {longer.snapshot_id}
    assert await save(run, ids(20)) == SnapshotSave(short.snapshot_id, 20, None)


async def test_what_is_being_freed_is_kept_anew_only_then(cache: PrefixCache, workers: list[ToyHost]) -> None:
    """A prefix that is gone on one worker is freed on all; a save of it waits for the last of them, which would free
    what it brings."""
    await keep(cache, ids(20))
    workers[1].snapshots.hold_free = asyncio.Event()
    run = await begin(cache, ids(20))
    run.forget_hit()
    saving = asyncio.ensure_future(save(run, ids(20)))
    await until(lambda: bool(workers[1].snapshots.freed), 5)
    too_early = saving.done()

    workers[1].snapshots.hold_free.set()

    assert not too_early
    run.record(saved(await saving))
    assert (await begin(cache, ids(20))).hit is not None


async def test_what_is_freed_on_its_way_is_no_hit(cache: PrefixCache) -> None:
    """Another request finds a prefix gone while this one saves it: nobody knows who keeps it now. A later save
    counts."""
    first, second = await begin(cache, ids(20)), await begin(cache, ids(20))
    late = await save(first, ids(20))
    second.record(saved(await save(second, ids(20))))
    third = await begin(cache, ids(20))
    third.forget_hit()

    first.record(saved(late))

    assert (await begin(cache, ids(20))).hit is None
    third.record(saved(await save(third, ids(20))))
    assert (await begin(cache, ids(20))).hit is not None


# --- saving


async def test_saves_build_on_each_other(cache: PrefixCache) -> None:
    """The second save of a request names the first as its parent although nobody has confirmed that yet."""
    run = await begin(cache, ids(50))
    first, second = await save(run, ids(20)), await save(run, ids(50))
    assert (first.parent_id, first.length) == (None, 20)
    assert (second.parent_id, second.length) == (first.snapshot_id, 50)
    run.record(saved(first))
    run.record(saved(second))
    after = await begin(cache, ids(80))
    assert after.restore() == SnapshotRestore(second.snapshot_id, 50, ids(50))


async def test_what_is_kept_is_not_saved_again(cache: PrefixCache) -> None:
    """Neither within a request nor by a later one, whose next save builds on it all the same."""
    run = await begin(cache, ids(50))
    first = await save(run, ids(20))
    assert await run.save(ids(20)) is None
    run.record(saved(first))
    other = await begin(cache, ids(15))
    assert await other.save(ids(20)) is None
    assert (await save(other, ids(40))).parent_id == first.snapshot_id


async def test_a_refused_save_is_no_hit(cache: PrefixCache, workers: list[ToyHost]) -> None:
    """Where one worker refuses, the others free what they kept, and nobody begins there."""
    run = await begin(cache, ids(50))
    request = await save(run, ids(20))
    run.record(saved(request, refusal="no room"))
    assert (await begin(cache, ids(50))).hit is None
    await until(lambda: all(host.snapshots.freed == [[request.snapshot_id]] for host in workers), 5)


async def test_a_save_whose_parent_was_refused_is_no_hit(cache: PrefixCache) -> None:
    """What builds on a state that is not there is of no use."""
    run = await begin(cache, ids(50))
    first, second = await save(run, ids(20)), await save(run, ids(50))
    run.record(saved(first, refusal="no room"))
    run.record(saved(second))
    assert (await begin(cache, ids(50))).hit is None


async def test_what_a_worker_evicts_is_forgotten_everywhere(cache: PrefixCache, workers: list[ToyHost]) -> None:
    """One worker made room for a new state; the old one is no hit any more, and all workers free it."""
    old = await keep(cache, ids(20, seed=1))
    run = await begin(cache, ids(50))
    run.record(saved(await save(run, ids(50)), old.snapshot_id))
    assert (await begin(cache, ids(30, seed=1))).hit is None
    await until(lambda: all([old.snapshot_id] in host.snapshots.freed for host in workers), 5)


async def test_answers_to_saves_of_others_change_nothing(cache: PrefixCache) -> None:
    """An answer that this request waits for no more, or never did, is passed over."""
    run = await begin(cache, ids(50))
    run.record(SnapshotSaved("f" * 40, 20, parts()))
    assert (await begin(cache, ids(50))).hit is None


async def test_growing_answers_are_saved_now_and_then(cache: PrefixCache) -> None:
    """A checkpoint is due so many tokens behind the last save."""
    run = await begin(cache, ids(50))
    await save(run, ids(50))
    assert not run.checkpoint_due(50 + POLICY.checkpoint_tokens - 1)
    assert run.checkpoint_due(50 + POLICY.checkpoint_tokens)


# --- ending


async def test_the_end_of_an_answer_is_kept(cache: PrefixCache) -> None:
    """Behind the request's back the state behind all tokens is saved; when that is confirmed the session is closed."""
    session = KeepingSession(FakeStage(), OPEN)
    run = await begin(cache, ids(50))
    run.finish(session, session.events(), committed(ids(60)))
    await until(lambda: session.closed == 1, 5)
    assert [request.length for request in session.saves] == [60]
    after = await begin(cache, ids(80))
    assert after.restore() == SnapshotRestore(session.saves[0].snapshot_id, 60, ids(60))


async def test_saves_on_their_way_are_waited_for(cache: PrefixCache) -> None:
    """What the request had saved before its end is confirmed behind its back too."""
    session = KeepingSession(FakeStage(), OPEN)
    run = await begin(cache, ids(50))
    await session.save_snapshot(await save(run, ids(50)))
    run.finish(session, session.events(), committed(ids(50)))
    await until(lambda: session.closed == 1, 5)
    assert (await begin(cache, ids(80))).restore() is not None


async def test_a_short_end_is_not_worth_keeping(cache: PrefixCache) -> None:
    """With fewer tokens behind the last save than the policy's least number the session is only closed."""
    session = KeepingSession(FakeStage(), OPEN)
    run = await begin(cache, ids(50))
    run.record(saved(await save(run, ids(50))))
    run.finish(session, session.events(), committed(ids(50 + POLICY.min_tokens - 1)))
    await until(lambda: session.closed == 1, 5)
    assert session.saves == []


@pytest.mark.parametrize("ending", ["silent", "broken", "over"])
async def test_an_end_that_cannot_be_kept(cache: PrefixCache, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that don't answer, a stream that breaks, one that ends: the session is closed, and nobody hears of it."""
    monkeypatch.setattr(cache_module, "END_GRACE_S", 0.05)
    session = SilentSession(FakeStage(), OPEN)
    if ending != "silent":
        session.out.put_nowait(Unavailable("the stream broke") if ending == "broken" else None)
    run = await begin(cache, ids(50))
    run.finish(session, session.events(), committed(ids(60)))
    await until(lambda: session.closed == 1, 5)
    await until(lambda: cache.pending == 0, 5)
    assert (await begin(cache, ids(80))).hit is None
