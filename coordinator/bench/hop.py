"""`flashsplit bench hop`: what a step costs on its way between two processes of this host, by how much it carries."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.table import Table

from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import progress_bars
from coordinator.cli.option_groups import with_options
from services.bench.hop_probe import MAX_BYTES, HopProbe
from services.errors import InvalidArgument
from services.messages.description import Role
from services.processes.launch import Launch
from services.processes.worker_process import WorkerProcess
from services.rpc.payload_transport import PayloadTransport
from services.sizes import parse_size

SIZES = "10KB,160KB,1MB,5MB,20MB,100MB"
PROGRAM = (sys.executable, "-m", "services.bench.hop_probe")
BUDGET_S = 2.0


@dataclass(frozen=True, slots=True)
class HopFigures:
    """Figures of one size: medians, in microseconds, of one copy in memory and of round trips that carry it one way."""

    size_bytes: int
    copy_us: float
    bare_us: float
    stream_us: float
    shared_us: float


@click.command(cls=Command)
@with_options
@click.option("--sizes", default=SIZES, show_default=True, metavar="SIZE[,SIZE…]", help="Bytes that a step carries.")
async def hop(output: OutputOptions, sizes: str) -> None:
    """Measure what a step costs on its way between two processes of this host.

    A round trip each: the payload there, a few bytes back. Copy: the same bytes copied once in memory. Bare: a gRPC
    stream of plain bytes. Stream and shared: a step to a stage that computes nothing, with --payload-transport stream
    and shared.
    """
    payloads = [parse_size(text.strip(), "--sizes") for text in sizes.split(",")]
    for size in payloads:
        if not 0 < size <= MAX_BYTES:
            raise InvalidArgument(f"--sizes: {size} bytes; sizes go from 1 to {MAX_BYTES}", field="--sizes")
    process = WorkerProcess("cpu", [Role.TARGET], Launch(commands={"cpu": PROGRAM}))
    try:
        await process.start()
        probe = HopProbe(process.address)
        rows = []
        with progress_bars() as progress:
            for size in progress.track(payloads, description="measuring"):
                rows.append(await measure(probe, size))
    finally:
        await process.stop()
    output.show(rows, table(rows))


async def measure(probe: HopProbe, size: int) -> HopFigures:
    """Measure one size in every way, by turns, so that a busy moment hits all of them."""
    times: dict[str, list[float]] = {"bare": [], "stream": [], "shared": []}
    once = statistics.median(await probe.bare_s(size, 3))
    repeat = max(4, min(60, int(BUDGET_S / 12 / max(once, 1e-5))))
    for _ in range(4):
        times["bare"] += (await probe.bare_s(size, repeat))[1:]
        times["stream"] += (await probe.step_s(size, PayloadTransport.STREAM, repeat))[1:]
        times["shared"] += (await probe.step_s(size, PayloadTransport.SHARED, repeat))[1:]
    medians = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    return HopFigures(size, copy_us(size), medians["bare"], medians["stream"], medians["shared"])


def copy_us(size: int) -> float:
    """Return the microseconds of copying so many bytes once, into memory that is there already."""
    source, target = bytes(size), bytearray(size)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def table(rows: Sequence[HopFigures]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "bytes", "copy", "GB/s", "bare", "GB/s", "stream", "GB/s", "shared", "GB/s", "stream / shared"
    )
    for row in rows:
        cells = []
        for us in (row.copy_us, row.bare_us, row.stream_us, row.shared_us):
            cells += [f"{us:,.0f} µs", f"{row.size_bytes / us / 1e3:.2f}"]
        figures.add_row(f"{row.size_bytes:,}", *cells, f"{row.stream_us / row.shared_us:.1f}")
    return figures
