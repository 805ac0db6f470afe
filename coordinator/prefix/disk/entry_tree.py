"""Which entries a store has: an index in memory, by their tokens, and the tree that they form.

An entry is usable when all that it builds on is there. The index reads and writes no store.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from coordinator.prefix.disk.entries import DiskEntry, Scan, UnreadableEntry
from coordinator.prefix.lineage import Lineage, as_bytes
from coordinator.prefix.stores import EntryKey


class DiskIndex:
    """The entries of all lineages of one store. The attribute `total_bytes` is what their files take."""

    def __init__(self) -> None:
        self._entries: dict[EntryKey, DiskEntry] = {}
        self._unreadable: dict[EntryKey, UnreadableEntry] = {}
        self._children: dict[EntryKey, set[EntryKey]] = {}
        self._lengths: dict[str, Counter[int]] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[DiskEntry]:
        """Yield the readable entries."""
        return iter(self._entries.values())

    def unreadable(self) -> Iterator[UnreadableEntry]:
        """Yield the entries that cannot be read."""
        return iter(self._unreadable.values())

    def get(self, key: EntryKey) -> DiskEntry | None:
        """Return the readable entry of this key; None when there is none."""
        return self._entries.get(key)

    def fault(self, key: EntryKey) -> UnreadableEntry | None:
        """Return the entry of this key that cannot be read; None when there is none."""
        return self._unreadable.get(key)

    def stamps(self) -> dict[EntryKey, str]:
        """Return the stamp of each entry, readable or not."""
        entries: list[DiskEntry | UnreadableEntry] = [*self._entries.values(), *self._unreadable.values()]
        return {entry.key: entry.stamp for entry in entries}

    def apply(self, changes: Scan) -> None:
        """Add and remove what a scan says."""
        for key in changes.removed:
            self.remove(key)
        for entry in changes.entries:
            self.add(entry)

    def add(self, entry: DiskEntry | UnreadableEntry) -> None:
        """Add an entry, in place of the one that has its key."""
        self.remove(entry.key)
        self.total_bytes += entry.size_bytes
        if isinstance(entry, UnreadableEntry):
            self._unreadable[entry.key] = entry
            return
        self._entries[entry.key] = entry
        self._lengths.setdefault(entry.lineage.key, Counter())[entry.token_count] += 1
        if entry.parent_key is not None:
            self._children.setdefault(entry.parent_key, set()).add(entry.key)

    def remove(self, key: EntryKey) -> None:
        """Remove one entry, not those that build on it."""
        unreadable = self._unreadable.pop(key, None)
        if unreadable is not None:
            self.total_bytes -= unreadable.size_bytes
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.total_bytes -= entry.size_bytes
        lengths = self._lengths[key.lineage]
        lengths[entry.token_count] -= 1
        if not lengths[entry.token_count]:
            del lengths[entry.token_count]
        if entry.parent_key is not None:
            siblings = self._children[entry.parent_key]
            siblings.discard(key)
            if not siblings:
                del self._children[entry.parent_key]

    def find(self, lineage: Lineage, token_ids: Sequence[int]) -> DiskEntry | None:
        """Return the longest usable entry whose tokens are all, or the first, of these; None when there is none."""
        prompt = as_bytes(token_ids)
        for entry in reversed(list(self._candidates(lineage, prompt))):
            # The hash says where to look; only the tokens themselves say that it is the right entry.
            if prompt.startswith(entry.tokens) and self.chain(entry):
                return entry
        return None

    def _candidates(self, lineage: Lineage, prompt: bytes) -> Iterator[DiskEntry]:
        """Yield the entries whose snapshot id is that of a prefix of the prompt, shortest first.

        Each token is hashed once, as ids of growing prefixes are digests of growing bytes.
        """
        digest = hashlib.sha256(lineage.key.encode())
        hashed = 0
        for length in sorted(self._lengths.get(lineage.key, ())):
            end = 4 * length
            if end > len(prompt):
                return
            digest.update(memoryview(prompt)[hashed:end])
            hashed = end
            entry = self._entries.get(EntryKey(lineage.key, digest.hexdigest()[:40]))
            if entry is not None:
                yield entry

    def chain(self, entry: DiskEntry) -> tuple[DiskEntry, ...]:
        """Return an entry and all that it builds on, that which begins at token 0 first; empty when one is missing."""
        nodes = [entry]
        while (key := nodes[-1].parent_key) is not None:
            node, parent = nodes[-1], self._entries.get(key)
            if parent is None or parent.token_count != node.first_token or not node.tokens.startswith(parent.tokens):
                return ()
            nodes.append(parent)
        return tuple(reversed(nodes))

    def children(self, key: EntryKey) -> tuple[EntryKey, ...]:
        """Return the keys of the entries whose parent is the entry of this key, whether that is there or not."""
        return tuple(self._children.get(key, ()))

    def descendants(self, key: EntryKey) -> tuple[EntryKey, ...]:
        """Return the keys of all entries that build on this one, each after its parent."""
        keys = list(self.children(key))
        for child in keys:
            keys += self.children(child)
        return tuple(keys)
