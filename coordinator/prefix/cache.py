"""The prefix cache of one cluster: finds what is kept in the workers' memory or on disk, and has new prefixes kept.

It owns the index of what the workers keep, and the tasks that write to disk beside the requests. Whatever fails in here
is a miss and a line in the log, never a request's failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from coordinator.cluster.cluster import Cluster, SnapshotPlace
from coordinator.cluster.successor import Successor
from coordinator.prefix.disk.disk_cache import DiskCache, DiskEntry, PartSource
from coordinator.prefix.index import Entry, PrefixIndex
from coordinator.prefix.leftovers import Leftover, Leftovers, common
from coordinator.prefix.lineage import WINDOWS, Lineage
from coordinator.prefix.policy import KeepPolicy
from coordinator.prefix.stores import open_store
from services.errors import DataLoss, FlashsplitError, NotFound
from services.layers import LayerRange
from services.messages.snapshots import SnapshotFrame, SnapshotOwner
from services.messages.steps import SnapshotPart, SnapshotSaved
from services.processes.scratch import Scratch
from services.rpc.stage import StageSession

END_GRACE_S = 10.0
"""How long keeping the end of an answer may take before its session is closed."""

MIN_DISK_GAIN_TOKENS = 32
"""What an entry must add to the one that it builds on to be worth files of its own."""

MOST_CARRIED_BYTES, CARRIED_SHARE = 8 << 30, 0.5
"""What prefixes may take on disk while layers move from worker to worker, and of what is free there."""

_LOAD_ATTEMPTS = 3

Keepers = tuple[tuple[str, LayerRange | None, int], ...]
"""The address, the layers and the process of each worker that keeps a part of a prefix."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Hit:
    """A kept prefix to begin from: the first `length` tokens of an entry.

    source: "memory" or "disk". load_ms: how long bringing it from disk into the workers' memory took.
    """

    entry: Entry
    length: int
    source: str
    load_ms: float = 0.0


@dataclass(slots=True, weakref_slot=True, eq=False)
class Arrival:
    """A prefix on its way into the workers' memory.

    freed: whether workers were told to free that name meanwhile, so that nobody knows which of them keep it.
    """

    entry: Entry
    freed: bool = False


class PrefixCache:
    """The kept prefixes of a cluster. Use as `async with`; leaving it waits for what is still being written to disk,
    unless an error ends it.

    text_fingerprint: a hash of tokenizer and chat template. disk: where prefixes outlive the workers, if anywhere.
    """

    def __init__(
        self,
        cluster: Cluster,
        text_fingerprint: str,
        *,
        disk: DiskCache | None = None,
        policy: KeepPolicy | None = None,
    ) -> None:
        self._cluster, self._text, self._disk = cluster, text_fingerprint, disk
        self.policy = policy or KeepPolicy()
        self._indices: dict[str, tuple[Keepers, PrefixIndex]] = {}
        self._arrivals: weakref.WeakSet[Arrival] = weakref.WeakSet()
        # What workers are being told to free, by the tasks that tell them.
        self._frees: dict[asyncio.Task[None], frozenset[str]] = {}
        self._leftovers = Leftovers()
        self._leftover_keepers: Keepers = ()
        """The workers that keep the leftovers."""
        self._heirs: dict[tuple[str, int], tuple[str, int]] = {}
        """Of workers whose places others take, with all that they keep: address and process of either."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._loading = asyncio.Lock()

    async def __aenter__(self) -> PrefixCache:
        if self._disk is not None:
            await self._disk.start()
        # What was loaded a moment ago keeps nothing: nobody is asked.
        workers = [*self._cluster.workers, *filter(None, [self._cluster.draft_worker])]
        if any(worker.snapshot_bytes for worker in workers):
            try:
                await self._look_for_leftovers()
            except FlashsplitError as error:
                log.warning("prefix.leftovers_unknown", why=error.message)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # After Ctrl-C, for example; entries that are half written leave nothing behind.
            for task in self._tasks:
                task.cancel()
        await self.close()

    async def close(self) -> None:
        """Wait for prefixes on their way to disk, then leave the store."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._disk is not None:
            await self._disk.close()

    @property
    def pending(self) -> int:
        """How many prefixes are still on their way to memory or disk."""
        return len(self._tasks)

    @property
    def arriving(self) -> int:
        """How many prefixes are on their way into the workers' memory now, from sessions or from disk."""
        return len(self._arrivals)

    def lineage(self, *, with_draft: bool) -> Lineage:
        """Return what the states of this cluster's requests depend on."""
        return lineage_of(self._cluster, self._text, with_draft=with_draft)

    # --- what was kept before

    async def _look_for_leftovers(self) -> None:
        """Learn what all workers keep since before this process, and have the rest freed."""
        places = self._cluster.snapshot_places(with_draft=True)
        lists = [await (await self._cluster.snapshots(place.address)).list_snapshots() for place in places]
        kept = [*zip(places, lists, strict=True)]
        draft = next((found for place, found in kept if place.layers is None), None)
        self._leftovers, partial = common([found for place, found in kept if place.layers is not None], draft)
        self._leftover_keepers = self._keepers(with_draft=True)
        self._free(partial)
        log.info("prefix.leftovers", kept=len(self._leftovers), freed=len(partial))

    def _recognise(self, lineage: Lineage, index: PrefixIndex, token_ids: tuple[int, ...]) -> None:
        """Put the leftovers into the index that these tokens begin with."""
        if len(self._leftovers) and self._keepers(with_draft=True) != self._leftover_keepers:
            self._drop_leftovers(self._leftovers.snapshot_ids)
        for leftover in self._leftovers.beginnings(lineage, token_ids):
            entry = self._entry_of(leftover, lineage, index, token_ids)
            if entry is None:
                self._drop_leftovers([leftover.snapshot_id])
                continue
            self._leftovers.take(leftover.snapshot_id)
            index.add(entry)
            log.info("prefix.recognised", slot=entry.snapshot_id[:12], position=len(entry.token_ids))
            # Its predecessor may have ended before it was written.
            self._keep_on_disk(lineage, entry)

    def _entry_of(
        self, leftover: Leftover, lineage: Lineage, index: PrefixIndex, token_ids: tuple[int, ...]
    ) -> Entry | None:
        """Return the entry of a leftover; None where something is missing of it."""
        parent = None
        if leftover.parent_id is not None:
            parent = index.get(leftover.parent_id)
            if parent is None or token_ids[: len(parent.token_ids)] != parent.token_ids:
                return None
        if lineage.draft is not None and not leftover.in_draft:
            return None
        return Entry(leftover.snapshot_id, token_ids[: leftover.token_count], parent, self._trimmable(lineage))

    def _drop_leftovers(self, snapshot_ids: Iterable[str]) -> None:
        """Forget leftovers, and have all workers free them."""
        self._free([gone for name in [*snapshot_ids] for gone in self._leftovers.remove(name)])

    # --- finding

    async def find(
        self, token_ids: tuple[int, ...], *, with_draft: bool, least_tokens: int | None = None
    ) -> Hit | None:
        """Return the longest kept prefix, None without one; one that is only on disk is brought into memory first.

        least_tokens: the shortest in memory that is taken; None for that of the policy.
        """
        lineage = self.lineage(with_draft=with_draft)
        index = self._index(lineage)
        self._recognise(lineage, index, token_ids)
        match = index.find(token_ids)
        if self._disk is not None:
            for _ in range(_LOAD_ATTEMPTS):
                await self._disk.refresh()
                entry = self._disk.find(lineage, token_ids)
                if entry is None or (match is not None and match.length >= len(entry.token_ids)):
                    break
                started = time.monotonic()
                try:
                    loaded = await self._load(self._disk, lineage, entry)
                except DataLoss:
                    # That entry is discarded now; a shorter one may be whole.
                    continue
                except FlashsplitError as error:
                    log.warning("prefix.load_failed", slot=entry.snapshot_id[:12], why=error.message)
                    # What was in memory may have left it meanwhile.
                    match = index.find(token_ids)
                    break
                return Hit(loaded, len(loaded.token_ids), "disk", (time.monotonic() - started) * 1e3)
        if match is None or match.length < (self.policy.min_tokens if least_tokens is None else least_tokens):
            return None
        return Hit(match.entry, match.length, "memory")

    def forget(self, hit: Hit, *, with_draft: bool) -> None:
        """Drop a hit, because a worker doesn't have it after all."""
        self.drop([hit.entry.snapshot_id], lineages=[self.lineage(with_draft=with_draft)])

    async def _load(self, disk: DiskCache, lineage: Lineage, disk_entry: DiskEntry) -> Entry:
        """Bring an entry and what it builds on from disk into the workers.

        Raises DataLoss for a damaged entry, which is discarded, and what the workers raise.
        """
        index = self._index(lineage)
        parent: Entry | None = None
        async with self._loading:
            # Who waited for its turn finds the workers that there are now.
            places = self._cluster.snapshot_places(with_draft=lineage.draft is not None)
            for node in disk.chain(disk_entry):
                entry = index.get(node.snapshot_id)
                if entry is None:
                    entry = Entry(node.snapshot_id, node.token_ids, parent, self._trimmable(lineage))
                    arrival = await self.expect(entry)
                    try:
                        await self._import(disk, node, places)
                    except FlashsplitError as error:
                        if isinstance(error, DataLoss):
                            await disk.discard(node, error.message)
                        self._free([node.snapshot_id])
                        raise
                    if arrival.freed or (parent is not None and parent.snapshot_id not in index):
                        raise NotFound(f"the prefix {node.snapshot_id} was freed while it came from disk")
                    index.add(entry)
                parent = entry
        self._spawn(disk.record_use(disk_entry))
        assert parent is not None
        return parent

    async def _import(self, disk: DiskCache, node: DiskEntry, places: tuple[SnapshotPlace, ...]) -> None:
        started = time.monotonic()
        outcomes = await asyncio.gather(
            *(self._import_part(disk, node, place) for place in places),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        log.info(
            "prefix.loaded",
            slot=node.snapshot_id[:12],
            position=len(node.token_ids),
            stages=sum(place.layers is not None for place in places),
            bytes=sum(outcome for outcome in outcomes if isinstance(outcome, int)),
            ms=round((time.monotonic() - started) * 1e3, 1),
        )

    async def _import_part(self, disk: DiskCache, node: DiskEntry, place: SnapshotPlace) -> int:
        snapshots = await self._cluster.snapshots(place.address)
        frames = disk.frames(node, place.owner, place.layers, place.fingerprint)
        async with contextlib.aclosing(frames):
            imported = await snapshots.import_snapshot(frames)
        self.drop(imported.evicted_ids)
        return imported.stored_bytes

    # --- keeping

    async def expect(self, entry: Entry) -> Arrival:
        """Say that a prefix is about to come into the workers' memory; `record` ends that.

        Returns once they have freed whatever they were told to free of its name: a free that came later would take what
        is to be kept.
        """
        while earlier := [task for task, names in self._frees.items() if entry.snapshot_id in names]:
            await asyncio.wait(earlier)
        arrival = Arrival(entry)
        self._arrivals.add(arrival)
        return arrival

    def record(self, lineage: Lineage, arrival: Arrival, saved: SnapshotSaved) -> bool:
        """Take note of the workers' answer to a save; return False where not all of them keep it."""
        entry = arrival.entry
        self._arrivals.discard(arrival)
        self.drop([name for part in saved.parts for name in part.evicted_ids])
        refusal = next((part for part in saved.parts if part.refusal), None)
        index = self._index(lineage)
        is_orphan = entry.parent is not None and entry.parent.snapshot_id not in index
        if refusal is not None or is_orphan or arrival.freed:
            why = "it was freed on its way" if arrival.freed else "what it builds on is gone"
            log.info(
                "prefix.not_kept",
                slot=entry.snapshot_id[:12],
                position=len(entry.token_ids),
                why=why if refusal is None else f"{refusal.location}: {refusal.refusal}",
            )
            # Another free of what was freed already could only meet a prefix that is kept anew.
            if not arrival.freed:
                self._free([entry.snapshot_id])
            return False
        index.add(entry)
        self._leftovers.take(entry.snapshot_id)
        log.info("prefix.kept", slot=entry.snapshot_id[:12], position=len(entry.token_ids), **summary(saved.parts))
        self._keep_on_disk(lineage, entry)
        return True

    def drop(self, snapshot_ids: Iterable[str], *, lineages: Iterable[Lineage] | None = None) -> None:
        """Forget prefixes that some worker no longer keeps, and have the others free them too."""
        snapshot_ids = [*snapshot_ids]
        self._drop_leftovers(snapshot_ids)
        indices = (
            [index for _, index in self._indices.values()]
            if lineages is None
            else [self._index(lineage) for lineage in lineages]
        )
        removed = [entry for index in indices for snapshot_id in snapshot_ids for entry in index.remove(snapshot_id)]
        self._free([entry.snapshot_id for entry in removed])

    def drop_all(self) -> None:
        """Forget all prefixes in the workers' memory, and have it freed; those on disk stay."""
        self.drop([snapshot_id for _, index in self._indices.values() for snapshot_id in index.snapshot_ids])
        self._drop_leftovers(self._leftovers.snapshot_ids)

    def finish(self, session: StageSession, keep: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that calls `keep`, which keeps the end of an answer, and then closes the session."""

        async def run() -> None:
            try:
                async with asyncio.timeout(END_GRACE_S):
                    await keep()
            except (TimeoutError, FlashsplitError) as error:
                log.info("prefix.end_not_kept", why=str(error))
            finally:
                await session.close()

        self._spawn(run())

    def _keep_on_disk(self, lineage: Lineage, entry: Entry) -> None:
        """Have a prefix written to disk that is in memory, where there is a store and it is worth it."""
        if self._disk is not None and len(entry.token_ids) >= self._disk.min_tokens:
            self._spawn(self._write(self._disk, lineage, entry, MIN_DISK_GAIN_TOKENS))

    async def _write(self, disk: DiskCache, lineage: Lineage, entry: Entry, least_gain: int) -> None:
        """Write a prefix that is in memory. least_gain: tokens that it must add to the one that it builds on there."""
        async with self._writing:
            if disk.has(entry.snapshot_id):
                return
            base = entry.parent
            while base is not None and not disk.has(base.snapshot_id):
                base = base.parent
            first = 0 if base is None else len(base.token_ids)
            if len(entry.token_ids) - first < least_gain:
                return
            base_id = None if base is None else base.snapshot_id
            parts = [
                PartSource(place.owner, place.layers, self._export(place, entry.snapshot_id, first, base_id))
                for place in self._cluster.snapshot_places(with_draft=lineage.draft is not None)
            ]
            try:
                await disk.save(lineage, entry.token_ids, first, base_id, parts)
            except FlashsplitError as error:
                log.warning("prefix.write_failed", slot=entry.snapshot_id[:12], why=error.message)

    async def _export(
        self, place: SnapshotPlace, snapshot_id: str, first_token: int, parent_id: str | None
    ) -> AsyncIterator[SnapshotFrame]:
        snapshots = await self._cluster.snapshots(place.address)
        async with contextlib.aclosing(
            snapshots.export_snapshot(place.owner, snapshot_id, first_token, parent_id)
        ) as frames:
            async for frame in frames:
                yield frame

    def _free(self, snapshot_ids: list[str]) -> None:
        if snapshot_ids:
            names = frozenset(snapshot_ids)
            for arrival in self._arrivals:
                arrival.freed |= arrival.entry.snapshot_id in names
            task = self._spawn(self._free_everywhere(snapshot_ids))
            self._frees[task] = names
            task.add_done_callback(self._frees.pop)

    async def _free_everywhere(self, snapshot_ids: list[str]) -> None:
        for address in {place.address for place in self._cluster.snapshot_places(with_draft=True)}:
            # A worker that is gone keeps nothing.
            with contextlib.suppress(FlashsplitError):
                # Entries that build on others are freed first.
                await (await self._cluster.snapshots(address)).free_snapshots(snapshot_ids[::-1])

    def _index(self, lineage: Lineage) -> PrefixIndex:
        """Return the index of what the present workers keep. What others kept is whole no more once one of them is
        another, and is freed."""
        keepers = self._keepers(with_draft=lineage.draft is not None)
        known, index = self._indices.get(lineage.key, (keepers, PrefixIndex()))
        if keepers not in (known, self._inherited(known)):
            self._free([*index.snapshot_ids])
            index = PrefixIndex()
        self._indices[lineage.key] = keepers, index
        return index

    def _keepers(self, *, with_draft: bool) -> Keepers:
        """Return the workers that keep the parts of a prefix, by their addresses, processes and layers."""
        cluster = self._cluster
        processes = [worker.process_id for worker in cluster.workers]
        if cluster.draft_worker is not None:
            processes.append(cluster.draft_worker.process_id)
        places = cluster.snapshot_places(with_draft=with_draft)
        return tuple((place.address, place.layers, process) for place, process in zip(places, processes, strict=False))

    def _inherited(self, keepers: Keepers) -> Keepers:
        """Return these workers, with the heirs of those that have one."""
        found = []
        for address, layers, process in keepers:
            heir_address, heir_process = self._heirs.get((address, process), (address, process))
            found.append((heir_address, layers, heir_process))
        return tuple(found)

    # --- over a new split

    @contextlib.asynccontextmanager
    async def carried(self) -> AsyncIterator[None]:
        """Have what the workers keep in memory serve the layers too that they have at the end of the context.

        No session may be open. What is on no disk lies in files of the context's own within it, of which the oldest go
        where they find no room. Nothing comes back where no layers have moved, or where files cannot be written.
        """
        if self._tasks:
            # Ends of answers that are being kept, too.
            await asyncio.wait(self._tasks, timeout=END_GRACE_S)
        keepers = self._keepers(with_draft=True)
        lineages = [self.lineage(with_draft=False)]
        if self._cluster.draft is not None:
            lineages.append(self.lineage(with_draft=True))
        kept = [(lineage, entry) for lineage in lineages for entry in self._index(lineage).entries]
        kept = [one for one in kept if self._disk is None or not self._disk.has(one[1].snapshot_id)]
        scratch = None
        if kept:
            try:
                scratch = Scratch()
            except OSError as error:
                log.warning("prefix.not_carried", why=f"no temporary directory can be made: {error.strerror}")
        try:
            files = None if scratch is None else await self._set_aside(scratch.path, lineages, kept)
            yield
            if files is not None and self._cluster.alive and self._keepers(with_draft=True) != keepers:
                await self._bring_back(files, kept)
        finally:
            if scratch is not None:
                await asyncio.to_thread(scratch.remove)

    async def _set_aside(
        self, directory: Path, lineages: Sequence[Lineage], kept: Sequence[tuple[Lineage, Entry]]
    ) -> DiskCache | None:
        """Write prefixes that are in memory to files in a directory; return None where that cannot be done."""
        started = time.monotonic()
        layers = [place.layers for place in self._cluster.snapshot_places(with_draft=False) if place.layers is not None]
        room = int(CARRIED_SHARE * shutil.disk_usage(directory).free)
        files = DiskCache(
            open_store(directory / "prefixes"),
            lineages,
            layers[-1].last,
            self._cluster.target.family,
            budget_bytes=max(1, min(room, MOST_CARRIED_BYTES)),
            min_tokens=1,
        )
        try:
            await files.start()
            for lineage, entry in kept:
                await self._write(files, lineage, entry, 1)
        except FlashsplitError as error:
            log.warning("prefix.not_carried", why=error.message)
            return None
        log.info("prefix.set_aside", prefixes=len(kept), ms=round((time.monotonic() - started) * 1e3, 1))
        return files

    async def _bring_back(self, files: DiskCache, kept: Sequence[tuple[Lineage, Entry]]) -> None:
        """Bring prefixes from files into the memory of the workers that there are now."""
        for lineage, entry in kept:
            found = files.find(lineage, entry.token_ids, whole=True)
            if found is None:
                continue
            try:
                await self._load(files, lineage, found)
            except FlashsplitError as error:
                log.warning("prefix.not_carried", slot=entry.snapshot_id[:12], why=error.message)
                if not self._cluster.alive:
                    return

    # --- handing over

    async def copy(self, successor: Successor, copied: set[tuple[SnapshotOwner, str]]) -> int:
        """Copy all that a worker keeps of prefixes to the one that is about to take its place, but for what is copied
        already; what cannot be copied is forgotten. Returns how many bytes were copied.

        Raises Unavailable where the other worker is lost.
        """
        copied_bytes = 0
        gone = successor.gone.address, successor.gone_process_id
        for keepers, index in [*self._indices.values()]:
            owners = [
                SnapshotOwner.DRAFT if layers is None else SnapshotOwner.STAGE
                for address, layers, process in keepers
                if (address, process) == gone
            ]
            # Each behind what it builds on.
            for snapshot_id in index.snapshot_ids:
                for owner in owners:
                    entry = index.get(snapshot_id)
                    if entry is None or (owner, snapshot_id) in copied:
                        continue
                    try:
                        copied_bytes += await self._copy_part(entry, owner, successor)
                    except FlashsplitError as error:
                        # Then nothing is wrong with the prefix.
                        self._cluster.check_prepared(successor)
                        log.info("prefix.not_copied", slot=snapshot_id[:12], why=error.message)
                        self.drop([snapshot_id])
                    else:
                        copied.add((owner, snapshot_id))
        return copied_bytes

    async def _copy_part(self, entry: Entry, owner: SnapshotOwner, successor: Successor) -> int:
        """Copy the part of a prefix that a worker keeps, and return its bytes."""
        source = await self._cluster.snapshots(successor.gone.address)
        target = await self._cluster.snapshots(successor.member.address)
        parent = entry.parent
        first, parent_id = (0, None) if parent is None else (len(parent.token_ids), parent.snapshot_id)
        frames = source.export_snapshot(owner, entry.snapshot_id, first, parent_id)
        async with contextlib.aclosing(frames):
            imported = await target.import_snapshot(frames)
        self.drop(imported.evicted_ids)
        return imported.stored_bytes

    def let_inherit(self, successor: Successor) -> None:
        """Have prefixes stay whole when a worker's place is taken by the one to which they were copied."""
        gone = successor.gone.address, successor.gone_process_id
        self._heirs = {gone: (successor.member.address, successor.process_id)}

    def _trimmable(self, lineage: Lineage) -> bool:
        targets = [worker.target for worker in self._cluster.workers]
        draft = self._cluster.draft if lineage.draft is not None else None
        return all(target is not None and target.state_trimmable for target in targets) and (
            draft is None or draft.state_trimmable
        )

    def new_entry(self, lineage: Lineage, token_ids: tuple[int, ...], parent: Entry | None) -> Entry:
        """Return the entry for a state that is to be saved; `record` adds it to the index."""
        return Entry(lineage.snapshot_id(token_ids), token_ids, parent, self._trimmable(lineage))

    def get(self, lineage: Lineage, snapshot_id: str) -> Entry | None:
        """Return the entry of this name that all workers keep; None without one."""
        return self._index(lineage).get(snapshot_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("prefix.task_failed", exc_info=error)


def lineage_of(cluster: Cluster, text_fingerprint: str, *, with_draft: bool) -> Lineage:
    """Return what the states of a cluster's requests depend on."""
    target = cluster.target
    draft = cluster.draft if with_draft else None
    targets = [worker.target for worker in cluster.workers if worker.target is not None]
    slides = any(not stage.state_trimmable and not stage.is_recurrent for stage in targets)
    return Lineage(
        model=target.fingerprint,
        dtype=target.dtype,
        text=text_fingerprint,
        draft=None if draft is None else draft.fingerprint,
        draft_dtype=None if draft is None else draft.dtype,
        kv_dtype=target.kv_dtype,
        kept_rows=WINDOWS if slides else None,
    )


def summary(parts: tuple[SnapshotPart, ...]) -> dict[str, object]:
    """Return the figures of a save or restore for its log line."""
    return {
        "stages": sum(part.location.stage is not None for part in parts),
        "bytes": sum(part.size_bytes for part in parts),
        "ms": round(sum(part.elapsed_ns for part in parts) / 1e6, 3),
    }
