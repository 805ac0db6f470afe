"""The prefix cache over a store: what is kept in memory goes to disk, and comes back into workers that lost it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from io import BytesIO

import fsspec
import pytest

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.prefix.cache import MIN_DISK_GAIN_TOKENS, PrefixCache
from coordinator.prefix.index import Entry
from coordinator.prefix.policy import KeepPolicy
from coordinator.prefix.stores import Store
from services.errors import ResourceExhausted, Unavailable
from services.layers import LayerRange
from services.messages.snapshots import SnapshotHeader
from services.messages.steps import Location, SnapshotPart, SnapshotSaved
from tests.coordinator.cluster.toy_worker import MODEL, ToyHost
from tests.coordinator.conftest import Hosts
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import FINGERPRINTS, LAYERS, PLAIN, STAGE, contents, export, ids
from tests.services.fakes import until

SHORT, LONG = MIN_DISK_GAIN_TOKENS * 2, MIN_DISK_GAIN_TOKENS * 4


@contextlib.asynccontextmanager
async def caching(workers: Sequence[ToyHost], store: Store | None = None) -> AsyncIterator[PrefixCache]:
    """A server's prefix cache from its start to its end, when all is on disk, where there is a store."""
    plan = make_plan(
        target_devices=",".join(host.address for host in workers),
        layer_split=None,
        draft_device=None,
        num_layers=LAYERS,
        has_draft=False,
    )
    disk = None if store is None else disk_cache(store)
    async with (
        Cluster(plan, Checkpoints(MODEL, None, None)) as cluster,
        PrefixCache(cluster, PLAIN.text, disk=disk, policy=KeepPolicy(min_tokens=8, checkpoint_tokens=100)) as cache,
    ):
        assert cache.lineage(with_draft=False) == PLAIN
        yield cache


@pytest.fixture
async def workers(hosts: Hosts) -> list[ToyHost]:
    return await toys(hosts, 2)


async def toys(hosts: Hosts, count: int) -> list[ToyHost]:
    started = await hosts(count)
    for host in started:
        host.worker.fingerprint = FINGERPRINTS[STAGE]
    return started


async def keep(
    cache: PrefixCache, workers: Sequence[ToyHost], token_ids: tuple[int, ...], parent: Entry | None = None
) -> Entry:
    """Have every worker keep a prefix, and the cache know of it."""
    entry = cache.new_entry(PLAIN, token_ids, parent)
    arrival = await cache.expect(entry)
    first = 0 if parent is None else len(parent.token_ids)
    for host in workers:
        target = host.worker.description.target
        assert target is not None
        frames = [frame async for frame in export(PLAIN, STAGE, target.layers, token_ids, first)]
        host.snapshots.kept[STAGE, entry.snapshot_id] = frames
    part = SnapshotPart(Location(0, "alpha", "cpu", "a"), 10, 1)
    assert cache.record(PLAIN, arrival, SnapshotSaved(entry.snapshot_id, len(token_ids), (part,)))
    return entry


async def lose_and_split_anew(cluster: Cluster, worker: ToyHost) -> None:
    """End a worker, and have the others take over its layers."""
    losing = asyncio.ensure_future(cluster.lost())
    await asyncio.sleep(0.05)
    await worker.stop()
    await asyncio.wait_for(losing, 10)
    assert await cluster.resplit()


def check_parts(host: ToyHost) -> None:
    """Fail where a worker does not keep, of its own layers, the state behind LONG tokens and behind the first SHORT."""
    target = host.worker.description.target
    assert target is not None
    for token_ids, first in ((ids(SHORT), 0), (ids(LONG), SHORT)):
        header, *chunks, _ = host.snapshots.kept[STAGE, PLAIN.snapshot_id(token_ids)]
        assert isinstance(header, SnapshotHeader)
        assert (header.layers, header.first_token) == (target.layers, first)
        data = b"".join(bytes(chunk.data) for chunk in chunks)
        assert data == b"".join(contents(STAGE, target.layers, token_ids, first).values())


def no_space_left(**_: object) -> str:
    """What making a directory does on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_prefix_survives_the_workers(workers: list[ToyHost], hosts: Hosts, store: Store) -> None:
    """What was kept is on disk when the server ends; the next one's workers, split otherwise, get every byte."""
    async with caching(workers, store) as cache:
        short = await keep(cache, workers, ids(SHORT))
        await keep(cache, workers, ids(LONG), short)
    others = await toys(hosts, 3)
    async with caching(others, store) as cache:
        hit = await cache.find(ids(LONG + 10), with_draft=False)
        assert hit is not None
        assert (hit.source, hit.length) == ("disk", LONG)
        for host in others:
            check_parts(host)
        again = await cache.find(ids(LONG + 10), with_draft=False)
        assert again is not None
        assert (again.source, again.entry) == ("memory", hit.entry)


async def test_prefixes_from_the_disk_serve_layers_that_were_split_anew(hosts: Hosts, store: Store) -> None:
    """What the lost worker kept is gone, so the others free their parts and get all of it from the disk, for the layers
    that they have now."""
    first, lost, last = workers = await toys(hosts, 3)
    async with caching(workers, store) as cache:
        entry = await keep(cache, workers, ids(LONG))
        await until(lambda: not cache.pending)
        cluster = cache._cluster
        await lose_and_split_anew(cluster, lost)
        for host in (first, last):
            # As a worker does that loads other layers.
            host.snapshots.kept.clear()
        hit = await cache.find(ids(LONG + 10), with_draft=False)
        assert hit is not None
        assert (hit.source, hit.entry.snapshot_id) == ("disk", entry.snapshot_id)
        assert [place.layers for place in cluster.snapshot_places(with_draft=False)] == [
            LayerRange(0, LAYERS // 2), LayerRange(LAYERS // 2, LAYERS),
        ]  # fmt: skip
        for host in (first, last):
            target = host.worker.description.target
            assert target is not None
            header, *chunks, _ = host.snapshots.kept[STAGE, entry.snapshot_id]
            assert isinstance(header, SnapshotHeader)
            assert header.layers == target.layers
            parts = BytesIO(b"".join(bytes(chunk.data) for chunk in chunks))
            found = {tensor.name: parts.read(tensor.size_bytes) for tensor in header.tensors}
            assert found == contents(STAGE, target.layers, ids(LONG), 0)
            assert [entry.snapshot_id] in host.snapshots.freed
        again = await cache.find(ids(LONG + 10), with_draft=False)
        assert again is not None
        assert again.source == "memory"


async def test_prefixes_in_memory_serve_layers_that_went_back(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two workers keep while a third one is away is found in the memory of all three when it is back, of each for
    its own layers; no store is needed. Where nothing moves after all, nobody is told to keep anything, and a disk that
    is full is in nobody's way."""
    first, lost, last = workers = await toys(hosts, 3)
    async with caching(workers) as cache:
        cluster = cache._cluster
        await lose_and_split_anew(cluster, lost)
        short = await keep(cache, [first, last], ids(SHORT))
        await keep(cache, [first, last], ids(LONG), short)
        before = [dict(host.snapshots.kept) for host in (first, last)]
        with monkeypatch.context() as full:
            full.setattr("tempfile.mkdtemp", no_space_left)
            async with cache.carried():
                pass
        async with cache.carried():
            pass
        assert [host.snapshots.kept for host in (first, last)] == before
        await lost.start()
        await until(lambda: cluster.can_rejoin, 30)
        async with cache.carried():
            assert await cluster.rejoin()
            for host in workers:
                # As a worker does that loads other layers.
                host.snapshots.kept.clear()
        hit = await cache.find(ids(LONG + 10), with_draft=False)
        assert hit is not None
        assert (hit.source, hit.length) == ("memory", LONG)
        for host in workers:
            check_parts(host)


async def test_what_the_workers_keep_is_found_by_the_next_server(workers: list[ToyHost]) -> None:
    """By prompts that begin with it; what not all of them keep is freed, and so is what one of them gives up. What was
    found is kept on, and goes on being found by shorter prompts."""
    async with caching(workers) as cache:
        short = await keep(cache, workers, ids(SHORT))
        long = await keep(cache, workers, ids(LONG), short)
        lost = await keep(cache, workers, ids(SHORT, 1))
        given_up = await keep(cache, workers, ids(SHORT, 2))
    del workers[1].snapshots.kept[STAGE, lost.snapshot_id]
    async with caching(workers) as cache:
        await until(lambda: all(host.snapshots.freed == [[lost.snapshot_id]] for host in workers))
        assert await cache.find(ids(LONG + 10, 3), with_draft=False) is None
        assert await cache.find(ids(SHORT, 1), with_draft=False) is None
        hit = await cache.find(ids(SHORT + 10), with_draft=False)
        assert hit is not None
        assert (hit.source, hit.length, hit.entry.snapshot_id) == ("memory", SHORT, short.snapshot_id)
        hit = await cache.find(ids(LONG + 10), with_draft=False)
        assert hit is not None
        assert (hit.length, hit.entry) == (LONG, long)
        cache.drop([given_up.snapshot_id])
        await until(lambda: all(host.snapshots.freed[-1] == [given_up.snapshot_id] for host in workers))
        assert await cache.find(ids(SHORT, 2), with_draft=False) is None
        assert await cache.find(ids(LONG), with_draft=False) is not None
        cache.drop_all()
        await until(lambda: all(host.snapshots.freed[-1] == [long.snapshot_id, short.snapshot_id] for host in workers))


async def test_leftovers_of_a_worker_that_is_another_now_are_freed(workers: list[ToyHost]) -> None:
    """Its part is gone: a prompt that begins with them finds nothing, and the others need not keep theirs."""
    async with caching(workers) as cache:
        entry = await keep(cache, workers, ids(SHORT))
    async with caching(workers) as cache:
        described = workers[1].worker.description
        cache._cluster.workers = (cache._cluster.workers[0], replace(described, process_id=described.process_id + 1))
        assert await cache.find(ids(SHORT), with_draft=False) is None
        await until(lambda: all(host.snapshots.freed == [[entry.snapshot_id]] for host in workers))


async def test_a_hand_over_to_a_worker_that_is_lost_forgets_nothing(hosts: Hosts) -> None:
    """Prefixes on their way there stay with who has them, and nobody waits for each of them."""
    first, second, third = await toys(hosts, 3)
    async with caching([first, second]) as cache:
        entries = [await keep(cache, [first, second], ids(SHORT, seed)) for seed in range(3)]
        cluster = cache._cluster
        successor = await cluster.prepare("stage 1", third.address)
        await (await cluster.snapshots(third.address)).list_snapshots()
        await third.stop()
        with pytest.raises(Unavailable, match="was lost before it took the place"):
            await asyncio.wait_for(cache.copy(successor, set()), 10)
        await cluster.dismiss(successor)
        for seed, entry in enumerate(entries):
            hit = await cache.find(ids(SHORT, seed), with_draft=False)
            assert hit is not None
            assert hit.entry == entry


async def test_little_growth_is_not_worth_files(workers: list[ToyHost], store: Store) -> None:
    """An entry that adds fewer tokens to its parent than files are worth stays in memory only."""
    async with caching(workers, store) as cache:
        short = await keep(cache, workers, ids(SHORT))
        await keep(cache, workers, ids(SHORT + MIN_DISK_GAIN_TOKENS - 1), short)
    assert list(store.entries(PLAIN.key)) == [short.snapshot_id]


async def test_a_damaged_entry_is_a_miss_and_goes(workers: list[ToyHost], store: Store) -> None:
    """Its bytes are no longer those of its header: the request runs cold, and the entry is not offered again."""
    async with caching(workers, store) as cache:
        await keep(cache, workers, ids(SHORT))
        entry = await keep(cache, workers, ids(LONG, seed=1))
    filesystem, root = fsspec.core.url_to_fs(store.location)
    for path in filesystem.glob(f"{root}/{PLAIN.key}/{entry.snapshot_id}/*.safetensors"):
        filesystem.pipe_file(path, filesystem.cat_file(path)[:-1])
    for host in workers:
        host.snapshots.kept.clear()
    async with caching(workers, store) as cache:
        assert await cache.find(ids(LONG, seed=1), with_draft=False) is None
        await until(lambda: entry.snapshot_id not in store.entries(PLAIN.key), 5)
        hit = await cache.find(ids(SHORT), with_draft=False)
        assert hit is not None
        assert hit.source == "disk"


async def test_a_worker_without_room_is_a_miss(workers: list[ToyHost], hosts: Hosts, store: Store) -> None:
    """The entry stays on disk, the workers that took their part free it, and a request runs cold."""
    async with caching(workers, store) as cache:
        entry = await keep(cache, workers, ids(SHORT))
    others = await toys(hosts, 2)
    others[1].snapshots.import_fault = ResourceExhausted("no room")
    async with caching(others, store) as cache:
        assert await cache.find(ids(SHORT), with_draft=False) is None
        await until(lambda: all([entry.snapshot_id] in host.snapshots.freed for host in others), 5)
        others[1].snapshots.import_fault = None
        hit = await cache.find(ids(SHORT), with_draft=False)
        assert hit is not None
        assert hit.source == "disk"


async def test_what_is_freed_while_it_comes_from_disk_is_a_miss(
    workers: list[ToyHost], hosts: Hosts, store: Store
) -> None:
    """What it builds on is evicted by one worker while another still takes the longer one: the request runs cold."""
    async with caching(workers, store) as cache:
        short = await keep(cache, workers, ids(SHORT))
        await keep(cache, workers, ids(LONG), short)
    others = await toys(hosts, 2)
    async with caching(others, store) as cache:
        hit = await cache.find(ids(SHORT), with_draft=False)
        assert hit is not None
        others[1].snapshots.hold_import = asyncio.Event()
        finding = asyncio.ensure_future(cache.find(ids(LONG), with_draft=False))
        await until(lambda: len(others[1].snapshots.imports) == 2, 5)
        cache.forget(hit, with_draft=False)
        others[1].snapshots.hold_import.set()
        assert await finding is None


async def test_a_failing_export_is_no_ones_failure(workers: list[ToyHost], store: Store) -> None:
    """A prefix that cannot be written to disk is still a hit in memory, and nothing of it lies in the store."""
    async with caching(workers, store) as cache:
        workers[1].snapshots.export_fault = ResourceExhausted("busy")
        await keep(cache, workers, ids(SHORT))
        await until(lambda: cache.pending == 0, 5)
        hit = await cache.find(ids(SHORT), with_draft=False)
        assert hit is not None
        assert hit.source == "memory"
    assert store.entries(PLAIN.key) == {}
