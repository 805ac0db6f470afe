"""The entries of one store and the room they take, kept in step with other processes that use the same store.

Owns the index, the budget and what must stay for now. Changes come one at a time; looking things up needs no waiting.
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
    """What was removed to make room."""

    snapshot_ids: tuple[str, ...] = ()
    freed_bytes: int = 0


class DiskCatalog:
    """budget_bytes: what all lineages of the store may take together. warn: log what is unreadable."""

    def __init__(self, store: Store, budget_bytes: int, *, warn: bool = True) -> None:
        self._store, self.budget_bytes, self._warns = store, budget_bytes, warn
        self.index = DiskIndex()
        self._changing = asyncio.Lock()
        self._coming: dict[EntryKey, int] = {}
        self._kept: Counter[EntryKey] = Counter()
        self._refreshed_s = -float("inf")
        self._reachable = True

    async def load(self) -> None:
        """Look at the whole store. Raises StoreError when it cannot be listed."""
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
        """Log that the store cannot be used, once until it can be again."""
        if self._reachable:
            log.warning("prefix.disk_unreachable", store=self._store.location, why=error.message)
        self._reachable = False

    @contextmanager
    def keeping(self, keys: Collection[EntryKey]) -> Iterator[None]:
        """These entries are not evicted inside."""
        self._kept.update(keys)
        try:
            yield
        finally:
            self._kept -= Counter(keys)

    async def reserve(self, key: EntryKey, size_bytes: int) -> Evicted | None:
        """Make room for an entry and hold it until `release`; None when there cannot be enough.

        Raises StoreError when the store cannot be listed.
        """
        async with self._changing:
            evicted = await self._make_room(size_bytes)
            if evicted is not None:
                self._coming[key] = size_bytes
            return evicted

    def release(self, key: EntryKey) -> None:
        """Give up what `reserve` held."""
        self._coming.pop(key, None)

    async def prune(self, budget_bytes: int | None = None) -> Evicted:
        """Remove entries until the budget holds, or this one. A store that cannot be reached is logged, not raised."""
        async with self._changing:
            try:
                return await self._make_room(0, budget_bytes) or Evicted()
            except StoreError as error:
                self.unreachable(error)
                return Evicted()

    async def prune_idle(self, since: float) -> Evicted:
        """Remove entries not used since then (seconds since 1970), nor anything that builds on them."""
        async with self._changing:
            await self._scan(None)
            queue = VictimQueue(
                self.index, time.time(), protected=set(self._kept), among=lambda entry: entry.last_active < since
            )
            return await self._evict(queue, lambda: True)

    async def commit(self, writer: EntryWriter, manifest: Manifest, data: bytes) -> tuple[DiskEntry | None, bool]:
        """Put an entry in its place: the entry that is there now, and whether it is this one.

        Raises StoreError when it cannot be written.
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
        """Remove one entry, not those that build on it; False when it wasn't there. Raises StoreError."""
        async with self._changing:
            return await self._remove(key)

    async def _make_room(self, size_bytes: int, budget_bytes: int | None = None) -> Evicted | None:
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        await self._scan(None)
        held = sum(entry.size_bytes for key in self._kept if (entry := self.index.get(key)) is not None)
        # Said before anything is removed in vain.
        if size_bytes and held + size_bytes + sum(self._coming.values()) > budget:
            return None

        def short() -> bool:
            return self.index.total_bytes + sum(self._coming.values()) + size_bytes > budget

        if not short():
            return Evicted()
        evicted = await self._evict(VictimQueue(self.index, time.time(), protected=set(self._kept)), short)
        return None if size_bytes and short() else evicted

    async def _evict(self, queue: VictimQueue, wanted: Callable[[], bool]) -> Evicted:
        """Remove entries in the queue's order for as long as more is wanted."""
        gone: list[str] = []
        freed = 0
        while wanted() and (victim := queue.pop()) is not None:
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
                gone.append(victim.key.snapshot_id)
                freed += victim.size_bytes
                _log_evicted(victim)
            queue.removed(victim)
        return Evicted(tuple(gone), freed)

    async def _remove(self, key: EntryKey) -> bool:
        removed = await in_thread(self._store.remove, key)
        self.index.remove(key)
        return removed

    async def _scan(self, lineages: Collection[str] | None) -> None:
        """Bring the index up to date; None: for all lineages."""
        known = self.index.stamps()
        if lineages is None:
            found = await in_thread(scan_all, self._store, known)
        else:
            found = await in_thread(scan, self._store, lineages, known)
        self._refreshed_s = time.monotonic()
        self._warn(found)
        self.index.apply(found)

    def _warn(self, found: Scan) -> None:
        """One line for each entry that turned out to be unreadable."""
        for entry in found.found:
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
