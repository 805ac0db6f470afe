"""Saving, finding and restoring prefixes through a store, whatever kind it is and however the layers are split."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import structlog

from coordinator.prefix.disk.disk_cache import DiskCache, PartSource
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.lineage import Lineage
from coordinator.prefix.stores import Store
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, Unavailable
from services.layers import LayerRange
from services.messages.snapshots import SnapshotChunk, SnapshotFrame, SnapshotHeader, SnapshotTensor, SnapshotTrailer
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import (
    DRAFT,
    DRAFTED,
    FINGERPRINTS,
    LAYERS,
    PLAIN,
    STAGE,
    contents,
    export,
    ids,
    leftovers,
    restore,
    save,
    sources,
    take_in,
)


@pytest.mark.parametrize("lineage", [PLAIN, DRAFTED], ids=["plain", "drafted"])
@pytest.mark.parametrize("saved", [(0, 6), (0, 4, 6), (0, 1, 2, 3, 4, 5, 6)])
async def test_any_split_restores_what_any_other_saved(cache: DiskCache, lineage: Lineage, saved: tuple[int]) -> None:
    """Every byte comes back, in this process and the next, over other boundaries."""
    assert (await save(cache, ids(20), lineage=lineage, edges=saved)).written
    entry = cache.find(lineage, ids(20))
    assert entry is not None
    assert entry.token_ids == ids(20)
    for edges in ((0, 6), (0, 3, 6), (0, 2, 5, 6), (0, 1, 2, 3, 4, 5, 6)):
        await restore(cache, entry, edges)


async def test_a_chain_is_restored_by_the_next_process(cache: DiskCache, store: Store) -> None:
    """Entries that hold only what they add, found again after a restart under another split."""
    first = await save(cache, ids(10))
    second = await save(cache, ids(25), 10, edges=(0, 2, LAYERS))
    third = await save(cache, ids(26), 25, edges=(0, LAYERS))
    assert [result.written for result in (first, second, third)] == [True] * 3
    later = disk_cache(store)
    await later.start()
    entry = later.find(PLAIN, ids(40))
    assert entry is not None
    assert (entry.token_count, entry.first_token, entry.tokens_gained) == (26, 25, 1)
    assert [node.snapshot_id for node in later.chain(entry)] == [
        first.snapshot_id,
        second.snapshot_id,
        third.snapshot_id,
    ]
    assert entry.model_name == "tiny"
    await restore(later, entry, (0, 5, LAYERS))


async def test_the_longest_prefix_is_found(cache: DiskCache) -> None:
    """Longest first, equal allowed, other tokens or lineages never."""
    for count in (4, 9, 30):
        await save(cache, ids(count))
    await save(cache, ids(9, seed=1))

    def found(*args: object, **options: bool) -> int | None:
        entry = cache.find(*args, **options)  # type: ignore[arg-type]
        return None if entry is None else entry.token_count

    assert found(PLAIN, ids(3)) is None
    assert found(PLAIN, ids(4)) == 4
    assert found(PLAIN, ids(8)) == 4
    assert found(PLAIN, ids(29)) == 9
    assert found(PLAIN, ids(500)) == 30
    assert found(PLAIN, [*ids(8), 5, *ids(30)[9:]]) == 4
    assert found(PLAIN, [7, *ids(30)[1:]]) is None
    assert found(PLAIN, ids(30, seed=1)) == 9
    assert found(DRAFTED, ids(30)) is None
    assert found(replace(PLAIN, text="text-b"), ids(30)) is None
    assert found(PLAIN, ()) is None
    assert found(PLAIN, ids(29), whole=True) is None
    assert found(PLAIN, ids(30), whole=True) == 30


async def test_a_hash_that_collides_is_no_hit(cache: DiskCache) -> None:
    """An entry under the right name with other tokens is not found: tokens are compared in full."""
    entry = (await save(cache, ids(10))).entry
    assert entry is not None
    index = DiskIndex()
    other = ids(10, seed=1)
    index.add(replace(entry, snapshot_id=PLAIN.snapshot_id(other)))
    assert index.find(PLAIN, other) is None
    index.add(entry)
    assert index.find(PLAIN, ids(10)) is entry


async def test_what_is_there_is_not_written_twice(cache: DiskCache, store: Store) -> None:
    """Neither by this process nor by one that started earlier; the exports are ended at once."""
    other = disk_cache(store)
    await other.start()
    assert (await save(cache, ids(10))).written
    for server in (cache, other):
        asked = sources(PLAIN, ids(10))
        again = await server.save(PLAIN, ids(10), 0, None, asked)
        assert not again.written
        assert again.refusal == ""
        assert again.entry is not None
        for source in asked:
            assert await anext(source.frames, None) is None
    assert other.has(PLAIN.snapshot_id(ids(10)))


async def test_refresh_sees_what_others_did(cache: DiskCache, store: Store) -> None:
    """Entries that another process adds or removes, without a restart."""
    other = disk_cache(store)
    await other.start()
    await save(cache, ids(10))
    assert other.find(PLAIN, ids(10)) is None
    await other.refresh()
    entry = other.find(PLAIN, ids(10))
    assert entry is not None
    await restore(other, entry)
    await other.discard(entry, "test")
    assert cache.find(PLAIN, ids(10)) is not None
    await cache.refresh()
    assert cache.find(PLAIN, ids(10)) is None
    assert not cache.has(entry.snapshot_id)


async def test_an_entry_replaced_by_another_process_is_read_anew(cache: DiskCache, store: Store) -> None:
    """Removed and saved with another split between two looks: the new files are used, and a stale verdict spares it."""
    await save(cache, ids(10), edges=(0, 4, LAYERS))
    stale = cache.find(PLAIN, ids(10))
    assert stale is not None
    other = disk_cache(store)
    await other.start()
    await other.discard(stale, "test")
    await save(other, ids(10), edges=(0, 1, LAYERS))
    await cache.discard(stale, "files are gone")
    fresh = cache.find(PLAIN, ids(10))
    assert fresh is not None
    await restore(cache, fresh)


async def test_use_is_remembered(cache: DiskCache, store: Store) -> None:
    """Hits and the time of use outlive the process; ancestors are used with what builds on them."""
    await save(cache, ids(10))
    await save(cache, ids(20), 10)
    entry = cache.find(PLAIN, ids(20))
    assert entry is not None
    await cache.record_use(entry)
    await cache.record_use(entry)
    later = disk_cache(store)
    await later.start()
    for server in (cache, later):
        leaf = server.find(PLAIN, ids(20))
        root = server.find(PLAIN, ids(10))
        assert leaf is not None
        assert root is not None
        assert (leaf.usage.hits, root.usage.hits) == (2, 0)
        assert leaf.usage.last_used == root.usage.last_used > 0
    await cache.discard(entry, "test")
    await later.record_use(leaf)
    await later.refresh()
    assert later.find(PLAIN, ids(20)).token_count == 10  # type: ignore[union-attr]


async def test_discarding_takes_what_builds_on_it(cache: DiskCache, store: Store) -> None:
    """The entry and its descendants go, from memory and store; others stay."""
    await save(cache, ids(10))
    await save(cache, ids(20), 10)
    await save(cache, ids(30), 20)
    await save(cache, ids(10, seed=1))
    entry = cache.find(PLAIN, ids(20))
    assert entry is not None
    with structlog.testing.capture_logs() as logs:
        await cache.discard(entry, "bad bytes")
    assert [(log["event"], log["log_level"], log["entries"]) for log in logs] == [
        ("prefix.disk_discarded", "warning", 2)
    ]
    assert cache.find(PLAIN, ids(30)).token_count == 10  # type: ignore[union-attr]
    assert len(store.entries(PLAIN.key)) == 2


async def test_an_entry_without_its_parent_is_no_hit_until_the_parent_is_back(cache: DiskCache, store: Store) -> None:
    """Another process may evict what one here builds on."""
    await save(cache, ids(10))
    await save(cache, ids(20), 10)
    root = cache.find(PLAIN, ids(10))
    assert root is not None
    store.remove(root.key)
    await cache.refresh()
    assert cache.find(PLAIN, ids(20)) is None
    assert not cache.has(PLAIN.snapshot_id(ids(20)))
    await save(cache, ids(10))
    entry = cache.find(PLAIN, ids(20))
    assert entry is not None
    await restore(cache, entry)
    # Gone once more; this time it is saved from its first token on, in the orphan's place.
    store.remove(root.key)
    assert (await save(cache, ids(20))).written
    entry = cache.find(PLAIN, ids(20))
    assert entry is not None
    assert entry.first_token == 0
    await restore(cache, entry)


async def test_saves_that_cannot_be(cache: DiskCache, store: Store) -> None:
    """A missing parent, too few tokens, too little room and a closed cache are told, not raised."""
    orphan = await save(cache, ids(20), 10)
    assert "builds on" in orphan.refusal
    few = disk_cache(store, min_tokens=64)
    assert "64" in (await save(few, ids(63))).refusal
    small = disk_cache(store, budget_bytes=1000)
    refused = await save(small, ids(50))
    assert "budget" in refused.refusal
    assert refused.size_bytes > 1000
    await cache.close()
    assert "closed" in (await save(cache, ids(50))).refusal
    assert store.entries(PLAIN.key) == {}


async def test_one_save_of_a_kind_at_a_time(cache: DiskCache) -> None:
    """The second of two that meet is refused; the first one's entry is whole."""
    first, second = await asyncio.gather(save(cache, ids(300)), save(cache, ids(300)))
    assert sorted([first.written, second.written]) == [False, True]
    assert "already" in (first.refusal or second.refusal)
    entry = cache.find(PLAIN, ids(300))
    assert entry is not None
    await restore(cache, entry)


async def test_many_saves_at_once(cache: DiskCache) -> None:
    """Different prefixes don't wait for each other and don't mix."""
    saved = await asyncio.gather(*(save(cache, ids(40 + seed, seed=seed)) for seed in range(12)))
    assert all(result.written for result in saved)
    for result in saved:
        assert result.entry is not None
        await restore(cache, result.entry)


async def test_a_large_part_travels_in_small_chunks(cache: DiskCache) -> None:
    """Several MiB, several reads ahead, other boundaries."""
    count = 40_000
    assert (await save(cache, ids(count), edges=(0, LAYERS))).written
    entry = cache.find(PLAIN, ids(count))
    assert entry is not None
    await restore(cache, entry, (0, 3, LAYERS))


async def test_reading_can_be_given_up(cache: DiskCache) -> None:
    """A restore that is closed or cancelled halfway leaves nothing open; the next one is whole."""
    await save(cache, ids(40_000))
    entry = cache.find(PLAIN, ids(40_000))
    assert entry is not None
    frames = cache.frames(entry, STAGE, LayerRange(0, LAYERS), "model-a")
    for _ in range(3):
        await anext(frames)
    await frames.aclose()
    for count in range(4):
        stopped = asyncio.ensure_future(_read_some(cache.frames(entry, STAGE, LayerRange(0, LAYERS), "model-a"), count))
        with pytest.raises(asyncio.CancelledError):
            await stopped
    await restore(cache, entry)


async def test_the_events_of_a_save(cache: DiskCache) -> None:
    """One line, with the figures."""
    with structlog.testing.capture_logs() as logs:
        saved = await save(cache, ids(10))
    (line,) = logs
    assert line["event"] == "prefix.disk_saved"
    assert line["snapshot_id"] == saved.snapshot_id[:12]
    assert (line["tokens"], line["bytes"]) == (10, saved.size_bytes)
    assert line["ms"] > 0
    assert saved.entry is not None
    assert saved.entry.size_bytes == saved.size_bytes


async def test_what_frames_refuses(cache: DiskCache) -> None:
    """Another model's bytes, layers that the model doesn't have, a draft that isn't there."""
    await save(cache, ids(10))
    entry = cache.find(PLAIN, ids(10))
    assert entry is not None
    for owner, layers, fingerprint in (
        (STAGE, LayerRange(0, 6), "model-b"),
        (STAGE, LayerRange(4, 7), "model-a"),
        (DRAFT, None, "draft-a"),
    ):
        with pytest.raises(FailedPrecondition):
            await take_in(cache.frames(entry, owner, layers, fingerprint))


async def test_a_foreign_lineage_is_refused(cache: DiskCache) -> None:
    """Saving for a model that the cache was not made for is a mistake of the caller's."""
    with pytest.raises(InvalidArgument, match="lineage"):
        await save(cache, ids(10), lineage=replace(PLAIN, model="model-b"))


# --- exports that break the rules

Frames = list[SnapshotFrame]


def _swap_header(frames: Frames, **changes: object) -> Frames:
    assert isinstance(frames[0], SnapshotHeader)
    return [replace(frames[0], **changes), *frames[1:]]  # type: ignore[arg-type]


def _shift(frames: Frames) -> Frames:
    assert isinstance(frames[2], SnapshotChunk)
    return [*frames[:2], replace(frames[2], offset=frames[2].offset + 1), *frames[3:]]


def _trailer(frames: Frames, **changes: object) -> Frames:
    assert isinstance(frames[-1], SnapshotTrailer)
    return [*frames[:-1], replace(frames[-1], **changes)]  # type: ignore[arg-type]


def _rename(frames: Frames, names: dict[str, str]) -> Frames:
    assert isinstance(frames[0], SnapshotHeader)
    renamed = tuple(replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in frames[0].tensors)
    return _swap_header(frames, tensors=renamed)


BROKEN = {
    "nothing": lambda frames: [],
    "no header": lambda frames: frames[1:],
    "header twice": lambda frames: [frames[0], *frames],
    "other snapshot": lambda frames: _swap_header(frames, snapshot_id=PLAIN.snapshot_id(ids(9))),
    "other owner": lambda frames: _swap_header(frames, owner=DRAFT, layers=None),
    "other layers": lambda frames: _swap_header(frames, layers=LayerRange(3, 6)),
    "other length": lambda frames: _swap_header(frames, token_count=11),
    "other start": lambda frames: _swap_header(frames, first_token=1, parent_id="x"),
    "a gap": _shift,
    "a chunk too few": lambda frames: [*frames[:-2], frames[-1]],
    "a chunk twice": lambda frames: [*frames[:2], *frames[1:]],
    "a chunk too many": lambda frames: [*frames[:-1], SnapshotChunk(frames[-1].total_bytes, b"x"), frames[-1]],
    "no trailer": lambda frames: frames[:-1],
    "trailer twice": lambda frames: [*frames, frames[-1]],
    "chunk behind the trailer": lambda frames: [*frames, frames[1]],
    "trailer's total": lambda frames: _trailer(frames, total_bytes=frames[-1].total_bytes + 1),
    "a digest too few": lambda frames: _trailer(frames, tensor_sha256=frames[-1].tensor_sha256[1:]),
    "another model": lambda frames: _swap_header(frames, fingerprint="model-b"),
    "another layer's tensor": lambda frames: _rename(frames, {"layers.4.k": "layers.0.k"}),
    "a name that leads elsewhere": lambda frames: _rename(frames, {"layers.4.k": "layers.4.k/../../x"}),
    "the format's own name": lambda frames: _rename(frames, {"layers.4.k": "__metadata__"}),
    "a name twice": lambda frames: _rename(frames, {"layers.4.v": "layers.4.k"}),
    "no logits": lambda frames: _rename(frames, {"logits": "layers.5.logits"}),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_exports_that_break_the_rules_leave_nothing(cache: DiskCache, store: Store, fault: str) -> None:
    """Refused by name; no entry, no file, and the same prefix can be saved right after."""
    honest = PartSource(STAGE, LayerRange(0, 4), export(PLAIN, STAGE, LayerRange(0, 4), ids(10)))
    frames = [frame async for frame in export(PLAIN, STAGE, LayerRange(4, 6), ids(10), chunk_bytes=60)]

    async def broken() -> AsyncIterator[SnapshotFrame]:
        for frame in BROKEN[fault](frames):
            yield frame

    with pytest.raises(InvalidArgument):
        await cache.save(PLAIN, ids(10), 0, None, [honest, PartSource(STAGE, LayerRange(4, 6), broken())])
    assert await anext(honest.frames, None) is None
    _nothing_left(store)
    assert (await save(cache, ids(10))).written


async def test_layers_that_nobody_exports_are_missed(cache: DiskCache, store: Store) -> None:
    """Gaps and overlaps between the parts, a missing or unexpected draft, and no parts at all."""
    for edges in ((0, 4), (1, 6), (0, 6, 6), ()):
        with pytest.raises(InvalidArgument):
            await save(cache, ids(10), edges=edges)
    twice = [*sources(PLAIN, ids(10)), *sources(PLAIN, ids(10))]
    for lineage, parts in (
        (PLAIN, twice),
        (PLAIN, sources(DRAFTED, ids(10))),
        (DRAFTED, sources(DRAFTED, ids(10))[:-1]),
    ):
        with pytest.raises(InvalidArgument):
            await cache.save(lineage, ids(10), 0, None, parts)
    _nothing_left(store)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("error", [Unavailable("stage 1 is gone"), RuntimeError("a bug"), asyncio.CancelledError()])
async def test_an_export_that_fails_leaves_nothing(
    cache: DiskCache, store: Store, at: int, error: BaseException
) -> None:
    """Whatever a stream raises, and whenever, is raised; the other streams are ended, the files removed."""
    honest = PartSource(STAGE, LayerRange(0, 4), export(PLAIN, STAGE, LayerRange(0, 4), ids(10)))

    async def failing() -> AsyncIterator[SnapshotFrame]:
        count = 0
        async for frame in export(PLAIN, STAGE, LayerRange(4, 6), ids(10), chunk_bytes=60):
            if count == at:
                raise error
            count += 1
            yield frame

    parts = [honest, PartSource(STAGE, LayerRange(4, 6), failing())]
    with pytest.raises(type(error)):
        await cache.save(PLAIN, ids(10), 0, None, parts)
    assert await anext(honest.frames, None) is None
    _nothing_left(store)


async def test_a_save_that_is_cancelled_leaves_nothing(cache: DiskCache, store: Store) -> None:
    """At any moment; a worker that hangs doesn't keep other saves from ending."""
    is_hanging = asyncio.Event()

    async def hanging() -> AsyncIterator[SnapshotFrame]:
        async for frame in export(PLAIN, STAGE, LayerRange(0, LAYERS), ids(300)):
            yield frame
            if isinstance(frame, SnapshotChunk):
                is_hanging.set()
                await asyncio.Event().wait()

    async def hang() -> None:
        await cache.save(PLAIN, ids(300), 0, None, [PartSource(STAGE, LayerRange(0, LAYERS), hanging())])

    stuck = asyncio.ensure_future(hang())
    await asyncio.wait_for(is_hanging.wait(), 10)
    assert (await save(cache, ids(20))).written
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    for step in range(12):
        task = asyncio.ensure_future(save(cache, ids(400, seed=1)))
        await asyncio.sleep(step / 2000)
        task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        entry = cache.find(PLAIN, ids(400, seed=1))
        if entry is not None:
            await restore(cache, entry)
            await cache.discard(entry, "test")
        assert isinstance(done[0], asyncio.CancelledError) or entry is not None
    await cache.refresh()
    entry = cache.find(PLAIN, ids(400, seed=1))
    if entry is not None:
        await restore(cache, entry)
        await cache.discard(entry, "test")
    assert list(store.entries(PLAIN.key)) == [PLAIN.snapshot_id(ids(20))]
    assert leftovers(store) == []


async def test_empty_tensors_travel_too(cache: DiskCache) -> None:
    """A tensor without bytes keeps its place between the others."""

    async def one() -> AsyncIterator[SnapshotFrame]:
        frames = [frame async for frame in export(PLAIN, STAGE, LayerRange(0, LAYERS), ids(5))]
        header, trailer = frames[0], frames[-1]
        assert isinstance(header, SnapshotHeader)
        assert isinstance(trailer, SnapshotTrailer)
        empty = SnapshotTensor("layers.1.tail", "float32", (2, 0, 4))
        digest = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
        yield replace(header, tensors=(empty, *header.tensors, replace(empty, name="layers.2.tail")))
        for frame in frames[1:-1]:
            yield frame
        yield replace(trailer, tensor_sha256=(digest, *trailer.tensor_sha256, digest))

    saved = await cache.save(PLAIN, ids(5), 0, None, [PartSource(STAGE, LayerRange(0, LAYERS), one())])
    assert saved.entry is not None
    imported = await take_in(cache.frames(saved.entry, STAGE, LayerRange(1, 3), FINGERPRINTS[STAGE]))
    expected = contents(STAGE, LayerRange(1, 3), ids(5), 0)
    assert imported == {**expected, "layers.1.tail": b"", "layers.2.tail": b""}


async def _read_some(frames: AsyncIterator[SnapshotFrame], count: int) -> None:
    """Be cancelled while the frame after these is awaited."""
    for _ in range(count):
        await anext(frames)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    async for _ in frames:
        await asyncio.sleep(0)


def _nothing_left(store: Store) -> None:
    assert store.entries(PLAIN.key) == {}
    assert store.entries(DRAFTED.key) == {}
    assert leftovers(store) == []


def test_errors_are_the_projects_own() -> None:
    """What the store raises can be told from what a stream raises, and is a FlashsplitError."""
    from coordinator.prefix.disk.manifest import ManifestError
    from coordinator.prefix.stores import StoreError

    assert issubclass(StoreError, FlashsplitError)
    assert issubclass(ManifestError, FlashsplitError)
