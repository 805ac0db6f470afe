"""Workers' exports and imports of made-up snapshots, by the book: what a store gets, and what must come back."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import fsspec

from coordinator.prefix.disk.disk_cache import DiskCache, DiskEntry, PartSource, Saved
from coordinator.prefix.lineage import Lineage
from coordinator.prefix.stores import Store
from services.errors import DataLoss
from services.layers import LayerRange
from services.messages.snapshots import (
    SnapshotChunk,
    SnapshotFrame,
    SnapshotHeader,
    SnapshotOwner,
    SnapshotTensor,
    SnapshotTrailer,
)
from services.messages.tensors import CHUNK_BYTES

LAYERS = 6
PLAIN = Lineage("model-a", "bfloat16", "text-a", None, None)
DRAFTED = Lineage("model-a", "bfloat16", "text-a", "draft-a", "float32")
FINGERPRINTS = {SnapshotOwner.STAGE: "model-a", SnapshotOwner.DRAFT: "draft-a"}

STAGE, DRAFT = SnapshotOwner.STAGE, SnapshotOwner.DRAFT


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids; those of one seed begin alike."""
    return tuple((seed * 7919 + index * 31) % 150_000 for index in range(count))


def tensors(owner: SnapshotOwner, layers: LayerRange | None, first: int, count: int) -> list[SnapshotTensor]:
    """Attention in even layers, recurrent state in odd ones; kind by kind, as workers keep them."""
    rows = count - first
    if owner is DRAFT or layers is None:
        return [SnapshotTensor(f"draft.layers.0.{name}", "float32", (1, rows, 3)) for name in "kv"]
    even = [layer for layer in range(layers.first, layers.last) if layer % 2 == 0]
    odd = [layer for layer in range(layers.first, layers.last) if layer % 2]
    described = [SnapshotTensor(f"layers.{layer}.{name}", "bfloat16", (2, rows, 4)) for name in "kv" for layer in even]
    described += [SnapshotTensor(f"layers.{layer}.recurrent", "float32", (2, 3, 3)) for layer in odd]
    if layers.last == LAYERS:
        described.append(SnapshotTensor("logits", "float32", (11,)))
    return described


def content(tensor: SnapshotTensor, token_ids: Sequence[int], first: int) -> bytes:
    """A tensor's bytes: its own for each name and prefix."""
    seed = f"{tensor.name} {first} {hashlib.sha256(repr(tuple(token_ids)).encode()).hexdigest()}".encode()
    return hashlib.shake_256(seed).digest(tensor.size_bytes)


def contents(owner: SnapshotOwner, layers: LayerRange | None, token_ids: Sequence[int], first: int) -> dict[str, bytes]:
    """What a worker's snapshot must hold."""
    return {tensor.name: content(tensor, token_ids, first) for tensor in tensors(owner, layers, first, len(token_ids))}


async def export(
    lineage: Lineage,
    owner: SnapshotOwner,
    layers: LayerRange | None,
    token_ids: Sequence[int],
    first: int = 0,
    *,
    chunk_bytes: int = 777,
) -> AsyncIterator[SnapshotFrame]:
    """What a worker sends. Chunks don't care where a tensor ends."""
    held = tensors(owner, layers, first, len(token_ids))
    yield SnapshotHeader(
        snapshot_id=lineage.snapshot_id(token_ids),
        owner=owner,
        fingerprint=FINGERPRINTS[owner],
        layers=layers,
        first_token=first,
        token_count=len(token_ids),
        parent_id=lineage.snapshot_id(token_ids[:first]) if first else None,
        tensors=tuple(held),
    )
    pieces = [content(tensor, token_ids, first) for tensor in held]
    whole = b"".join(pieces)
    for offset in range(0, len(whole), chunk_bytes):
        yield SnapshotChunk(offset, whole[offset : offset + chunk_bytes])
    yield SnapshotTrailer(len(whole), tuple(hashlib.sha256(piece).digest() for piece in pieces))


def sources(
    lineage: Lineage, token_ids: Sequence[int], first: int = 0, edges: Iterable[int] = (0, 4, LAYERS)
) -> list[PartSource]:
    """All workers' exports; edges: the split."""
    bounds = list(edges)
    found: list[PartSource] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        layers = LayerRange(begin, end)
        found.append(PartSource(STAGE, layers, export(lineage, STAGE, layers, token_ids, first)))
    if lineage.draft is not None:
        found.append(PartSource(DRAFT, None, export(lineage, DRAFT, None, token_ids, first)))
    return found


async def save(
    cache: DiskCache,
    token_ids: Sequence[int],
    first: int = 0,
    lineage: Lineage = PLAIN,
    edges: Iterable[int] = (0, 4, LAYERS),
) -> Saved:
    """Save one entry on its parent."""
    parent = lineage.snapshot_id(token_ids[:first]) if first else None
    return await cache.save(lineage, token_ids, first, parent, sources(lineage, token_ids, first, edges))


async def take_in(frames: AsyncIterator[SnapshotFrame]) -> dict[str, bytes]:
    """Import as a worker does. Raises DataLoss when a digest doesn't match."""
    header = await anext(frames)
    assert isinstance(header, SnapshotHeader)
    data = bytearray()
    trailer = None
    async for frame in frames:
        assert trailer is None, "something came after the trailer"
        if isinstance(frame, SnapshotTrailer):
            trailer = frame
            continue
        assert isinstance(frame, SnapshotChunk)
        assert frame.offset == len(data)
        assert 0 < len(frame.data) <= CHUNK_BYTES
        data += frame.data
    assert trailer is not None, "no trailer came"
    assert trailer.total_bytes == len(data) == header.size_bytes
    assert len(trailer.tensor_sha256) == len(header.tensors)
    imported, offset = {}, 0
    for tensor, digest in zip(header.tensors, trailer.tensor_sha256, strict=True):
        imported[tensor.name] = bytes(data[offset : offset + tensor.size_bytes])
        offset += tensor.size_bytes
        if hashlib.sha256(imported[tensor.name]).digest() != digest:
            raise DataLoss(f"{tensor.name} does not match its digest")
    return imported


async def restore(cache: DiskCache, entry: DiskEntry, edges: Iterable[int] = (0, LAYERS)) -> None:
    """Import an entry's chain into workers with this split and compare every byte with what was exported."""
    bounds = list(edges)
    chain = cache.chain(entry)
    assert chain, "the chain is broken"
    assert chain[-1].snapshot_id == entry.snapshot_id
    for node in chain:
        for begin, end in zip(bounds, bounds[1:], strict=False):
            layers = LayerRange(begin, end)
            imported = await take_in(cache.frames(node, STAGE, layers, FINGERPRINTS[STAGE]))
            assert imported == contents(STAGE, layers, node.token_ids, node.first_token)
        if node.lineage.draft is not None:
            imported = await take_in(cache.frames(node, DRAFT, None, FINGERPRINTS[DRAFT]))
            assert imported == contents(DRAFT, None, node.token_ids, node.first_token)


def files_of(store: Store) -> list[str]:
    """All files of a store, relative to it, hidden ones at its top left out."""
    if store.location.startswith("memory://"):
        root = "/" + store.location.removeprefix("memory://")
        paths = [path.removeprefix(f"{root}/") for path in fsspec.filesystem("memory").find(root)]
    else:
        base = Path(store.location)
        paths = [str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()]
    return sorted(path for path in paths if not path.startswith("."))


def leftovers(store: Store) -> list[str]:
    """Files and temporary directories that belong to no entry."""
    entries = {f"{lineage}/{name}" for lineage in store.lineages() for name in store.entries(lineage)}
    paths = [path for path in files_of(store) if path.rpartition("/")[0] not in entries]
    if not store.location.startswith("memory://"):
        base = Path(store.location)
        paths += [str(path.relative_to(base)) for path in base.glob("*/.*")]
    return paths
