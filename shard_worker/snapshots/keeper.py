"""Saves and restores the state of one loaded model's sessions, a stage's or a draft's, through the worker's store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from services.errors import FailedPrecondition, FlashsplitError, NotFound, ResourceExhausted
from services.layers import LayerRange
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import Location, SnapshotPart, SnapshotRestore, SnapshotSave
from shard_worker.cache.kept_pages import KeptRows
from shard_worker.cache.prefix_state import Part, StateView, TensorGroup, copy_in, copy_out, trimmable
from shard_worker.device.devices import Device
from shard_worker.device.executor import DeviceThread
from shard_worker.snapshots.store import Snapshot, SnapshotStore

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SnapshotKeeper:
    """One loaded model's way to the store of snapshots.

    owner, fingerprint: whose sessions' state it keeps, and of which model. layers: the stage's, None for a draft.
    max_length: most tokens that a prefix of this model has. groups: what a snapshot consists of. devices: where the
    sessions' state is. generation: the owner's in the store, as it was when the model was loaded.
    """

    store: SnapshotStore
    thread: DeviceThread
    owner: SnapshotOwner
    fingerprint: str
    layers: LayerRange | None
    max_length: int
    groups: tuple[TensorGroup, ...]
    devices: tuple[Device, ...]
    generation: int

    @property
    def pinned(self) -> bool:
        """Whether host memory is page-locked, which GPUs copy from and to at full speed."""
        return any(device.is_gpu for device in self.devices)

    def synchronize(self) -> None:
        """Wait until copies from GPUs are on the host; runs on the device thread."""
        for device in self.devices:
            device.synchronize()

    def on_host(self, snapshot: Snapshot, first_token: int) -> list[Part]:
        """Return what is kept of a prefix's tokens from `first_token` on, as `Snapshot.chain` does, in host memory.

        Runs on the device thread.
        """
        chain: list[Part] = []
        for first, last, items in snapshot.chain():
            if last > first_token:
                # Copied on a CPU too: the pages may be other sessions' before the copy is sent.
                copies = (
                    item.read(group.first_row(first, last), last).to("cpu", copy=True)
                    if isinstance(item, KeptRows)
                    else item
                    for group, item in zip(self.groups, items, strict=True)
                )
                chain.append((first, last, tuple(copies)))
        self.synchronize()
        return chain

    def save(self, save: SnapshotSave, views: Sequence[StateView], location: Location) -> asyncio.Future[SnapshotPart]:
        """Keep a session's state. views: of its memory, one for each group.

        Pages are shared with the session, all else is copied, on a GPU behind the steps so far: later steps may follow
        at once. The future's part says why nothing was kept, if so: a name that is taken, a parent that is not in the
        store, no room.
        """
        started_ns = time.monotonic_ns()

        def part(size_bytes: int, evicted: tuple[str, ...] = (), refusal: str = "") -> SnapshotPart:
            elapsed_ns = time.monotonic_ns() - started_ns
            log.info(
                "snapshot.saved" if not refusal else "snapshot.refused",
                slot=save.snapshot_id[:12],
                owner=str(self.owner),
                position=save.length,
                stage=location.stage,
                bytes=size_bytes,
                ms=round(elapsed_ns / 1e6, 3),
                evicted=len(evicted),
                refusal=refusal or None,
            )
            return SnapshotPart(location, size_bytes, elapsed_ns, evicted, refusal)

        if self.store.find(self.owner, save.snapshot_id) is not None:
            return _done(part(0))
        parent = None
        if save.parent_id is not None:
            parent = self.store.find(self.owner, save.parent_id)
            if parent is None or parent.length >= save.length:
                return _done(part(0, refusal=f"the prefix {save.parent_id} that it builds on is not kept here"))
        first = 0 if parent is None else parent.length
        size_bytes = sum(group.size_bytes(first, save.length) for group in self.groups)
        try:
            evicted = self.store.reserve(size_bytes, parent)
        except ResourceExhausted as error:
            return _done(part(0, refusal=error.message))
        job = self.thread.submit(copy_out, self.groups, views, first, save.length)

        async def finish() -> SnapshotPart:
            try:
                tensors = await job
            except BaseException as error:
                self.store.release(size_bytes, parent)
                if isinstance(error, FlashsplitError):
                    return part(0, evicted, error.message)
                raise
            snapshot = Snapshot(
                save.snapshot_id, self.owner, self.generation, parent, first, save.length, tensors, size_bytes
            )
            if not self.store.put(snapshot):
                return part(0, evicted, "the model or the prefix that it builds on is gone")
            return part(size_bytes, evicted)

        # Shielded: its caller may be cancelled, even before it begins, and the room must not stay reserved.
        return asyncio.shield(finish())

    async def restore(self, restore: SnapshotRestore, views: Sequence[StateView], location: Location) -> SnapshotPart:
        """Put a snapshot into a session's memory. views: of that memory, one for each group.

        Full pages are shared with the snapshot, all else is copied. Raises NotFound without such a snapshot,
        FailedPrecondition when it doesn't serve that length, ResourceExhausted where the device has no pages left.
        """
        started_ns = time.monotonic_ns()
        snapshot = self.store.find(self.owner, restore.snapshot_id)
        if snapshot is None or snapshot.generation != self.generation:
            raise NotFound(f"no prefix {restore.snapshot_id} is kept here", reason="SNAPSHOT_MISSING")
        longest = snapshot.length
        if restore.length != longest and not (trimmable(self.groups) and 1 <= restore.length < longest):
            accepted = f"1 to {longest}" if trimmable(self.groups) else str(longest)
            raise FailedPrecondition(
                f"length is {restore.length}, the prefix {restore.snapshot_id} serves {accepted}",
                reason="SNAPSHOT_LENGTH",
                field="length",
            )
        chain = snapshot.chain()

        def write() -> None:
            # A piece of a tensor is read by the CPU, which must not overtake a copy that a save has queued.
            self.synchronize()
            copy_in(self.groups, views, chain, restore.length)

        await self.thread.submit(write)
        elapsed_ns = time.monotonic_ns() - started_ns
        size_bytes = sum(group.size_bytes(0, restore.length) for group in self.groups)
        log.info(
            "snapshot.restored",
            slot=restore.snapshot_id[:12],
            owner=str(self.owner),
            position=restore.length,
            stage=location.stage,
            bytes=size_bytes,
            ms=round(elapsed_ns / 1e6, 3),
        )
        return SnapshotPart(location, size_bytes, elapsed_ns)


def _done(part: SnapshotPart) -> asyncio.Future[SnapshotPart]:
    future: asyncio.Future[SnapshotPart] = asyncio.get_running_loop().create_future()
    future.set_result(part)
    return future
