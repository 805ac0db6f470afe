"""Which entry goes when room is needed: the one whose bytes spare the least work, and nothing that others build on.

It knows the entries and the time, and removes nothing itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection

from coordinator.prefix.disk.entries import DiskEntry, Fault, UnreadableEntry
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.stores import EntryKey

SPARED_S = 60.0
"""How long after its last use an entry stays while others can go: a restore may be reading it."""

_HIT_DECAY_PER_S = 3.2e-5
"""How fast hits lose their weight: they count half after six hours."""

_TRIAL_S = 3600.0
"""How fast an entry that was never hit loses the advance that it begins with."""

_Rank = tuple[int, float, float, str]


def worth(entry: DiskEntry, now: float) -> float:
    """Return the tokens that an entry spares per byte, weighted by its hits, which fade within hours.

    An entry that was never hit starts as if it had been hit once, and loses that advance within an hour or so: a full
    cache of old entries must not outlive every new one.
    """
    age = max(0.0, now - entry.last_active)
    hits = entry.usage.hits * math.exp(-age * _HIT_DECAY_PER_S) + math.exp(-age / _TRIAL_S)
    return hits * entry.tokens_gained / max(1, entry.size_bytes)


class VictimQueue:
    """The entries in the order in which they should go.

    First those that nobody can read, then those that miss what they build on, then by worth; entries used within
    SPARED_S only when nothing else is left, the one used longest ago first. An entry that others build on waits for
    those. After `pop` call either `removed` or, for one that turned out to be ranked wrongly, `push`.
    """

    def __init__(
        self,
        index: DiskIndex,
        now: float,
        *,
        protected: Collection[EntryKey] = (),
        among: Callable[[DiskEntry], bool] | None = None,
    ) -> None:
        """now: seconds since 1970. protected: entries that must stay. among: says of an entry whether it may go."""
        self._index, self._now, self._protected, self._among = index, now, protected, among
        self._unreadable = [
            entry
            for entry in index.unreadable()
            if among is None and entry.fault is not Fault.UNREACHABLE and entry.key not in protected
        ]
        self._complete: dict[EntryKey, bool] = {}
        self._heap: list[tuple[_Rank, EntryKey]] = []
        for entry in index.entries():
            self.push(entry)

    def pop(self) -> DiskEntry | UnreadableEntry | None:
        """Return the entry that should go next; None when all that are left must stay."""
        if self._unreadable:
            return self._unreadable.pop()
        while self._heap:
            entry = self._index.get(heapq.heappop(self._heap)[1])
            if entry is not None:
                return entry
        return None

    def push(self, entry: DiskEntry) -> None:
        """Put an entry into the queue, if it may go at all."""
        if entry.key in self._protected or self._index.children(entry.key):
            return
        if self._among is None or self._among(entry):
            heapq.heappush(self._heap, (self._rank(entry), entry.key))

    def removed(self, entry: DiskEntry | UnreadableEntry) -> None:
        """Take note that an entry is out of the index: the one that it was built on may go next."""
        if isinstance(entry, DiskEntry) and entry.parent_key is not None:
            parent = self._index.get(entry.parent_key)
            if parent is not None:
                self.push(parent)

    def _rank(self, entry: DiskEntry) -> _Rank:
        if not self._is_complete(entry):
            return 0, 0.0, entry.last_active, entry.snapshot_id
        if self._now - entry.last_active >= SPARED_S:
            return 1, worth(entry, self._now), entry.last_active, entry.snapshot_id
        return 2, 0.0, entry.last_active, entry.snapshot_id

    def _is_complete(self, entry: DiskEntry) -> bool:
        """Tell whether all that an entry builds on is there; every link is looked at once."""
        walked: list[EntryKey] = []
        node = entry
        while (is_complete := self._complete.get(node.key)) is None:
            walked.append(node.key)
            if node.parent_key is None:
                is_complete = True
                break
            parent = self._index.get(node.parent_key)
            if parent is None:
                is_complete = False
                break
            node = parent
        self._complete |= dict.fromkeys(walked, is_complete)
        return is_complete
