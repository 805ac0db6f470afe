"""The snapshots of a worker, under a budget: a forest, where a longer prefix builds on a shorter one.

The store owns their memory, or shares it with sessions where it is pages of a device. When room is needed it drops
those that were used the longest ago and that nothing builds on. It is used on the event loop only: it needs no lock.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from services.errors import ResourceExhausted
from services.messages.snapshots import SnapshotOwner
from shard_worker.cache.prefix_state import Kept, Part


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The state of one prefix: attention rows of the tokens [first_token, length), and what else is left behind them.

    owner, generation: whose state it is, and of which of the models that the owner has held one after the other.
    parent: has the rows of the tokens before `first_token`; None exactly where that is 0. tensors: one for each of the
    owner's groups, in host memory or in pages of the device; they never change once the snapshot is in the store.
    size_bytes: of the tensors.
    """

    snapshot_id: str
    owner: SnapshotOwner
    generation: int
    parent: Snapshot | None
    first_token: int
    length: int
    tensors: tuple[Kept, ...]
    size_bytes: int

    def chain(self) -> list[Part]:
        """Return (first_token, length, tensors) of all that it builds on and of itself, from token 0 on."""
        nodes: list[Snapshot] = []
        node: Snapshot | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return [(node.first_token, node.length, node.tensors) for node in reversed(nodes)]


def default_budget_bytes() -> int:
    """Return a tenth of this host's memory, at most 4 GiB."""
    return min(4 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10)


_Key = tuple[SnapshotOwner, str]


class SnapshotStore:
    """Snapshots by owner and name.

    budget_bytes: the most that they may take together. held_bytes: what they take by now, with the room that is
    reserved for those on their way.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        # From the least to the most recently used.
        self._snapshots: OrderedDict[_Key, Snapshot] = OrderedDict()
        # How many build on each, those on their way included.
        self._dependants: dict[_Key, int] = {}
        self._generations = dict.fromkeys(SnapshotOwner, 0)

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        """Go through the snapshots from the least to the most recently used; that does not count as a use."""
        return iter(self._snapshots.values())

    def find(self, owner: SnapshotOwner, snapshot_id: str) -> Snapshot | None:
        """Return the snapshot of that name, None without one. It counts as used, like all that it builds on."""
        snapshot = self._snapshots.get((owner, snapshot_id))
        if snapshot is not None:
            self._mark_used(snapshot)
        return snapshot

    def reserve(self, size_bytes: int, parent: Snapshot | None) -> tuple[str, ...]:
        """Reserve room for a snapshot that builds on `parent`. Returns the names of those that were dropped for it.

        Every reservation ends with `put` or `release`. Raises ResourceExhausted when that much room cannot be made;
        then nothing is dropped.
        """
        if size_bytes > self.budget_bytes:
            raise ResourceExhausted(
                f"the prefix takes {size_bytes} bytes, more than the {self.budget_bytes} of --prefix-cache-bytes",
                reason="SNAPSHOT_BUDGET",
            )
        self._count_dependant(parent, 1)
        room, evicted = self.budget_bytes - self.held_bytes, list[_Key]()
        dependants = dict(self._dependants)
        # What is built on stands behind all that builds on it, so one pass meets the leaves first.
        for key, snapshot in self._snapshots.items():
            if room >= size_bytes:
                break
            if not dependants.get(key):
                evicted.append(key)
                room += snapshot.size_bytes
                if snapshot.parent is not None:
                    dependants[snapshot.parent.owner, snapshot.parent.snapshot_id] -= 1
        if room < size_bytes:
            self._count_dependant(parent, -1)
            raise ResourceExhausted(
                f"no room for a prefix of {size_bytes} bytes: what is kept is all in use", reason="SNAPSHOT_BUDGET"
            )
        for key in evicted:
            self._drop(key)
        self.held_bytes += size_bytes
        return tuple(name for _, name in evicted)

    def release(self, size_bytes: int, parent: Snapshot | None) -> None:
        """Give back the room that `reserve` took, where nothing is put into it."""
        self.held_bytes -= size_bytes
        self._count_dependant(parent, -1)

    def put(self, snapshot: Snapshot) -> bool:
        """Put a snapshot into the room that was reserved for it; where its name is taken already, that one stays.

        Returns False when its model or what it builds on is gone. A snapshot that is not put gives its room back.
        """
        key = (snapshot.owner, snapshot.snapshot_id)
        parent = snapshot.parent
        gone = snapshot.generation != self._generations[snapshot.owner] or (
            parent is not None and (parent.owner, parent.snapshot_id) not in self._snapshots
        )
        if gone or key in self._snapshots:
            self.release(snapshot.size_bytes, parent)
            return not gone
        self._snapshots[key] = snapshot
        self._mark_used(snapshot)
        return True

    def free(self, snapshot_id: str) -> int:
        """Drop the snapshots of a name, of all owners, unless others build on them. Returns the bytes freed."""
        before = self.held_bytes
        for owner in SnapshotOwner:
            key = (owner, snapshot_id)
            if key in self._snapshots and not self._dependants.get(key):
                self._drop(key)
        return before - self.held_bytes

    def generation(self, owner: SnapshotOwner) -> int:
        """Return which of an owner's models, counted one after the other, the store takes snapshots of now."""
        return self._generations[owner]

    def clear(self, owner: SnapshotOwner) -> None:
        """Drop all snapshots of an owner, whose model is about to change. Those on their way are of the old model."""
        self._generations[owner] += 1
        for key in [key for key in self._snapshots if key[0] is owner]:
            self._drop(key)

    def _mark_used(self, snapshot: Snapshot) -> None:
        """Move a snapshot to the recently used end, and what it builds on behind it."""
        node: Snapshot | None = snapshot
        while node is not None:
            key = (node.owner, node.snapshot_id)
            if key in self._snapshots:
                self._snapshots.move_to_end(key)
            node = node.parent

    def _drop(self, key: _Key) -> None:
        snapshot = self._snapshots.pop(key)
        self.held_bytes -= snapshot.size_bytes
        self._count_dependant(snapshot.parent, -1)

    def _count_dependant(self, parent: Snapshot | None, change: int) -> None:
        if parent is not None:
            key = (parent.owner, parent.snapshot_id)
            self._dependants[key] = self._dependants.get(key, 0) + change
            if not self._dependants[key]:
                del self._dependants[key]
