"""Prefix snapshots that outlive the process: in a store with a budget, found again by whoever serves the same model.

Whatever goes wrong with the store is a miss and a line in the log, never a request's failure, except at the start.
Nothing of an entry can be seen before it is whole.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import replace

import structlog

from coordinator.prefix.disk.catalog import DiskCatalog, Evicted
from coordinator.prefix.disk.entries import DiskEntry, EntryUsage, read_usage
from coordinator.prefix.disk.incoming_part import PartSource
from coordinator.prefix.disk.outgoing_part import stored_frames
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.disk.writer import DiskWriter, Saved
from coordinator.prefix.lineage import Lineage
from coordinator.prefix.stores import EntryKey, Store, StoreError
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.snapshots import SnapshotFrame, SnapshotOwner

__all__ = ["DiskCache", "DiskEntry", "Evicted", "PartSource", "Saved"]

log = structlog.get_logger()


class DiskCache:
    """One model's entries in a store. Call `start` first and `close` last.

    lineages: those whose entries are looked for and saved. num_layers: how many layers the target has. model_name: what
    people call the model. budget_bytes: what everything in the store may take, of whatever model. min_tokens: shorter
    prefixes are not saved.
    """

    def __init__(
        self,
        store: Store,
        lineages: Collection[Lineage],
        num_layers: int,
        model_name: str,
        *,
        budget_bytes: int,
        min_tokens: int,
    ) -> None:
        if budget_bytes < 1:
            raise InvalidArgument(f"budget_bytes is {budget_bytes}; it must be above 0", field="--kv-cache-budget")
        self._store, self._num_layers = store, num_layers
        self._lineages = {lineage.key: lineage for lineage in lineages}
        self.min_tokens = min_tokens
        self._catalog = DiskCatalog(store, budget_bytes)
        self._writer = DiskWriter(
            store, self._catalog, model_name=model_name, num_layers=num_layers, min_tokens=min_tokens
        )

    async def start(self) -> None:
        """Open the store: sweep it, list it and make it fit its budget.

        Raises StoreError naming the option when the store cannot be created, written or listed.
        """
        await in_thread(self._store.check)
        swept = await in_thread(self._store.sweep)
        await self._catalog.load()
        evicted = await self.prune()
        index = self._catalog.index
        log.info(
            "prefix.disk_opened",
            store=self._store.location,
            entries=len(index),
            bytes=index.total_bytes,
            budget_bytes=self._catalog.budget_bytes,
            swept=swept,
            evicted=len(evicted.snapshot_ids),
        )

    async def close(self) -> None:
        """Save nothing more. Callers wait for the saves that have begun."""
        self._writer.closed = True

    # --- finding

    async def refresh(self) -> None:
        """Take note of what other processes added and removed. Cheap enough for every request; never raises."""
        await self._catalog.refresh(self._lineages)

    def find(self, lineage: Lineage, token_ids: Sequence[int], *, whole: bool = False) -> DiskEntry | None:
        """Return the longest entry whose tokens are the first of these, or all, and all of whose chain is there.

        whole: only an entry for all of these tokens counts.
        """
        entry = self._catalog.index.find(lineage, token_ids)
        if entry is None or entry.num_layers != self._num_layers or (whole and entry.token_count < len(token_ids)):
            return None
        return entry

    def has(self, snapshot_id: str) -> bool:
        """Tell whether an entry is there with all that it builds on."""
        keys = (EntryKey(lineage, snapshot_id) for lineage in self._lineages)
        return any((entry := self._catalog.index.get(key)) is not None and self.chain(entry) for key in keys)

    def chain(self, entry: DiskEntry) -> tuple[DiskEntry, ...]:
        """Return what must be imported for an entry, in this order, the entry last; empty when something is missing."""
        return self._catalog.index.chain(self._catalog.index.get(entry.key) or entry)

    def frames(
        self, entry: DiskEntry, owner: SnapshotOwner, layers: LayerRange | None, fingerprint: str
    ) -> AsyncGenerator[SnapshotFrame, None]:
        """Yield an import stream of one entry for a worker with these layers, however it was split when it was saved.

        Raises, while it is read:
            DataLoss: a file is missing, cut off, or its header is not what the manifest says. `discard` the entry.
            FailedPrecondition: the entry is another model's, or has nothing for this owner and layers.
            StoreError: the store cannot be read now.
        """
        return stored_frames(self._store, entry, owner, layers, fingerprint)

    async def record_use(self, entry: DiskEntry) -> None:
        """Note a hit, so that the entry and what it builds on stay longer."""
        nodes = self.chain(entry)
        now = time.time()
        try:
            for node in nodes:
                usage = await in_thread(_note_use, self._store, node.key, int(node is nodes[-1]), now)
                current = self._catalog.index.get(node.key)
                if current is not None and current.stamp == node.stamp:
                    self._catalog.index.add(replace(current, usage=usage))
        except StoreError as error:
            self._catalog.unreachable(error)

    # --- forgetting

    async def discard(self, entry: DiskEntry, why: str) -> None:
        """Remove an entry that turned out to be bad, and what builds on it; one that was replaced meanwhile stays."""
        await self.refresh()
        index = self._catalog.index
        current = index.get(entry.key)
        if current is not None and current.stamp != entry.stamp:
            return
        keys = [entry.key, *index.descendants(entry.key)]
        log.warning("prefix.disk_discarded", snapshot_id=entry.snapshot_id[:12], entries=len(keys), why=why)
        for key in reversed(keys):
            # Even where the store cannot remove it, it is not found again.
            index.remove(key)
            try:
                await self._catalog.remove(key)
            except StoreError as error:
                self._catalog.unreachable(error)

    async def prune(self) -> Evicted:
        """Remove entries until they fit into the budget; return what was evicted."""
        return await self._catalog.prune()

    # --- saving

    async def save(
        self,
        lineage: Lineage,
        token_ids: Sequence[int],
        first_token: int,
        parent_id: str | None,
        parts: Sequence[PartSource],
    ) -> Saved:
        """Write the state behind these tokens from the exports of all workers, and end the streams in any case.

        first_token: the first of the tokens whose rows the exports hold. parent_id: the entry that holds the rows
        before it, None where it is 0. Where the store fails or has no room, the result says so.

        Raises:
            InvalidArgument: the exports contradict themselves, each other or what was asked for, or the lineage is not
                one of this cache's. Whatever a stream raises is raised too. Nothing is left behind then.
        """
        if lineage.key not in self._lineages:
            raise InvalidArgument(f"lineage {lineage.key} is not one of this cache's", field="lineage")
        return await self._writer.save(lineage, tuple(token_ids), first_token, parent_id, parts)


def _note_use(store: Store, key: EntryKey, hits: int, now: float) -> EntryUsage:
    """Add hits to an entry's record of use, and return the record.

    Two processes that do this at once may lose one's hit, which does no harm.
    """
    before = read_usage(store, key)
    usage = EntryUsage(before.hits + hits, max(before.last_used, round(now, 3)))
    store.write_usage(key, usage.to_json())
    return usage
