"""A stored snapshot on its way to a worker: the tensors of any range of layers, from whichever files hold them.

The bytes are read on threads, a little ahead of whoever sends them, and not checked: the receiver compares the digests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence

from coordinator.prefix.disk.entries import DiskEntry
from coordinator.prefix.disk.manifest import LOGITS, Part, StoredTensor
from coordinator.prefix.disk.safetensors_file import read_placed
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.stores import EntryKey, PartReader, Store
from services.errors import DataLoss, FailedPrecondition, NotFound
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

_READ_BYTES = 4 * CHUNK_BYTES
_READS_AHEAD = 2

_Choice = tuple[Part, tuple[StoredTensor, ...]]
"""A file, and those of its tensors that are sent."""


async def stored_frames(
    store: Store, entry: DiskEntry, owner: SnapshotOwner, layers: LayerRange | None, fingerprint: str
) -> AsyncGenerator[SnapshotFrame, None]:
    """Yield header, chunks and trailer for one worker. layers: the worker's; None for the draft's state.

    Raises:
        DataLoss: a file is missing, cut off, or its header is not what the manifest says.
        FailedPrecondition: the entry is another model's, or has nothing for this owner and layers.
        StoreError: the store cannot be read now.
    """
    chosen = _choose(entry, owner, layers, fingerprint)
    tensors = [tensor for _, part_tensors in chosen for tensor in part_tensors]
    readers: list[PartReader] = []
    pending: deque[asyncio.Task[bytes]] = deque()
    try:
        await in_thread(_open, store, entry.key, [part for part, _ in chosen], readers)
        yield SnapshotHeader(
            snapshot_id=entry.snapshot_id,
            owner=owner,
            fingerprint=fingerprint,
            layers=layers,
            first_token=entry.first_token,
            token_count=entry.token_count,
            parent_id=entry.parent_id,
            tensors=tuple(SnapshotTensor(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors),
        )
        sent = 0
        runs = iter(_runs(chosen))
        while True:
            while len(pending) <= _READS_AHEAD and (run := next(runs, None)) is not None:
                index, offset, size = run
                pending.append(asyncio.ensure_future(_read(readers[index], chosen[index][0], offset, size)))
            if not pending:
                break
            block = memoryview(await pending.popleft())
            for start in range(0, len(block), CHUNK_BYTES):
                piece = block[start : start + CHUNK_BYTES]
                yield SnapshotChunk(sent, piece)
                sent += len(piece)
        yield SnapshotTrailer(sent, tuple(bytes.fromhex(tensor.sha256) for tensor in tensors))
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for reader in readers:
            reader.close()


def check_file(reader: PartReader, part: Part) -> None:
    """Check a file's size and header. Raises DataLoss when they are not what the manifest says."""
    if reader.size_bytes != part.size_bytes:
        raise DataLoss(f"{part.file} has {reader.size_bytes} bytes, its manifest says {part.size_bytes}")
    placed = {tensor.name: tensor for tensor in read_placed(reader.read, reader.size_bytes)}
    if placed != {tensor.name: tensor.placed for tensor in part.tensors}:
        raise DataLoss(f"{part.file} has other tensors than its manifest says")


def _choose(entry: DiskEntry, owner: SnapshotOwner, layers: LayerRange | None, fingerprint: str) -> tuple[_Choice, ...]:
    """Return the tensors that a worker needs, by file."""
    chosen: list[_Choice] = []
    for part in entry.parts:
        tensors = tuple(tensor for tensor in part.tensors if _belongs_to(tensor, entry, owner, layers))
        if part.owner is not owner or not tensors:
            continue
        if part.fingerprint != fingerprint:
            raise FailedPrecondition(
                f"prefix {entry.snapshot_id[:12]} on disk is of model {part.fingerprint}, not {fingerprint}",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        chosen.append((part, tensors))
    if not chosen or (layers is not None and layers.last > entry.num_layers):
        raise FailedPrecondition(
            f"prefix {entry.snapshot_id[:12]} on disk has nothing of the {owner} with layers {layers}", field="layers"
        )
    return tuple(chosen)


def _belongs_to(tensor: StoredTensor, entry: DiskEntry, owner: SnapshotOwner, layers: LayerRange | None) -> bool:
    if owner is SnapshotOwner.DRAFT or layers is None:
        return True
    if tensor.name == LOGITS:
        return layers.last == entry.num_layers
    return tensor.layer is not None and tensor.layer in layers


def _runs(chosen: Sequence[_Choice]) -> Iterator[tuple[int, int, int]]:
    """Yield the reads to make, in order, as (index of the file, offset, size).

    Tensors that lie side by side are read together, in pieces of bounded size.
    """
    for index, (_, tensors) in enumerate(chosen):
        begin = end = tensors[0].offset
        for tensor in tensors:
            if tensor.offset != end:
                yield from _pieces(index, begin, end)
                begin = tensor.offset
            end = tensor.offset + tensor.size_bytes
        yield from _pieces(index, begin, end)


def _pieces(index: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    for offset in range(begin, end, _READ_BYTES):
        yield index, offset, min(_READ_BYTES, end - offset)


async def _read(reader: PartReader, part: Part, offset: int, size_bytes: int) -> bytes:
    data = await in_thread(reader.read, offset, size_bytes)
    if len(data) != size_bytes:
        raise DataLoss(f"{part.file} ends at {offset + len(data)}, its manifest says {part.size_bytes}")
    return data


def _open(store: Store, key: EntryKey, parts: Sequence[Part], readers: list[PartReader]) -> None:
    """Open and check the parts' files, and append them to `readers`, which the caller closes even when this fails."""
    for part in parts:
        try:
            readers.append(store.open_part(key, part.file))
        except NotFound as error:
            raise DataLoss(f"a file of prefix {key.snapshot_id[:12]} is gone: {error.message}") from error
        check_file(readers[-1], part)
