"""The entries of one store and the room they take, kept in step with other processes that use the same store.

It owns the index, the budget and the set of entries that must stay for now. Changes are made one at a time; looking
entries up waits for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from coordinator.prefix.disk.entries import (
    DiskEntry,
    EntryUsage,
    Scan,
    UnreadableEntry,
    disk_entry,
    read_entry,
    read_usage,
    scan,
    scan_all,
)
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.disk.eviction import VictimQueue
from coordinator.prefix.disk.manifest import Manifest
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.stores import EntryKey, EntryWriter, Store, StoreError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Evicted:
    """The entries that were removed to make room, and the bytes that they took."""

    snapshot_ids: tuple[str, ...] = ()
    freed_bytes: int = 0


class DiskCatalog:
    """The entries of one store, within a budget.

    budget_bytes: what all lineages of the store may take together. warn: log entries that are unreadable. The attribute
    `index` holds the entries as they were when the store was last looked at.
    """

    def __init__(self, store: Store, budget_bytes: int, *, warn: bool = True) -> None:
        self._store, self.budget_bytes, self._warns = store, budget_bytes, warn
        self.index = DiskIndex()
        self._changing = asyncio.Lock()
        self._reserved: dict[EntryKey, int] = {}
        self._protected: Counter[EntryKey] = Counter()
        self._refreshed_s = -float("inf")
        self._reachable = True

    async def load(self) -> None:
        """Read what the whole store holds. Raises StoreError when it cannot be listed."""
        async with self._changing:
            await self._scan(None)

    async def refresh(self, lineages: Collection[str]) -> None:
        """Take note of what other processes added and removed, unless that was done a moment ago. Never raises."""
        if time.monotonic() - self._refreshed_s < self._store.refresh_interval_s:
            return
        async with self._changing:
            try:
                await self._scan(lineages)
            except StoreError as error:
                self.unreachable(error)
            else:
                if not self._reachable:
                    log.info("prefix.disk_reachable", store=self._store.location)
                self._reachable = True

    def unreachable(self, error: StoreError) -> None:
        """Log that the store cannot be used, but only once until it can be used again."""
        if self._reachable:
            log.warning("prefix.disk_unreachable", store=self._store.location, why=error.message)
        self._reachable = False

    @contextmanager
    def protecting(self, keys: Collection[EntryKey]) -> Iterator[None]:
        """Keep these entries from being evicted within the block."""
        self._protected.update(keys)
        try:
            yield
        finally:
            self._protected -= Counter(keys)

    async def reserve(self, key: EntryKey, size_bytes: int) -> Evicted | None:
        """Make room for an entry and hold it until `release`; return what was evicted, None when there is no room.

        Raises StoreError when the store cannot be listed.
        """
        async with self._changing:
            evicted = await self._make_room(size_bytes)
            if evicted is not None:
                self._reserved[key] = size_bytes
            return evicted

    def release(self, key: EntryKey) -> None:
        """Give up the room that `reserve` held."""
        self._reserved.pop(key, None)

    async def prune(self, budget_bytes: int | None = None) -> Evicted:
        """Remove entries until they fit into this budget, by default the catalog's own; return what was evicted.

        A store that cannot be reached is logged, not raised.
        """
        async with self._changing:
            try:
                return await self._make_room(0, budget_bytes) or Evicted()
            except StoreError as error:
                self.unreachable(error)
                return Evicted()

    async def prune_idle(self, since: float) -> Evicted:
        """Remove the entries that neither were used since then nor have one building on them that was.

        since: seconds since 1970. Raises StoreError when the store cannot be listed.
        """
        async with self._changing:
            await self._scan(None)
            queue = VictimQueue(
                self.index, time.time(), protected=set(self._protected), among=lambda entry: entry.last_active < since
            )
            return await self._evict(queue, lambda: True)

    async def commit(self, writer: EntryWriter, manifest: Manifest, data: bytes) -> tuple[DiskEntry | None, bool]:
        """Put an entry in its place, and return the entry that is there now and whether it is this one.

        data: the manifest as it is written. Raises StoreError when it cannot be written.
        """
        key = EntryKey(manifest.lineage.key, manifest.snapshot_id)
        async with self._changing:
            written = await in_thread(writer.commit, data)
            self.release(key)
            stamp = (await in_thread(self._store.entries, key.lineage)).get(key.snapshot_id)
            if stamp is None:
                return None, written
            if written:
                entry: DiskEntry | UnreadableEntry | None = disk_entry(manifest, len(data), stamp, EntryUsage())
            else:
                entry = await in_thread(read_entry, self._store, key, stamp)
            if entry is not None:
                self.index.add(entry)
            return (entry if isinstance(entry, DiskEntry) else None), written

    async def remove(self, key: EntryKey) -> bool:
        """Remove one entry, not those that build on it; return False when it wasn't there. Raises StoreError."""
        async with self._changing:
            return await self._remove(key)

    async def _make_room(self, size_bytes: int, budget_bytes: int | None = None) -> Evicted | None:
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        await self._scan(None)
        protected = sum(entry.size_bytes for key in self._protected if (entry := self.index.get(key)) is not None)
        # Found out before anything is removed in vain.
        if size_bytes and protected + size_bytes + sum(self._reserved.values()) > budget:
            return None

        def is_over_budget() -> bool:
            return self.index.total_bytes + sum(self._reserved.values()) + size_bytes > budget

        if not is_over_budget():
            return Evicted()
        queue = VictimQueue(self.index, time.time(), protected=set(self._protected))
        evicted = await self._evict(queue, is_over_budget)
        return None if size_bytes and is_over_budget() else evicted

    async def _evict(self, queue: VictimQueue, goes_on: Callable[[], bool]) -> Evicted:
        """Remove entries in the queue's order for as long as `goes_on` says so."""
        evicted_ids: list[str] = []
        freed_bytes = 0
        while goes_on() and (victim := queue.pop()) is not None:
            if isinstance(victim, DiskEntry):
                # Another process may have used it.
                usage = await in_thread(read_usage, self._store, victim.key)
                if usage != victim.usage:
                    victim = replace(victim, usage=usage)
                    self.index.add(victim)
                    queue.push(victim)
                    continue
            try:
                removed = await self._remove(victim.key)
            except StoreError as error:
                # One that cannot be removed must not keep the others from going.
                log.warning("prefix.disk_evict_failed", snapshot_id=victim.key.snapshot_id[:12], why=error.message)
                continue
            if removed:
                evicted_ids.append(victim.key.snapshot_id)
                freed_bytes += victim.size_bytes
                _log_evicted(victim)
            queue.removed(victim)
        return Evicted(tuple(evicted_ids), freed_bytes)

    async def _remove(self, key: EntryKey) -> bool:
        removed = await in_thread(self._store.remove, key)
        self.index.remove(key)
        return removed

    async def _scan(self, lineages: Collection[str] | None) -> None:
        """Bring the index up to date for these lineages, for all of them where there are none named."""
        stamps = self.index.stamps()
        if lineages is None:
            changes = await in_thread(scan_all, self._store, stamps)
        else:
            changes = await in_thread(scan, self._store, lineages, stamps)
        self._refreshed_s = time.monotonic()
        self._warn(changes)
        self.index.apply(changes)

    def _warn(self, changes: Scan) -> None:
        """Log each entry that turned out to be unreadable."""
        for entry in changes.entries:
            if self._warns and isinstance(entry, UnreadableEntry):
                before = self.index.fault(entry.key)
                if before is None or before.why != entry.why:
                    log.warning(
                        "prefix.disk_unreadable",
                        snapshot_id=entry.key.snapshot_id[:12],
                        lineage=entry.key.lineage[:12],
                        fault=str(entry.fault),
                        why=entry.why,
                    )


def _log_evicted(victim: DiskEntry | UnreadableEntry) -> None:
    if isinstance(victim, UnreadableEntry):
        figures: dict[str, object] = {"fault": str(victim.fault)}
    else:
        idle_s = max(0.0, time.time() - victim.last_active)
        figures = {"tokens": victim.token_count, "hits": victim.usage.hits, "idle_s": round(idle_s)}
    log.info("prefix.disk_evicted", snapshot_id=victim.key.snapshot_id[:12], bytes=victim.size_bytes, **figures)
