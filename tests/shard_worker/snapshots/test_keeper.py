"""A model's way to the store: what was queued is whole before it is read, and no room stays taken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from services.errors import NotFound
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import Location, SnapshotRestore, SnapshotSave
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.prefix_state import GroupKind, TensorGroup
from shard_worker.device.devices import Device
from shard_worker.device.executor import DeviceThread
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import SnapshotStore

ROWS = TensorGroup(GroupKind.ROWS, ("layers.0.k", "layers.1.k"), (2, 3), torch.float32)
HERE = Location(0, "here", "cpu", "here:1")
STAGE = SnapshotOwner.STAGE


class LateDevice(Device):
    """The CPU, with copies that arrive when one waits for them, as a GPU's do."""

    arrivals: list[tuple[torch.Tensor, torch.Tensor]]

    def synchronize(self) -> None:
        for host, content in self.arrivals:
            host.copy_(content)
        self.arrivals.clear()

    @torch.inference_mode()
    def delay(self, store: SnapshotStore) -> None:
        """What the store holds is not there yet."""
        for kept in store:
            for tensor in kept.tensors:
                self.arrivals.append((tensor, tensor.clone()))
                tensor.fill_(torch.nan)


@pytest.fixture
def device() -> LateDevice:
    device = LateDevice("cpu", torch.device("cpu"))
    object.__setattr__(device, "arrivals", [])
    return device


@pytest.fixture
def keeper(device: LateDevice) -> Iterator[SnapshotKeeper]:
    thread = DeviceThread(1)
    yield SnapshotKeeper(SnapshotStore(10_000), thread, STAGE, "f00d", None, 100, (ROWS,), (device,), 0)
    thread.shutdown()


def rows(fill: float | None = None) -> AttentionView:
    """A session's rows: counting up, or all the same."""
    counted = torch.arange(2 * 2 * 40 * 3, dtype=torch.float32).view(2, 2, 40, 3)
    view = AttentionView(AttentionCache(2, 2, 40, 3, counted), slice(None), 0)
    view.write(counted if fill is None else torch.full_like(counted, fill), 0, 40)
    return view


@pytest.mark.parametrize("length", [20, 11])
async def test_a_restore_waits_for_copies_that_are_on_their_way(
    keeper: SnapshotKeeper, device: LateDevice, length: int
) -> None:
    """A save only queues its copy: whoever takes the prefix up, whole or in part, first waits until it is there."""
    await keeper.save(SnapshotSave("a", 20), [rows()], HERE)
    device.delay(keeper.store)
    restored = rows(-1.0)

    await keeper.restore(SnapshotRestore("a", length), [restored], HERE)

    assert torch.equal(restored.read(0, length), rows().read(0, length))


@pytest.mark.parametrize("moment", ["at once", "queued", "running"])
async def test_nobody_need_wait_for_a_save(keeper: SnapshotKeeper, moment: str) -> None:
    """Whenever the one who waits is cancelled, the prefix is kept all the same, and no room stays taken for nothing."""
    release, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait()

    blocking = keeper.thread.submit(block)
    saving = keeper.save(SnapshotSave("a", 20), [rows()], HERE)
    size = ROWS.size_bytes(0, 20)
    assert keeper.store.held_bytes == size
    if moment != "at once":
        await asyncio.to_thread(begun.wait)
    if moment == "running":
        release.set()
        await blocking
    saving.cancel()
    await asyncio.sleep(0)
    release.set()
    await blocking
    await keeper.thread.submit(int)

    assert len(keeper.store) == 1
    assert keeper.store.held_bytes == size
    restored = rows(-1.0)
    await keeper.restore(SnapshotRestore("a", 20), [restored], HERE)
    assert torch.equal(restored.read(0, 20), rows().read(0, 20))


async def test_one_name_saved_by_two_at_once(keeper: SnapshotKeeper) -> None:
    """All three saves succeed; the snapshot is kept once, and counted once."""
    parts = await asyncio.gather(*(keeper.save(SnapshotSave("a", 20), [rows()], HERE) for _ in range(3)))

    assert [part.refusal for part in parts] == [""] * 3
    assert (len(keeper.store), keeper.store.held_bytes) == (1, ROWS.size_bytes(0, 20))


async def test_a_parent_that_leaves_meanwhile(keeper: SnapshotKeeper) -> None:
    """What a save builds on can't be freed meanwhile; a model that leaves takes both, and the save is refused."""
    await keeper.save(SnapshotSave("a", 20), [rows()], HERE)
    child = keeper.save(SnapshotSave("b", 30, "a"), [rows()], HERE)
    assert keeper.store.free("a") == 0
    assert not (await child).refusal

    late = keeper.save(SnapshotSave("c", 35, "b"), [rows()], HERE)
    keeper.store.clear(STAGE)
    part = await late

    assert part.refusal == "the model or the prefix that it builds on is gone"
    assert (part.size_bytes, keeper.store.held_bytes, len(keeper.store)) == (0, 0, 0)


async def test_sessions_of_a_model_that_left_neither_keep_nor_take_up(keeper: SnapshotKeeper) -> None:
    """A session that outlived its model doesn't mix with what is kept of the next one, whatever the names."""
    keeper.store.clear(STAGE)
    successor = replace(keeper, generation=keeper.store.generation(STAGE))
    await successor.save(SnapshotSave("a", 20), [rows()], HERE)

    with pytest.raises(NotFound):
        await keeper.restore(SnapshotRestore("a", 20), [rows()], HERE)
    assert (await keeper.save(SnapshotSave("b", 20), [rows()], HERE)).refusal
    assert (await keeper.save(SnapshotSave("c", 30, "a"), [rows()], HERE)).refusal

    assert (len(keeper.store), keeper.store.held_bytes) == (1, ROWS.size_bytes(0, 20))
    await successor.restore(SnapshotRestore("a", 20), [rows()], HERE)
