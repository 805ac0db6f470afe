"""Saves the exports of all workers as one entry in the store, or says why there is none.

Room is made before anything is written, so the budget holds at every moment. Finding entries is the index's work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from coordinator.prefix.disk.catalog import DiskCatalog
from coordinator.prefix.disk.entries import DiskEntry, Fault
from coordinator.prefix.disk.incoming_part import PartSource, write_part
from coordinator.prefix.disk.manifest import Manifest, ManifestError, manifest_from_json, planned_part
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.lineage import Lineage
from coordinator.prefix.stores import EntryKey, EntryWriter, Store, StoreError
from services.errors import InvalidArgument
from services.messages.snapshots import SnapshotHeader
from services.sizes import format_size

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save.

    entry: what the store holds under this id now. written: whether this save put it there. size_bytes: what was
    written, or would have been where that is known. evicted_ids: what was removed to make room. refusal: why nothing
    was written; empty when the entry is there.
    """

    snapshot_id: str
    entry: DiskEntry | None = None
    written: bool = False
    size_bytes: int = 0
    elapsed_ms: float = 0.0
    evicted_ids: tuple[str, ...] = ()
    refusal: str = ""


class DiskWriter:
    """Writes entries into one catalog's store; once its attribute `closed` is set, it saves nothing more.

    model_name: what people call the model. num_layers: how many layers the target has.
    """

    def __init__(
        self, store: Store, catalog: DiskCatalog, *, model_name: str, num_layers: int, min_tokens: int
    ) -> None:
        self._store, self._catalog = store, catalog
        self._model_name, self._num_layers, self._min_tokens = model_name, num_layers, min_tokens
        self._saving: set[EntryKey] = set()
        self.closed = False

    async def save(
        self,
        lineage: Lineage,
        token_ids: tuple[int, ...],
        first_token: int,
        parent_id: str | None,
        parts: Sequence[PartSource],
    ) -> Saved:
        """Save an entry as `DiskCache.save` describes."""
        started = time.monotonic()
        snapshot_id = lineage.snapshot_id(token_ids)
        figures = {"snapshot_id": snapshot_id[:12], "tokens": len(token_ids)}
        try:
            saved = await self._save(lineage, snapshot_id, token_ids, first_token, parent_id, parts)
        except Refused as refused:
            log.info("prefix.disk_not_saved", **figures, why=str(refused))
            saved = Saved(snapshot_id, size_bytes=refused.size_bytes, refusal=str(refused))
        except StoreError as error:
            log.warning("prefix.disk_save_failed", **figures, why=error.message)
            saved = Saved(snapshot_id, refusal=error.message)
        finally:
            for part in parts:
                await part.close()
        saved = replace(saved, elapsed_ms=(time.monotonic() - started) * 1e3)
        if saved.written:
            log.info(
                "prefix.disk_saved",
                **figures,
                first_token=first_token,
                bytes=saved.size_bytes,
                ms=round(saved.elapsed_ms, 1),
                evicted=len(saved.evicted_ids),
            )
        return saved

    async def _save(
        self,
        lineage: Lineage,
        snapshot_id: str,
        token_ids: tuple[int, ...],
        first_token: int,
        parent_id: str | None,
        parts: Sequence[PartSource],
    ) -> Saved:
        key = EntryKey(lineage.key, snapshot_id)
        if self.closed:
            raise Refused("the cache is closed")
        if len(token_ids) < self._min_tokens:
            raise Refused(f"it has {len(token_ids)} tokens, fewer than the {self._min_tokens} that are worth a file")
        if key in self._saving:
            raise Refused("it is being saved already")
        self._saving.add(key)
        try:
            await self._catalog.refresh([lineage.key])
            index = self._catalog.index
            present = index.get(key)
            if present is not None and index.chain(present):
                return Saved(snapshot_id, present, size_bytes=present.size_bytes)
            chain: tuple[DiskEntry, ...] = ()
            if parent_id is not None:
                parent = index.get(EntryKey(lineage.key, parent_id))
                chain = () if parent is None else index.chain(parent)
                if not chain:
                    raise Refused(f"{parent_id[:12]}, which it builds on, is not in the store")
            with self._catalog.protecting([*(node.key for node in chain), key]):
                headers = await _together(*(part.header(snapshot_id, first_token, len(token_ids)) for part in parts))
                plan = Manifest(
                    snapshot_id=snapshot_id,
                    lineage=lineage,
                    model_name=self._model_name,
                    num_layers=self._num_layers,
                    token_ids=token_ids,
                    first_token=first_token,
                    parent_id=parent_id,
                    created=round(time.time(), 3),
                    parts=(),
                )
                return await self._write(key, plan, headers, parts)
        finally:
            self._saving.discard(key)

    async def _write(
        self, key: EntryKey, plan: Manifest, headers: Sequence[SnapshotHeader], sources: Sequence[PartSource]
    ) -> Saved:
        """Make room, write the parts and commit the entry. plan: the manifest without its parts."""
        size = await in_thread(_planned_bytes, plan, headers)
        budget = self._catalog.budget_bytes
        if size > budget:
            raise Refused(f"it takes {format_size(size)} of a budget of {format_size(budget)}", size)
        await self._clear(key)
        evicted = await self._catalog.reserve(key, size)
        if evicted is None:
            raise Refused(f"what must stay leaves no {format_size(size)} of a budget of {format_size(budget)}", size)
        # A list, so that a writer that begins while this task is cancelled is ended too.
        writers: list[EntryWriter] = []
        try:
            await in_thread(lambda: writers.append(self._store.begin(key)))
            writer = writers[0]
            planned = [planned_part(header, writer.tag) for header in headers]
            written = await _together(
                *(write_part(source, part, writer) for source, part in zip(sources, planned, strict=True))
            )
            manifest = replace(plan, parts=tuple(written))
            data = await in_thread(manifest.to_json)
            await self._catalog.refresh([key.lineage])
            parent_key = None if plan.parent_id is None else EntryKey(key.lineage, plan.parent_id)
            if parent_key is not None and self._catalog.index.get(parent_key) is None:
                raise Refused(f"{parent_key.snapshot_id[:12]}, which it builds on, went meanwhile", size)
            entry, is_ours = await self._catalog.commit(writer, manifest, data)
        finally:
            self._catalog.release(key)
            for writer in writers:
                await in_thread(writer.abort)
        # Others may have filled the room that was made.
        late = await self._catalog.prune()
        return Saved(
            key.snapshot_id,
            entry,
            written=is_ours,
            size_bytes=size if entry is None else entry.size_bytes,
            evicted_ids=evicted.snapshot_ids + late.snapshot_ids,
            refusal="" if is_ours or entry is not None else "another process was sooner, and its entry is not readable",
        )

    async def _clear(self, key: EntryKey) -> None:
        """Remove what lies in the entry's place and is of no use: damaged, another release's, or without its parent.

        Raises StoreError when it cannot be read at the moment, because it may be whole.
        """
        fault = self._catalog.index.fault(key)
        if fault is not None and fault.fault is Fault.UNREACHABLE:
            raise StoreError(fault.why)
        if fault is not None or self._catalog.index.get(key) is not None:
            await self._catalog.remove(key)


class Refused(Exception):
    """Nothing is written, although nothing is wrong. size_bytes: what would have been written, where that is known."""

    def __init__(self, why: str, size_bytes: int = 0) -> None:
        super().__init__(why)
        self.size_bytes = size_bytes


def _planned_bytes(plan: Manifest, headers: Sequence[SnapshotHeader]) -> int:
    """Return what the entry's files will take at most. Raises InvalidArgument for headers that make no entry."""
    try:
        # The tag makes the names as long as any writer's are.
        full = replace(plan, parts=tuple(planned_part(header, "0" * 8) for header in headers))
        data = full.to_json()
        manifest_from_json(data)
    except ManifestError as error:
        raise InvalidArgument(f"the workers' exports make no snapshot: {error.message}", **error.where) from error
    return len(data) + sum(part.size_bytes for part in full.parts)


async def _together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return all results; when one coroutine fails, the others are ended first and its exception is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
