"""What goes when room is needed, in which order, and that the budget holds at every moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import structlog

from coordinator.prefix.disk.catalog import DiskCatalog
from coordinator.prefix.disk.disk_cache import DiskCache, PartSource
from coordinator.prefix.disk.entries import DiskEntry, EntryUsage, Fault, UnreadableEntry
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.disk.eviction import VictimQueue, worth
from coordinator.prefix.lineage import Lineage, as_bytes
from coordinator.prefix.stores import EntryKey, Store, StoreError
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.snapshots import SnapshotFrame
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import LAYERS, PLAIN, STAGE, export, ids, leftovers, restore, save

NOW = 2_000_000_000.0
HOUR = 3600.0


def entry(
    name: int,
    *,
    count: int = 100,
    first: int = 0,
    size: int = 1000,
    hits: int = 0,
    idle_s: float = 2 * HOUR,
    lineage: Lineage = PLAIN,
) -> DiskEntry:
    """One that exists nowhere. Entries of one name build on each other."""
    tokens = ids(count, seed=name)
    return DiskEntry(
        lineage=lineage,
        snapshot_id=lineage.snapshot_id(tokens),
        model_name="tiny",
        num_layers=LAYERS,
        tokens=as_bytes(tokens),
        first_token=first,
        parent_id=lineage.snapshot_id(tokens[:first]) if first else None,
        created=NOW - 100 * HOUR if hits else NOW - idle_s,
        parts=(),
        size_bytes=size,
        stamp="1",
        usage=EntryUsage(hits, NOW - idle_s) if hits else EntryUsage(),
    )


def order(entries: Sequence[DiskEntry | UnreadableEntry], *protected: DiskEntry) -> list[str]:
    """The names in the order in which they would go."""
    index = DiskIndex()
    for victim in entries:
        index.add(victim)
    queue = VictimQueue(index, NOW, protected={victim.key for victim in protected})
    victims = []
    while (victim := queue.pop()) is not None:
        index.remove(victim.key)
        queue.removed(victim)
        victims.append(victim.key.snapshot_id)
    if not protected:
        assert index.total_bytes == 0
    return victims


def names(*entries: DiskEntry | UnreadableEntry) -> list[str]:
    return [victim.key.snapshot_id for victim in entries]


def test_worth_is_tokens_spared_for_bytes_weighted_by_use() -> None:
    """More tokens, fewer bytes, more hits and later ones are worth more."""
    base = worth(entry(1), NOW)
    assert worth(entry(1, count=200), NOW) > base
    assert worth(entry(1, first=50), NOW) < base
    assert worth(entry(1, size=2000), NOW) == pytest.approx(base / 2)
    assert worth(entry(1, hits=1), NOW) > base
    assert worth(entry(1, hits=5), NOW) > worth(entry(1, hits=1), NOW)
    assert worth(entry(1, hits=5, idle_s=HOUR), NOW) > worth(entry(1, hits=5), NOW)
    # A clock that was set back is no reason to keep it for ever.
    assert worth(entry(1, idle_s=-1e6), NOW) == pytest.approx(worth(entry(1, idle_s=0), NOW))


def test_the_least_worth_goes_first() -> None:
    """Never hit and old, then never hit, then hit."""
    old, new = entry(1, idle_s=9 * HOUR), entry(2, idle_s=1 * HOUR)
    some, many = entry(3, hits=2), entry(4, hits=50)
    assert order([many, new, some, old]) == names(old, new, some, many)


def test_new_entries_outlive_old_ones_that_nobody_uses() -> None:
    """A full cache doesn't freeze: even dense entries of yesterday go before a sparse one that is new."""
    stale = [entry(name, count=1000, idle_s=24 * HOUR) for name in range(5)]
    hit_long_ago = [entry(name + 10, count=1000, hits=5, idle_s=7 * 24 * HOUR) for name in range(5)]
    fresh = entry(99, count=100, idle_s=120)
    assert order([*stale, fresh, *hit_long_ago])[-1] == fresh.snapshot_id


def test_what_others_build_on_outlives_them() -> None:
    """However little it is worth by itself; then it goes by its own worth."""
    root = entry(1, count=10, idle_s=50 * HOUR)
    middle = entry(1, count=20, first=10, idle_s=40 * HOUR)
    leaf = entry(1, count=500, first=20, hits=100)
    other = entry(2, hits=1000)
    assert order([root, middle, leaf, other]) == names(leaf, middle, root, other)


def test_the_ends_of_a_tree_go_by_worth() -> None:
    """Two branches of one root: the root is last."""
    root = entry(1, count=50)
    short = entry(1, count=60, first=50, hits=1)
    long = entry(1, count=500, first=50, hits=1)
    assert order([root, long, short]) == names(short, long, root)


def test_what_was_just_used_is_spared() -> None:
    """It goes only when nothing else is left, the one used longest ago first."""
    just, sooner = entry(1, idle_s=5), entry(2, idle_s=50)
    valuable = entry(3, hits=1000, idle_s=61)
    assert order([just, valuable, sooner]) == names(valuable, sooner, just)


def test_what_cannot_be_used_goes_first() -> None:
    """Unreadable entries, then those without what they build on; one that cannot be reached stays."""
    broken = UnreadableEntry(EntryKey(PLAIN.key, "a" * 40), Fault.DAMAGED, "cut", 10, "1")
    foreign = UnreadableEntry(EntryKey("9" * 32, "b" * 40), Fault.FOREIGN, "version 2", 10, "1")
    orphan = entry(1, count=90, first=50, hits=1000, idle_s=1)
    grandchild = entry(1, count=95, first=90, hits=1000, idle_s=1)
    well = entry(2, idle_s=500 * HOUR)
    victims = order([well, orphan, grandchild, foreign, broken])
    assert sorted(victims[:2]) == sorted(names(broken, foreign))
    assert victims[2:] == names(grandchild, orphan, well)
    unreachable = UnreadableEntry(EntryKey(PLAIN.key, "c" * 40), Fault.UNREACHABLE, "EIO", 0, "")
    assert order([unreachable]) == []


def test_protected_entries_stay() -> None:
    """And so does all that they build on."""
    root, leaf, other = entry(1, count=50), entry(1, count=60, first=50), entry(2, hits=9)
    assert order([root, leaf, other], leaf) == names(other)


def test_many_entries_are_ranked_quickly() -> None:
    """Ten thousand in long chains: each is looked at a few times."""
    tokens = ids(400)
    chain = [entry(0, count=count, first=count - 1) for count in range(2, 400)]
    many = [entry(name, count=len(tokens)) for name in range(1, 4000)]
    started = time.process_time()
    assert len(order([entry(0, count=1), *chain, *many])) == len(chain) + len(many) + 1
    assert time.process_time() - started < 3


async def test_the_budget_holds_at_every_moment(store: Store) -> None:
    """Room is made before anything is written; new saves always get some; what is left can be restored."""
    size = 8400
    cache = disk_cache(store, budget_bytes=5 * size)
    await cache.start()
    for seed in range(20):
        saved = await save(cache, ids(50, seed=seed))
        assert saved.written
        assert used(store) <= 5 * size
        newest = cache.find(PLAIN, ids(50, seed=seed))
        assert newest is not None
        await restore(cache, newest)
    left = [seed for seed in range(20) if cache.find(PLAIN, ids(50, seed=seed)) is not None]
    assert left == [15, 16, 17, 18, 19]


async def test_a_growing_conversation_is_not_stuck_at_one_depth(store: Store) -> None:
    """With a full cache each turn still gets deeper: others' entries go, never its own ancestors."""
    cache = disk_cache(store, budget_bytes=60_000)
    await cache.start()
    for seed in range(1, 8):
        await save(cache, ids(50, seed=seed))
    depth = 0
    for turn in range(1, 8):
        saved = await save(cache, ids(20 * turn), depth)
        assert saved.written, saved
        depth = 20 * turn
        assert cache.find(PLAIN, ids(1000)).token_count == depth  # type: ignore[union-attr]
    await restore(cache, cache.find(PLAIN, ids(1000)))  # type: ignore[arg-type]
    assert used(store) <= 60_000


async def test_a_chain_that_fills_the_budget_is_not_eaten_by_its_own_end(store: Store) -> None:
    """Refused and told; nothing is removed in vain."""
    cache = disk_cache(store, budget_bytes=22_000)
    await cache.start()
    await save(cache, ids(20, seed=2))
    await save(cache, ids(50))
    await save(cache, ids(90), 50)
    before = store.entries(PLAIN.key)
    refused = await save(cache, ids(130), 90)
    assert "must stay" in refused.refusal
    assert store.entries(PLAIN.key) == before
    # Another conversation may still take its place.
    assert (await save(cache, ids(80, seed=1))).written


async def test_saves_on_their_way_count(store: Store) -> None:
    """Several at once share the budget: none is promised room that another has."""
    cache = disk_cache(store, budget_bytes=30_000)
    await cache.start()

    async def slow(seed: int) -> AsyncIterator[SnapshotFrame]:
        async for frame in export(PLAIN, STAGE, LayerRange(0, LAYERS), ids(60, seed=seed)):
            await asyncio.sleep(0.002)
            yield frame

    saved = await asyncio.gather(
        *(
            cache.save(PLAIN, ids(60, seed=seed), 0, None, [PartSource(STAGE, LayerRange(0, LAYERS), slow(seed))])
            for seed in range(6)
        )
    )
    assert used(store) <= 30_000
    assert 2 <= sum(result.written for result in saved) < 6
    for seed, result in enumerate(saved):
        assert result.written != bool(result.refusal)
        assert (cache.find(PLAIN, ids(60, seed=seed)) is not None) == result.written
    assert leftovers(store) == []


async def test_starting_with_a_smaller_budget_prunes(cache: DiskCache, store: Store) -> None:
    """Down to it, whatever was kept before, and of whichever model."""
    for seed in range(6):
        await save(cache, ids(50, seed=seed))
    with structlog.testing.capture_logs() as logs:
        smaller = disk_cache(store, budget_bytes=20_000)
        await smaller.start()
    assert len(store.entries(PLAIN.key)) == 2
    assert [log["event"] for log in logs].count("prefix.disk_evicted") == 4
    other = DiskCache(store, [Lineage("model-b", "float32", "", None, None)], 2, "b", budget_bytes=9000, min_tokens=1)
    await other.start()
    assert len(store.entries(PLAIN.key)) == 1
    await smaller.refresh()
    assert sum(smaller.find(PLAIN, ids(50, seed=seed)) is not None for seed in range(6)) == 1


async def test_hits_of_another_process_count(cache: DiskCache, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use is read again before something is removed."""
    monkeypatch.setattr("coordinator.prefix.disk.eviction.SPARED_S", 0.0)
    sizes = [(await save(cache, ids(50, seed=seed))).size_bytes for seed in range(3)]
    # The one that would go first.
    chosen = sizes.index(max(sizes))
    smaller = DiskCatalog(store, budget_bytes=9000)
    await smaller.load()
    other = disk_cache(store)
    await other.start()
    for _ in range(3):
        await other.record_use(other.find(PLAIN, ids(50, seed=chosen)))  # type: ignore[arg-type]
    await smaller.prune()
    await other.refresh()
    assert [other.find(PLAIN, ids(50, seed=seed)) is not None for seed in range(3)] == [
        seed == chosen for seed in range(3)
    ]


async def test_one_entry_that_cannot_be_removed_does_not_stop_the_others(
    cache: DiskCache, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is passed over with a warning; the save gets its room."""
    for seed in range(3):
        await save(cache, ids(50, seed=seed))
    remove = store.remove
    stuck = EntryKey(PLAIN.key, PLAIN.snapshot_id(ids(50)))

    def removing(key: EntryKey) -> bool:
        if key == stuck:
            raise StoreError("not permitted")
        return remove(key)

    monkeypatch.setattr(store, "remove", removing)
    small = disk_cache(store, budget_bytes=26_000)
    with structlog.testing.capture_logs() as logs:
        await small.start()
        assert (await save(small, ids(50, seed=9))).written
    assert "prefix.disk_evict_failed" in [log["event"] for log in logs]
    assert used(store) <= 26_000


def test_a_budget_of_nothing_is_refused(store: Store) -> None:
    """Rather than emptying the store at the start."""
    with pytest.raises(InvalidArgument, match="budget"):
        disk_cache(store, budget_bytes=0)


def used(store: Store) -> int:
    """Bytes of all committed entries, records of use left out."""
    keys = [EntryKey(lineage, name) for lineage in store.lineages() for name in store.entries(lineage)]
    return sum(store.size_bytes(key) - len(store.read_usage(key) or b"") for key in keys)
