"""Snapshots as frames, out of the store and back into it, with every byte checked.

It implements the port of `services.rpc.snapshots`. Tensors are joined and hashed on threads of their own: neither the
event loop nor the device waits for that.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import structlog
import torch

from services.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from services.messages.snapshots import (
    KeptSnapshot,
    SnapshotChunk,
    SnapshotFrame,
    SnapshotHeader,
    SnapshotImported,
    SnapshotOwner,
    SnapshotTensor,
    SnapshotTrailer,
)
from services.messages.tensors import CHUNK_BYTES
from shard_worker.cache.prefix_state import GroupKind, Part, TensorGroup, rows_of, tensors_of
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import Snapshot, SnapshotStore

log = structlog.get_logger()


class SnapshotTransfer:
    """The worker's end of SnapshotService. keepers: returns those of the models that are loaded now."""

    def __init__(self, store: SnapshotStore, keepers: Callable[[], Mapping[SnapshotOwner, SnapshotKeeper]]) -> None:
        self._store, self._keepers = store, keepers

    async def export_snapshot(
        self, owner: SnapshotOwner, snapshot_id: str, first_token: int, parent_id: str | None
    ) -> AsyncIterator[SnapshotFrame]:
        keeper = self._keeper(owner)
        snapshot = self._store.find(owner, snapshot_id)
        if snapshot is None:
            raise NotFound(f"no prefix {snapshot_id} of the {owner} is kept here", reason="SNAPSHOT_MISSING")
        if not first_token < snapshot.length or (first_token == 0) != (parent_id is None):
            raise InvalidArgument(
                f"first_token is {first_token} with parent_id {parent_id}; it must be below the prefix's "
                f"{snapshot.length} tokens, and 0 exactly without a parent",
                field="first_token",
            )
        header = SnapshotHeader(
            snapshot_id=snapshot_id,
            owner=owner,
            fingerprint=keeper.fingerprint,
            layers=keeper.layers,
            first_token=first_token,
            token_count=snapshot.length,
            parent_id=parent_id,
            tensors=tensors_of(keeper.groups, first_token, snapshot.length),
        )
        chain = await keeper.thread.submit(keeper.on_host, snapshot, first_token)
        yield header
        offset, digests = 0, []
        tensors = [(group, name) for group, members in enumerate(keeper.groups) for name in range(len(members.names))]

        def prepare(number: int) -> asyncio.Future[tuple[memoryview, bytes]]:
            work = asyncio.to_thread(_tensor_bytes, keeper.groups, chain, *tensors[number], first_token)
            return asyncio.ensure_future(work)

        prepared = prepare(0)
        try:
            for number in range(len(tensors)):
                data, digest = await prepared
                # The next tensor is joined and hashed while this one is sent.
                if number + 1 < len(tensors):
                    prepared = prepare(number + 1)
                digests.append(digest)
                for start in range(0, len(data), CHUNK_BYTES):
                    piece = data[start : start + CHUNK_BYTES]
                    yield SnapshotChunk(offset, piece)
                    offset += len(piece)
        finally:
            prepared.cancel()
        yield SnapshotTrailer(offset, tuple(digests))

    async def import_snapshot(self, header: SnapshotHeader) -> IncomingSnapshot | None:
        keeper = self._keeper(header.owner)
        if header.fingerprint != keeper.fingerprint:
            raise FailedPrecondition(
                f"the prefix is of model {header.fingerprint}, this worker holds {keeper.fingerprint}",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        if header.layers != keeper.layers:
            raise FailedPrecondition(
                f"the prefix has layers {header.layers}, this worker holds {keeper.layers}",
                reason="LAYER_MISMATCH",
                field="layers",
            )
        if header.token_count > keeper.max_length:
            raise InvalidArgument(
                f"token_count is {header.token_count}, the model holds at most {keeper.max_length}", field="token_count"
            )
        if self._store.find(header.owner, header.snapshot_id) is not None:
            return None
        parent = None
        if header.parent_id is not None:
            parent = self._store.find(header.owner, header.parent_id)
            if parent is None or parent.length != header.first_token:
                raise FailedPrecondition(
                    f"the prefix builds on {header.parent_id} with {header.first_token} tokens, which is not kept here",
                    reason="SNAPSHOT_MISSING",
                    field="parent_id",
                )
        expected = tensors_of(keeper.groups, header.first_token, header.token_count)
        if (difference := _difference(header.tensors, expected)) is not None:
            raise InvalidArgument(difference, field="tensors")
        evicted = self._store.reserve(header.size_bytes, parent)
        try:
            pinned = keeper.pinned
            tensors = await keeper.thread.submit(
                lambda: tuple(
                    group.empty(header.first_token, header.token_count, pinned=pinned) for group in keeper.groups
                )
            )
        except BaseException:
            self._store.release(header.size_bytes, parent)
            raise
        snapshot = Snapshot(
            header.snapshot_id,
            header.owner,
            keeper.generation,
            parent,
            header.first_token,
            header.token_count,
            tensors,
            header.size_bytes,
        )
        return IncomingSnapshot(self._store, header, snapshot, keeper.groups, evicted)

    def list_snapshots(self) -> list[KeptSnapshot]:
        return [
            KeptSnapshot(
                snapshot.snapshot_id,
                snapshot.owner,
                snapshot.length,
                None if snapshot.parent is None else snapshot.parent.snapshot_id,
            )
            # What is built on may be anywhere in the order of use, and is shorter.
            for snapshot in sorted(self._store, key=lambda snapshot: snapshot.length)
        ]

    async def free_snapshots(self, snapshot_ids: Sequence[str]) -> int:
        return sum(self._store.free(snapshot_id) for snapshot_id in snapshot_ids)

    def _keeper(self, owner: SnapshotOwner) -> SnapshotKeeper:
        keeper = self._keepers().get(owner)
        if keeper is None:
            raise FailedPrecondition(f"no {owner} is loaded on this worker", reason="NOT_LOADED", field="owner")
        return keeper


class IncomingSnapshot:
    """A snapshot on its way into the store. Implements `services.rpc.snapshots.SnapshotImport`."""

    def __init__(
        self,
        store: SnapshotStore,
        header: SnapshotHeader,
        snapshot: Snapshot,
        groups: Sequence[TensorGroup],
        evicted: tuple[str, ...],
    ) -> None:
        """snapshot: has room reserved in the store, and memory for its tensors, which the frames fill. evicted: the
        names of those that were dropped for it."""
        self._store, self._header, self._snapshot, self._evicted = store, header, snapshot, evicted
        tensors = {
            name: group_tensor[position]
            for group, group_tensor in zip(groups, snapshot.tensors, strict=True)
            if isinstance(group_tensor, torch.Tensor)
            for position, name in enumerate(group.names)
        }
        # In the header's order: where each tensor's bytes go.
        self._buffers = [_bytes_of(tensors[tensor.name]) for tensor in header.tensors]
        self._digests: list[asyncio.Future[bytes]] = []
        self._received = self._current = self._filled = 0
        self._open = True
        self._skip_empty()

    async def write(self, chunk: SnapshotChunk) -> None:
        end = chunk.offset + len(chunk.data)
        if chunk.offset != self._received or end > self._header.size_bytes:
            raise InvalidArgument(
                f"chunk [{chunk.offset}, {end}) is out of order: expected to go on at {self._received} of "
                f"{self._header.size_bytes}",
                field="chunk.offset",
            )
        data = memoryview(chunk.data)
        while data:
            buffer = self._buffers[self._current]
            piece = data[: len(buffer) - self._filled]
            buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            data = data[len(piece) :]
            self._skip_empty()
        self._received = end

    async def commit(self, trailer: SnapshotTrailer) -> SnapshotImported:
        header = self._header
        if not self._received == trailer.total_bytes == header.size_bytes:
            raise DataLoss(
                f"the prefix has {header.size_bytes} bytes, {self._received} came and the trailer says "
                f"{trailer.total_bytes}",
                field="trailer.total_bytes",
            )
        if len(trailer.tensor_sha256) != len(header.tensors):
            raise DataLoss(
                f"the trailer has {len(trailer.tensor_sha256)} digests for {len(header.tensors)} tensors",
                field="trailer.tensor_sha256",
            )
        for tensor, expected, digest in zip(header.tensors, trailer.tensor_sha256, self._digests, strict=True):
            if await digest != expected:
                raise DataLoss(
                    f"the bytes of {tensor.name} don't match their digest: damaged on the way or in the store",
                    reason="DIGEST_MISMATCH",
                    field=tensor.name,
                )
        self._open = False
        if not self._store.put(self._snapshot):
            raise FailedPrecondition("the model or the prefix that it builds on is gone", reason="SNAPSHOT_MISSING")
        # Another import may have brought the same name meanwhile.
        added = self._store.find(header.owner, header.snapshot_id) is self._snapshot
        log.info(
            "snapshot.imported",
            slot=header.snapshot_id[:12],
            owner=str(header.owner),
            position=header.token_count,
            bytes=header.size_bytes,
        )
        return SnapshotImported(header.size_bytes if added else 0, self._evicted)

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._store.release(self._snapshot.size_bytes, self._snapshot.parent)
        for digest in self._digests:
            digest.cancel()

    def _skip_empty(self) -> None:
        """Go on to the next tensor when the current one is whole; its digest is computed meanwhile."""
        while self._current < len(self._buffers) and self._filled == len(self._buffers[self._current]):
            buffer = self._buffers[self._current]
            self._digests.append(asyncio.ensure_future(asyncio.to_thread(_sha256, buffer)))
            self._current, self._filled = self._current + 1, 0


def _tensor_bytes(
    groups: Sequence[TensorGroup], chain: Sequence[Part], index: int, name: int, first_token: int
) -> tuple[memoryview, bytes]:
    """Return one tensor's bytes and their digest: of the group `index` the tensor `name`, both counted from 0.

    chain: the snapshot and those that it builds on, in host memory.
    """
    group = groups[index]
    _, length, items = chain[-1]
    with torch.inference_mode():
        if group.kind is GroupKind.ROWS:
            pieces = [rows for _, _, rows in rows_of(group, index, chain, first_token, length)]
            rows = [piece[name] for piece in pieces if isinstance(piece, torch.Tensor)]
            tensor = rows[0] if len(rows) == 1 else torch.cat(rows, -2)
        else:
            state = items[index]
            assert isinstance(state, torch.Tensor)
            tensor = state[name]
        data = _bytes_of(tensor.contiguous())
    return data, _sha256(data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's own memory."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().reshape(-1).data


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _difference(announced: Sequence[SnapshotTensor], expected: Sequence[SnapshotTensor]) -> str | None:
    """Say what is the first thing in which announced tensors differ from those of the loaded model; None for nothing.

    Their order may be any.
    """
    own = {tensor.name: tensor for tensor in expected}
    others = {tensor.name: tensor for tensor in announced}
    if len(others) < len(announced):
        return "a tensor is named twice"
    for name in sorted({*others, *own}):
        if name not in others:
            return f"tensor {name} is missing: a set must be complete"
        if name not in own:
            return f"tensor {name} is not part of these layers"
        if others[name] != own[name]:
            return f"tensor {name} is announced as {others[name]}; expected {own[name]}"
    return None
