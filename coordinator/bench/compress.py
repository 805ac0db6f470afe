"""`flashsplit bench compress`: what reading a long prompt with a small model takes, and the prefill that it saves."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table

from coordinator.answer import Request
from coordinator.bench.counts import counts_option
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.model import CheckpointPath, ModelOptions
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.placement import parse_place
from coordinator.compression.drafter_worker import DrafterWorker
from coordinator.engine.generation import generate
from coordinator.text.model_files import read_model_files

WARM_MS = 20_000.0
"""A try that takes longer is not repeated."""


@dataclass(frozen=True, slots=True)
class CompressFigures:
    """Figures of a prompt of random tokens, in milliseconds: reading it, prefilling what is kept, prefilling all of it.

    tokens: of the prompt; kept: how many of them are kept.
    """

    tokens: int
    kept: int
    compress_ms: float
    kept_prefill_ms: float
    prefill_ms: float

    @property
    def gain(self) -> float:
        """How many times sooner the first token comes."""
        return self.prefill_ms / (self.compress_ms + self.kept_prefill_ms)


@click.command(cls=Command)
@with_options
@config_option
@click.option("--prefill-drafter", required=True, type=CheckpointPath(),
              metavar="DIR", help="The small Qwen3 that reads the prompts.")  # fmt: skip
@click.option(
    "--prefill-device", metavar="DEVICE|ADDRESS", help="Where that model runs.  [default: beside the first stage]"
)
@counts_option("--lengths", default="2048,8192,32768", help="Tokens of the prompts.")
@click.option(
    "--keep-ratio",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Share of each prompt that is kept.",
)
async def compress(
    model: ModelOptions,
    workers: ClusterOptions,
    output: OutputOptions,
    prefill_drafter: Path,
    prefill_device: str | None,
    lengths: tuple[int, ...],
    keep_ratio: float,
) -> None:
    """Measure how long compressing prompts takes, and what it saves.

    Prompts are random tokens of both models' vocabularies: their meaning is not tested, only time.
    """
    files = read_model_files(model.model)
    async with contextlib.AsyncExitStack() as stack:
        with LoadBars() as bars:
            own = [] if prefill_device is None else [parse_place(prefill_device, "--prefill-device")]
            cluster = workers.cluster(files, model.draft, bars, prefix_cache_bytes=0, beside=own)
            await stack.enter_async_context(cluster)
            drafter = DrafterWorker(
                next(iter(own), cluster.first_place),
                prefill_drafter.absolute(),
                dtype=workers.compute.dtype,
                launch=cluster.launch,
            )
            stack.push_async_callback(drafter.close)
            await drafter.start()
        rows = []
        with progress_bars() as progress:
            for count in progress.track(lengths, description="measuring"):
                rows.append(await measure(cluster, drafter, count, keep_ratio))
    output.show(rows, table(rows), cluster.workers)


async def measure(cluster: Cluster, worker: DrafterWorker, tokens: int, ratio: float) -> CompressFigures:
    """Measure one length. The first of two tries warms up, unless it takes so long that warming up changes nothing."""
    vocabulary = min(cluster.target.vocab_size, (await worker.start()).vocab_size)
    prompt = tuple(secrets.randbelow(vocabulary) for _ in range(tokens))
    compress_ms = 0.0
    kept_tokens: tuple[int, ...] = ()
    for _ in range(2):
        started = time.monotonic()
        compressed = await worker.compress(secrets.token_hex(8), prompt, ratio)
        compress_ms = (time.monotonic() - started) * 1e3
        kept_tokens = tuple(token for first, last in compressed.kept for token in prompt[first:last])
        if compress_ms > WARM_MS:
            break
    return CompressFigures(
        tokens, len(kept_tokens), compress_ms, await _prefill(cluster, kept_tokens), await _prefill(cluster, prompt)
    )


async def _prefill(cluster: Cluster, prompt: tuple[int, ...]) -> float:
    """Return the milliseconds of a prefill; the first of two tries warms up."""
    elapsed_ms = 0.0
    for _ in range(2):
        request = Request(secrets.token_hex(8), prompt, 1, speculate=False)
        elapsed_ms = (await generate(cluster, request, None)).stats.prefill_ms
        if elapsed_ms > WARM_MS:
            break
    return elapsed_ms


def table(rows: list[CompressFigures]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "tokens", "kept", "compress ms", "prefill of the kept ms", "prefill of all ms", "times sooner"
    )
    for row in rows:
        milliseconds = (f"{value:.0f}" for value in (row.compress_ms, row.kept_prefill_ms, row.prefill_ms))
        figures.add_row(str(row.tokens), str(row.kept), *milliseconds, f"{row.gain:.1f}")
    return figures
