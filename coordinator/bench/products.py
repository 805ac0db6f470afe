"""`flashsplit bench products`: what the products of a step take with packed matrices, beside dense ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.table import Table

from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.option_groups import with_options
from services.errors import FailedPrecondition

PROGRAM = (sys.executable, "-m", "shard_worker.measure.products")


@dataclass(frozen=True, slots=True)
class ProductFigures:
    """Milliseconds of all products of a step for so many rows. floor_ms: of reading the packed matrices once."""

    rows: int
    packed_ms: float
    dense_ms: float | None
    floor_ms: float
    packed_bytes: int


@click.command(cls=Command)
@with_options
@click.option("--shape", default="qwen3-8b", show_default=True, help="qwen3-8b or qwen3.6-27b.")
@click.option("--packing", default="q4_k_m", show_default=True, help="q4_k_m, int4, awq, q8_0, fp8, mxfp4, …")
@click.option("--rows", default="1,16,64,256,512", show_default=True, metavar="N[,N…]", help="Rows of a step.")
@click.option("--bandwidth", type=float, metavar="GB/s", help="What the floor is counted with; else a copy's.")
@click.option("--no-dense", is_flag=True, help="Leave out dense matrices, which may not fit.")
async def products(
    output: OutputOptions, shape: str, packing: str, rows: str, bandwidth: float | None, no_dense: bool
) -> None:
    """Measure the products of a step with packed matrices, on this machine's GPU.

    All matrices of a model's shape are random and multiplied one behind the other as a step does, with what lies
    between them but attention. Dense: the same in bfloat16. Floor: reading the packed matrices once.
    """
    command = [*PROGRAM, "--shape", shape, "--packing", packing, "--rows", rows]
    command += [] if bandwidth is None else ["--bandwidth", str(bandwidth)]
    command += ["--no-dense"] if no_dense else []
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await process.communicate()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise FailedPrecondition(f"the products could not be measured: {' '.join(last)}", reason="MEASURING_FAILED")
    figures = [ProductFigures(**json.loads(line)) for line in printed.splitlines()]
    output.show(figures, table(figures))


def table(figures: Sequence[ProductFigures]) -> Table:
    """Return the figures for people."""
    shown = empty_table("rows", "packed", "dense", "dense / packed", "floor", "of the floor")
    for row in figures:
        dense, ratio = ("", "") if row.dense_ms is None else (f"{row.dense_ms:.2f} ms", row.dense_ms / row.packed_ms)
        shown.add_row(
            str(row.rows),
            f"{row.packed_ms:.2f} ms",
            dense,
            f"{ratio:.2f}" if ratio else "",
            f"{row.floor_ms:.2f} ms",
            f"{row.floor_ms / row.packed_ms:.0%}",
        )
    return shown
