"""`flashsplit bench decode`, `verify`, `draft`, `cycle`, `prefill`, and `step` for several of them in one run.

How near steps come to the time in which their weights can be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from rich.table import Table

from coordinator.bench.checkpoints import CheckpointOptions
from coordinator.bench.floor import Floor
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.bench.step_bench import DRAFTING, KINDS, StepBench, StepFigures, StepSizes, times_decode
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.text.model_files import read_model_files


@click.command(cls=Command)
@click.argument("kinds", nargs=-1, type=click.Choice(KINDS))
@with_options
@config_option
async def step(
    checkpoint: CheckpointOptions,
    workers: ClusterOptions,
    sizes: StepSizes,
    output: OutputOptions,
    kinds: tuple[str, ...],
) -> None:
    """Measure steps of several kinds beside their floors; all kinds where none is named.

    decode: one row. verify: --rows rows. cycle: a verify and the draft's next block. draft: the latter alone, from the
    verify's outcome on. prefill: --prefill-tokens rows in chunks of --prefill-chunk, so that stages work on different
    ones at once. A floor is the least time that a step can take, as its weights and caches must be read. Tokens are
    random; times do not depend on them.
    """
    kinds = kinds or KINDS
    with checkpoint.directories([kind for kind in kinds if kind in DRAFTING]) as (target, draft):
        async with contextlib.AsyncExitStack() as stack:
            with LoadBars() as bars:
                cluster = workers.cluster(read_model_files(target), draft, bars, prefix_cache_bytes=0)
                await stack.enter_async_context(cluster)
            progress = stack.enter_context(progress_bars())
            bench = StepBench(cluster, sizes)
            bench.check(kinds)
            speeds = progress.add_task("measuring the devices", total=None)
            floor = await Floor.of(cluster, target)
            progress.remove_task(speeds)
            figures = []
            for kind in kinds:
                task = progress.add_task(f"measuring {kind}", total=bench.ticks(kind))
                figures.append(await bench.measure(kind, floor, partial(progress.advance, task)))
            engines = [str(worker.target.step_engine) for worker in cluster.workers if worker.target is not None]
            bandwidth = [speed.copy_bytes_per_s for speed in floor.speeds]
    rates = ", ".join(f"{rate / 1e12:.2f}" for rate in bandwidth)
    ratios = times_decode(figures)
    output.show(
        figures,
        table(figures, ratios),
        cluster.workers,
        note=f"{checkpoint.name} by {', '.join(engines)}; copies at {rates} TB/s",
        engines=engines,
        copy_bytes_per_s=bandwidth,
        times_decode=ratios,
    )


@dataclass(frozen=True, slots=True)
class SingleKind:
    """The command of one kind of step.

    help: what its help says; beside: kinds that it is compared with; without: options of `step` that it has no use for,
    by parameter name.
    """

    help: str
    beside: tuple[str, ...] = ("decode",)
    without: frozenset[str] = frozenset(("prefill_tokens", "prefill_chunk"))


_FLOOR = "Beside it stands its floor: the weights and caches that it reads, over the rate of a large copy."

SINGLE_KINDS = {
    "decode": SingleKind(
        f"Measure a step of one row, as plain decode takes them.\n\n{_FLOOR}",
        beside=(),
        without=frozenset(("rows", "prefill_tokens", "prefill_chunk")),
    ),
    "verify": SingleKind(
        "Measure a step of --rows rows, by which draft tokens are verified, and one of one row.\n\n"
        f"Their ratio is what checking a block costs. {_FLOOR}"
    ),
    "draft": SingleKind(
        "Measure the draft's next block, and a step of one row.\n\n"
        f"The draft's time is that from a verify's outcome until the draft tokens are there. {_FLOOR}"
    ),
    "cycle": SingleKind(
        "Measure a verify with the draft's next block, and a step of one row.\n\n"
        "What a step with DFlash takes. Their ratio is how many tokens a cycle must produce so that speculation pays. "
        f"{_FLOOR}"
    ),
    "prefill": SingleKind(
        "Measure the prefill of --prefill-tokens, in chunks of --prefill-chunk.\n\n"
        "Stages work on different chunks at once. Beside it stands its floor: its products over the rate of a large "
        "one.",
        beside=(),
        without=frozenset(("rows", "context", "steps")),
    ),
}


def single_kind(kind: str) -> click.Command:
    """Return `flashsplit bench KIND`: `step` of that kind and those beside it, with the options that matter."""
    choice = SINGLE_KINDS[kind]

    def measure(**values: Any) -> None:
        """Run `step`; options that the kind has no use for have their defaults."""
        click.get_current_context().invoke(step, kinds=(*choice.beside, kind), **values)

    parameters = [option for option in step.params if option.name not in choice.without | {"kinds"}]
    return Command(kind, callback=measure, params=parameters, help=choice.help)


def table(rows: Sequence[StepFigures], ratios: Mapping[str, float]) -> Table:
    """Return the figures for people. ratios: of a kind of step to a decode, where there are some."""
    headings = ("step", "rows", "context", "ms", "in the stages ms", "floor ms", "of the floor")
    figures = empty_table(*headings, *(["times decode"] if ratios else []))
    for row in rows:
        cells = [row.kind, str(row.rows), str(row.context), f"{row.ms:.3f}"]
        cells += [f"{row.computing_ms:.3f}" if row.computing_ms else "", f"{row.floor_ms:.3f}", f"{row.share:.0%}"]
        figures.add_row(*cells, *([f"{ratios[row.kind]:.2f}"] if row.kind in ratios else []))
    return figures
