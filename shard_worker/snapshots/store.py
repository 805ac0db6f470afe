"""The prefixes that a worker keeps, in host memory under a budget: a forest, where a longer one builds on a shorter.

Owns their memory; gives up the least recently used that nothing builds on when room is needed. Used on the event loop
only, so that it needs no lock.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass

import torch

from services.errors import ResourceExhausted
from services.messages.snapshots import SnapshotOwner


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Attention rows of tokens [first_token, length), the parent having those before, and the state behind `length`.

    generation: which of the owner's models it is of. tensors: one for each of the owner's groups; they never change
    once it is in the store.
    """

    snapshot_id: str
    owner: SnapshotOwner
    generation: int
    parent: Snapshot | None
    first_token: int
    length: int
    tensors: tuple[torch.Tensor, ...]
    size_bytes: int

    def chain(self) -> list[tuple[int, int, tuple[torch.Tensor, ...]]]:
        """(first_token, length, tensors) of all that it builds on and itself, from token 0 on."""
        nodes: list[Snapshot] = []
        node: Snapshot | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return [(node.first_token, node.length, node.tensors) for node in reversed(nodes)]


def default_budget_bytes() -> int:
    """A tenth of this host's memory, at most 4 GiB."""
    return min(4 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10)


_Key = tuple[SnapshotOwner, str]


class SnapshotStore:
    """Snapshots by owner and name. budget_bytes: most that they take together."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        # From the least to the most recently used.
        self._kept: OrderedDict[_Key, Snapshot] = OrderedDict()
        # How many build on each, those that are on their way included.
        self._dependants: dict[_Key, int] = {}
        self._generations = dict.fromkeys(SnapshotOwner, 0)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: SnapshotOwner, snapshot_id: str) -> Snapshot | None:
        """The snapshot of that name, which counts as used, like all that it builds on."""
        found = self._kept.get((owner, snapshot_id))
        if found is not None:
            self._refresh(found)
        return found

    def reserve(self, size_bytes: int, parent: Snapshot | None) -> tuple[str, ...]:
        """Take room for one that builds on `parent`; names of those that were given up for it.

        Raises ResourceExhausted when that much room cannot be made; then nothing is given up. End it with `put` or
        `release`.
        """
        if size_bytes > self.budget_bytes:
            raise ResourceExhausted(
                f"the prefix takes {size_bytes} bytes, more than the {self.budget_bytes} of --prefix-cache-bytes",
                reason="SNAPSHOT_BUDGET",
            )
        self._depend(parent, 1)
        room, leaving = self.budget_bytes - self.held_bytes, list[_Key]()
        dependants = dict(self._dependants)
        # What is built on stands behind all that builds on it, so one pass meets the leaves first.
        for key, kept in self._kept.items():
            if room >= size_bytes:
                break
            if not dependants.get(key):
                leaving.append(key)
                room += kept.size_bytes
                if kept.parent is not None:
                    dependants[kept.parent.owner, kept.parent.snapshot_id] -= 1
        if room < size_bytes:
            self._depend(parent, -1)
            raise ResourceExhausted(
                f"no room for a prefix of {size_bytes} bytes: what is kept is all in use", reason="SNAPSHOT_BUDGET"
            )
        for key in leaving:
            self._drop(key)
        self.held_bytes += size_bytes
        return tuple(name for _, name in leaving)

    def release(self, size_bytes: int, parent: Snapshot | None) -> None:
        """Give back what `reserve` took."""
        self.held_bytes -= size_bytes
        self._depend(parent, -1)

    def put(self, snapshot: Snapshot) -> bool:
        """Keep one for which room was reserved; where the name is kept already, that one stays.

        False when its model or what it builds on is gone. What finds no place gives its room back.
        """
        key = (snapshot.owner, snapshot.snapshot_id)
        parent = snapshot.parent
        gone = snapshot.generation != self._generations[snapshot.owner] or (
            parent is not None and (parent.owner, parent.snapshot_id) not in self._kept
        )
        if gone or key in self._kept:
            self.release(snapshot.size_bytes, parent)
            return not gone
        self._kept[key] = snapshot
        self._refresh(snapshot)
        return True

    def free(self, snapshot_id: str) -> int:
        """Forget a name for all owners, unless others build on it; bytes freed."""
        before = self.held_bytes
        for owner in SnapshotOwner:
            key = (owner, snapshot_id)
            if key in self._kept and not self._dependants.get(key):
                self._drop(key)
        return before - self.held_bytes

    def generation(self, owner: SnapshotOwner) -> int:
        """Which of an owner's models, one after the other, the store keeps prefixes of."""
        return self._generations[owner]

    def clear(self, owner: SnapshotOwner) -> None:
        """Forget all of an owner: its model is about to change. What is on its way still belongs to the old one."""
        self._generations[owner] += 1
        for key in [key for key in self._kept if key[0] is owner]:
            self._drop(key)

    def _refresh(self, snapshot: Snapshot) -> None:
        """Move it to the recently used end, and what it builds on behind it."""
        node: Snapshot | None = snapshot
        while node is not None:
            key = (node.owner, node.snapshot_id)
            if key in self._kept:
                self._kept.move_to_end(key)
            node = node.parent

    def _drop(self, key: _Key) -> None:
        snapshot = self._kept.pop(key)
        self.held_bytes -= snapshot.size_bytes
        self._depend(snapshot.parent, -1)

    def _depend(self, parent: Snapshot | None, change: int) -> None:
        if parent is not None:
            key = (parent.owner, parent.snapshot_id)
            self._dependants[key] = self._dependants.get(key, 0) + change
            if not self._dependants[key]:
                del self._dependants[key]
