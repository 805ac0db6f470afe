"""Which entries a store has, in memory: found by their tokens, and as the tree that they form.

An entry is usable when all that it builds on is there. Reads and writes nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from coordinator.prefix.disk.entries import DiskEntry, Scan, UnreadableEntry, known_stamps
from coordinator.prefix.lineage import Lineage, as_bytes
from coordinator.prefix.stores import EntryKey


class DiskIndex:
    """The entries of all lineages of one store. total_bytes: what their files take."""

    def __init__(self) -> None:
        self._entries: dict[EntryKey, DiskEntry] = {}
        self._unreadable: dict[EntryKey, UnreadableEntry] = {}
        self._children: dict[EntryKey, set[EntryKey]] = {}
        self._lengths: dict[str, Counter[int]] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[DiskEntry]:
        return iter(self._entries.values())

    def unreadable(self) -> Iterator[UnreadableEntry]:
        return iter(self._unreadable.values())

    def get(self, key: EntryKey) -> DiskEntry | None:
        return self._entries.get(key)

    def fault(self, key: EntryKey) -> UnreadableEntry | None:
        """What is wrong with an entry that cannot be read."""
        return self._unreadable.get(key)

    def stamps(self) -> dict[EntryKey, str]:
        """The version of each entry that is known."""
        return known_stamps([*self._entries.values(), *self._unreadable.values()])

    def apply(self, found: Scan) -> None:
        """Take over what a scan found."""
        for key in found.gone:
            self.remove(key)
        for entry in found.found:
            self.add(entry)

    def add(self, entry: DiskEntry | UnreadableEntry) -> None:
        """Take an entry in, instead of the one under its key."""
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
        """Forget one entry, not those that build on it."""
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
        """The longest usable entry whose tokens are all, or the first, of these."""
        wanted = as_bytes(token_ids)
        for entry in reversed(list(self._named(lineage, wanted))):
            # The hash says where to look; only the tokens themselves say that it is the one.
            if wanted.startswith(entry.tokens) and self.chain(entry):
                return entry
        return None

    def _named(self, lineage: Lineage, wanted: bytes) -> Iterator[DiskEntry]:
        """Entries named like starts of these tokens, shortest first; each token is hashed once."""
        digest = hashlib.sha256(lineage.key.encode())
        hashed = 0
        for length in sorted(self._lengths.get(lineage.key, ())):
            end = 4 * length
            if end > len(wanted):
                return
            digest.update(memoryview(wanted)[hashed:end])
            hashed = end
            entry = self._entries.get(EntryKey(lineage.key, digest.hexdigest()[:40]))
            if entry is not None:
                yield entry

    def chain(self, entry: DiskEntry) -> tuple[DiskEntry, ...]:
        """An entry and all that it builds on, from the one that begins at 0 on; empty when something is missing."""
        nodes = [entry]
        while (key := nodes[-1].parent_key) is not None:
            node, parent = nodes[-1], self._entries.get(key)
            if parent is None or parent.token_count != node.first_token or not node.tokens.startswith(parent.tokens):
                return ()
            nodes.append(parent)
        return tuple(reversed(nodes))

    def children(self, key: EntryKey) -> tuple[EntryKey, ...]:
        """The entries that name this one, there or not, as their parent."""
        return tuple(self._children.get(key, ()))

    def descendants(self, key: EntryKey) -> tuple[EntryKey, ...]:
        """All entries that build on this one, each after its parent."""
        found = list(self.children(key))
        for one in found:
            found += self.children(one)
        return tuple(found)
