"""`flashsplit bench snapshot`: restoring a prefix from memory, over the wire and from disk, against computing it."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
from rich.table import Table

from coordinator.bench.checkpoints import CheckpointOptions
from coordinator.bench.counts import counts_option
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.cluster.cluster import Cluster, SnapshotPlace
from coordinator.prefix.cache import lineage_of
from coordinator.prefix.disk.disk_cache import DiskCache, PartSource
from coordinator.prefix.policy import chunks
from coordinator.prefix.stores import open_store
from coordinator.text.model_files import ModelFiles, read_model_files
from services.errors import InternalError, InvalidArgument
from services.messages.sampling import SamplingParams
from services.messages.snapshots import SnapshotFrame, SnapshotHeader
from services.messages.steps import Commit, Event, Failure, Forward, SnapshotRestore, SnapshotSave, StepKind
from services.rpc.stage import StageSession
from services.sizes import parse_size

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SnapshotFigures:
    """Figures of one prefix length. Times are the shortest of the repeats; rates are in MB/s, 10^6 bytes a second."""

    tokens: int
    size_bytes: int
    prefill_ms: float
    memory_save_ms: float
    memory_restore_ms: float
    disk_save_ms: float
    disk_restore_ms: float
    export_mb_per_s: float
    import_mb_per_s: float
    copy_mb_per_s: float

    @property
    def memory_gain(self) -> float:
        """How many times faster than computing the prefix restoring it from memory is."""
        return self.prefill_ms / self.memory_restore_ms

    @property
    def disk_gain(self) -> float:
        """How many times faster than computing the prefix restoring it from disk is."""
        return self.prefill_ms / self.disk_restore_ms


@click.command(cls=Command)
@with_options
@config_option
@counts_option("--lengths", default="512,2048,8192", help="Tokens of the prefixes.", least=2)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs of everything but prefill.")
@click.option("--prefill-chunk", type=click.IntRange(1, 8192), default=512, show_default=True, metavar="N",
              help="Prompt tokens a step.")  # fmt: skip
@click.option("--prefix-cache-bytes", default="16GiB", show_default=True, metavar="SIZE",
              help="Host memory for prefixes in each local worker.")  # fmt: skip
@click.option("--kv-cache-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Where the files go for a moment.  [default: the directory for temporary files]")  # fmt: skip
async def snapshot(
    checkpoint: CheckpointOptions,
    workers: ClusterOptions,
    output: OutputOptions,
    lengths: tuple[int, ...],
    repeat: int,
    prefill_chunk: int,
    prefix_cache_bytes: str,
    kv_cache_dir: Path | None,
) -> None:
    """Measure computing a prefix, and the ways around it.

    Memory: kept by the workers and restored there. Disk: fetched from the workers into files, and from files back into
    their memory and restored there. Export and import are the part of that between the processes; copy is how fast the
    same bytes are copied once in memory, the floor of all of it. Local workers talk over Unix sockets; name workers by
    HOST:PORT in --target-devices to measure TCP.
    """
    budget = parse_size(prefix_cache_bytes, "--prefix-cache-bytes")
    async with contextlib.AsyncExitStack() as stack:
        target, draft = stack.enter_context(checkpoint.directories())
        files = read_model_files(target)
        with LoadBars() as bars:
            cluster = workers.cluster(files, draft, bars, prefix_cache_bytes=budget)
            await stack.enter_async_context(cluster)
        rows = []
        with progress_bars() as progress:
            for tokens in progress.track(lengths, description="measuring"):
                with tempfile.TemporaryDirectory(prefix="flashsplit-bench-", dir=kv_cache_dir) as directory:
                    bench = SnapshotBench(cluster, files, directory, prefill_chunk)
                    rows.append(await bench.measure(tokens, repeat))
    output.show(rows, table(rows), cluster.workers)


class SnapshotBench:
    """Measures prefixes on one cluster. directory: an empty one for files; chunk: prompt tokens a step."""

    def __init__(self, cluster: Cluster, files: ModelFiles, directory: str, chunk: int) -> None:
        self._cluster, self._chunk = cluster, chunk
        self._with_draft = cluster.draft is not None
        self._lineage = lineage_of(cluster, files.text_fingerprint, with_draft=self._with_draft)
        self._places = cluster.snapshot_places(with_draft=self._with_draft)
        self._directory, self._num_layers = directory, files.num_layers

    async def measure(self, tokens: int, repeat: int) -> SnapshotFigures:
        """Return all figures of a prefix of so many random tokens."""
        draw = random.Random(tokens)
        ids = tuple(draw.randrange(self._cluster.target.vocab_size) for _ in range(tokens))
        name = self._lineage.snapshot_id(ids)
        await self._prefill(ids[: min(tokens, self._chunk)], None)
        prefill_ms, save_ms = await self._prefill(ids, name)
        for _ in range(repeat - 1):
            await self._free(name)
            _, again_ms = await self._prefill(ids, name)
            save_ms = min(save_ms, again_ms)
        restore_ms = min([await self._restore(ids, name) for _ in range(repeat)])

        exports, imports, saves, loads = [], [], [], []
        for round_ in range(repeat):
            disk = await self._store(f"{self._directory}/{round_}")
            parts, export_ms = await _timed(self._export_all(name))
            exports.append(export_ms)
            await self._free(name)
            imports.append((await _timed(self._import_all(parts)))[1])
            saves.append((await _timed(self._write(disk, ids, name)))[1])
            await self._free(name)
            loads.append((await _timed(self._load(disk, ids)))[1] + await self._restore(ids, name))
            await disk.close()
        await self._free(name)
        size_bytes = sum(part[0].size_bytes for part in parts if isinstance(part[0], SnapshotHeader))

        def rate(milliseconds: Sequence[float]) -> float:
            """Return the MB/s of the fastest try."""
            return size_bytes / 1e3 / min(milliseconds)

        return SnapshotFigures(
            tokens=tokens,
            size_bytes=size_bytes,
            prefill_ms=prefill_ms,
            memory_save_ms=save_ms,
            memory_restore_ms=restore_ms,
            disk_save_ms=min(saves),
            disk_restore_ms=min(loads),
            export_mb_per_s=rate(exports),
            import_mb_per_s=rate(imports),
            copy_mb_per_s=rate([_copy_ms(size_bytes) for _ in range(repeat + 1)]),
        )

    async def _store(self, directory: str) -> DiskCache:
        """Return a new store that takes any amount of prefixes of any length."""
        disk = DiskCache(
            open_store(directory), [self._lineage], self._num_layers, "bench", budget_bytes=1 << 50, min_tokens=1
        )
        await disk.start()
        return disk

    async def _open(self, ids: tuple[int, ...]) -> StageSession:
        """Open a session with room for a prompt and one step behind it."""
        block = 1 if self._cluster.draft is None else self._cluster.draft.block_size
        return await self._cluster.open(
            request_id="bench",
            max_length=len(ids) + block,
            max_rows=max(self._chunk, block),
            block_rows=block,
            prompt_length=len(ids),
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
            speculate=self._with_draft,
        )

    async def _prefill(self, ids: tuple[int, ...], name: str | None) -> tuple[float, float]:
        """Return the milliseconds to the first token and, with a name, from there until the state is kept."""
        session = await self._open(ids)
        try:
            events, started = session.events(), time.monotonic()
            steps = chunks(len(ids), (), self._chunk)
            for step, (first, end) in enumerate(steps):
                kind = StepKind.DECODE if end == len(ids) else StepKind.PREFILL
                await session.forward(Forward(step, first, ids[first:end], kind))
            for _ in steps:
                await _next(events)
            computed = time.monotonic()
            if name is not None:
                await session.save_snapshot(SnapshotSave(name, len(ids)))
                saved = await _next(events)
                refusals = [part.refusal for part in getattr(saved, "parts", ()) if part.refusal]
                if refusals:
                    raise InvalidArgument(
                        f"the workers don't keep it ({refusals[0]}): raise --prefix-cache-bytes",
                        field="--prefix-cache-bytes",
                    )
            return (computed - started) * 1e3, (time.monotonic() - computed) * 1e3
        finally:
            await session.close()

    async def _restore(self, ids: tuple[int, ...], name: str) -> float:
        """Return the milliseconds from asking for the state to the first token."""
        session = await self._open(ids)
        try:
            events, started = session.events(), time.monotonic()
            await session.restore_snapshot(SnapshotRestore(name, len(ids), ids))
            await session.forward(Forward(0, len(ids), (), StepKind.RESUME))
            while not isinstance(await _next(events), Commit):
                pass
            return (time.monotonic() - started) * 1e3
        finally:
            await session.close()

    async def _export_all(self, name: str) -> list[list[SnapshotFrame]]:
        """Fetch a snapshot's parts from all workers, one after the other."""
        return [[frame async for frame in self._export(place, name)] for place in self._places]

    async def _export(self, place: SnapshotPlace, name: str) -> AsyncIterator[SnapshotFrame]:
        """Yield the frames of a snapshot's part on one worker."""
        async for frame in (await self._cluster.snapshots(place.address)).export_snapshot(place.owner, name):
            yield frame

    async def _import_all(self, parts: list[list[SnapshotFrame]]) -> None:
        """Bring a snapshot's parts back to all workers."""
        for place, frames in zip(self._places, parts, strict=True):
            await (await self._cluster.snapshots(place.address)).import_snapshot(_replay(frames))

    async def _write(self, disk: DiskCache, ids: tuple[int, ...], name: str) -> None:
        """Fetch a snapshot from the workers into files."""
        sources = [PartSource(place.owner, place.layers, self._export(place, name)) for place in self._places]
        await disk.save(self._lineage, ids, 0, None, sources)

    async def _load(self, disk: DiskCache, ids: tuple[int, ...]) -> None:
        """Bring a snapshot from files back to the workers. Raises InternalError where the files have none."""
        entry = disk.find(self._lineage, ids)
        if entry is None:
            raise InternalError("what was just written to disk is not found there")
        for place in self._places:
            frames = disk.frames(entry, place.owner, place.layers, place.fingerprint)
            await (await self._cluster.snapshots(place.address)).import_snapshot(frames)

    async def _free(self, name: str) -> None:
        """Have all workers forget a snapshot."""
        for address in {place.address for place in self._places}:
            await (await self._cluster.snapshots(address)).free_snapshots([name])


async def _replay(frames: list[SnapshotFrame]) -> AsyncIterator[SnapshotFrame]:
    """Yield frames that have been fetched."""
    for frame in frames:
        yield frame


async def _next(events: AsyncIterator[Event]) -> Event:
    """Return the next event. Raises InternalError for a failure."""
    event = await anext(events)
    if isinstance(event, Failure):
        raise InternalError(event.message)
    return event


async def _timed(work: Awaitable[T]) -> tuple[T, float]:
    """Return what comes of an awaitable, and the milliseconds until then."""
    started = time.monotonic()
    result = await work
    return result, (time.monotonic() - started) * 1e3


def _copy_ms(size_bytes: int) -> float:
    """Return the milliseconds of copying so many bytes once."""
    # Written to once: untouched memory has no pages of its own to copy from.
    source = bytearray(b"\1") * size_bytes
    started = time.monotonic()
    bytes(source)
    return (time.monotonic() - started) * 1e3


def table(rows: list[SnapshotFigures]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "tokens",
        "MB",
        "prefill ms",
        "memory save ms",
        "memory restore ms",
        "times faster",
        "disk save ms",
        "disk restore ms",
        "times faster",
        "export MB/s",
        "import MB/s",
        "copy MB/s",
    )
    for row in rows:
        figures.add_row(
            str(row.tokens),
            f"{row.size_bytes / 1e6:.1f}",
            f"{row.prefill_ms:.0f}",
            *(f"{value:.1f}" for value in (row.memory_save_ms, row.memory_restore_ms)),
            f"{row.memory_gain:.0f}",
            *(f"{value:.1f}" for value in (row.disk_save_ms, row.disk_restore_ms)),
            f"{row.disk_gain:.0f}",
            *(f"{value:.0f}" for value in (row.export_mb_per_s, row.import_mb_per_s, row.copy_mb_per_s)),
        )
    return figures
