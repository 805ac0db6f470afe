"""`flashsplit plan`: who would hold what, what that takes and, where measured, how fast it decodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from coordinator.cli.command import Command
from coordinator.cli.console import console
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions, PlacementOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.model import ModelOptions
from coordinator.cli.options.standby import StandbyOptions
from coordinator.cluster.placement import AUTO, Plan
from coordinator.planning.measuring import measure_workers, places_of, workers_at
from coordinator.planning.memory import Models
from coordinator.planning.picture import show
from coordinator.planning.planner import CONTEXT, SessionLoad, choose_split, faster_subset
from coordinator.planning.report import Report, as_json, make_report
from coordinator.planning.step_time import WorkerSpeed
from coordinator.text.model_files import read_model_files
from services.errors import FailedPrecondition, InvalidArgument
from services.processes.worker_process import list_devices
from services.rpc.peers import Peers

USUAL_LENGTHS = (4096, 32768, 131072)

_EPILOG = """Examples:

\b
  flashsplit plan --model DIR --target-devices cuda:0,hip:0 --target-layer-split 0.3,0.7
                                       memory and traffic of a split; starts nothing
  flashsplit plan --model DIR --draft DIR --target-devices cuda:0,b:7001 --max-model-len 8192,32768 --sessions 4
                                       what four sessions of two lengths would take
  flashsplit plan --model DIR --target-devices cuda:0,b:7001 --target-layers 0:20,20:64 --measure
                                       how fast that split would decode
  flashsplit plan --model DIR --target-devices cpu,cuda:0,b:7001 --auto
                                       the fastest split that fits; its last line is for the other commands

Weights are those of the checkpoint's headers; a local worker that --measure starts loads none of them and ends with
the command. To see how good a prediction is: flashsplit plan --auto, then flashsplit bench decode with the line that
it printed.
"""


@click.command(cls=Command, epilog=_EPILOG)
@with_options
@config_option
@click.option("--max-model-len", metavar="N[,N…]",
              help="Tokens of prompt and answer together, for which the caches are shown.  [default: 4096, 32768 and "
              "131072 as far as the model goes, and the model's own]")  # fmt: skip
@click.option("--sessions", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Requests that hold caches at once.")  # fmt: skip
@click.option("--measure", is_flag=True,
              help="Ask the workers how fast they are, about a second a device, and predict plain decode. Local "
              "workers are started for it and ended after.")  # fmt: skip
@click.option("--auto", is_flag=True,
              help="Choose the layers from such measurements: the same as --target-layer-split auto, and without "
              "--target-devices over all local devices.")  # fmt: skip
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object instead of tables and bars.")
async def plan(
    model: ModelOptions,
    workers: ClusterOptions,
    standby: StandbyOptions,
    max_model_len: str | None,
    sessions: int,
    measure: bool,
    auto: bool,
    as_object: bool,
) -> None:
    """Show a placement without loading anything: who holds which layers, the memory and traffic that takes, and why.

    With --measure also how fast it would decode, and what limits that; with --auto the fastest split that fits.
    """
    files = read_model_files(model.model)
    if auto:
        workers = replace(workers, placement=await _automatic(workers.placement))
    drawn = workers.plan_of(files, has_draft=model.draft is not None, beside=standby.places)
    standby.check(places_of(drawn))
    models = workers.models(model.model, model.draft)
    lengths = parse_lengths(max_model_len, models.target.max_position)
    report: Report
    share = workers.workers.gpu_memory_utilization
    if not (measure or auto or drawn.auto):
        here = [place for place in places_of(drawn) if place.devices == "cpu" or place in drawn.host_computing]
        local = _local_memory() if here else None
        report = make_report(
            models,
            drawn,
            lengths=lengths,
            sessions=sessions,
            local_memory=local,
            memory_share=share,
            notes=standby.notes(models, drawn),
        )
    else:
        speeds = await _measure(workers, drawn, models, files.path)
        load = SessionLoad(max(lengths), sessions)
        chosen = _choose(models, drawn, speeds, load) if auto or drawn.auto else drawn
        notes = [
            *_advice(models, chosen, speeds[: len(chosen.stages)], load),
            *standby.notes(models, chosen),
        ]
        report = make_report(
            models, chosen, lengths=lengths, sessions=sessions, workers=speeds, memory_share=share, notes=notes
        )
    if as_object:
        print(json.dumps(as_json(report)))
    else:
        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else 160))


def parse_lengths(text: str | None, most: int) -> tuple[int, ...]:
    """Return context lengths in tokens, rising. Raises InvalidArgument for what is none, or beyond the model's."""
    if text is None:
        return (*(length for length in USUAL_LENGTHS if length < most), most)
    field = "--max-model-len"
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidArgument(
            f"{field} {text!r} must be whole numbers joined by commas, like 4096,32768", field=field
        ) from None
    if not lengths[0] >= 2 or lengths[-1] > most:
        raise InvalidArgument(
            f"{field} {text!r}: lengths go from 2 to {most}, the model's context; give such ones", field=field
        )
    return tuple(lengths)


async def _automatic(placement: PlacementOptions) -> PlacementOptions:
    """Return the placement that --auto stands for. Raises InvalidArgument where the layers are named too."""
    for flag, value in (
        ("--target-layers", placement.target_layers),
        ("--target-layer-split", placement.target_layer_split),
    ):
        if value is not None and value != AUTO:
            raise InvalidArgument(
                f"--auto chooses the layers and {flag} {value!r} says them: give one of the two, or --measure to see "
                "how fast yours is",
                field="--auto",
            )
    devices = placement.target_devices or ",".join(await asyncio.to_thread(list_devices))
    # One worker holds everything: there is nothing to choose, but still to measure.
    return replace(placement, target_devices=devices, target_layer_split=AUTO if "," in devices else None)


async def _measure(options: ClusterOptions, drawn: Plan, models: Models, directory: Path) -> tuple[WorkerSpeed, ...]:
    """Return how fast each worker of a plan is, in the plan's order, the draft's last. Local ones run only for this."""
    launch = options.launch()
    peers = Peers(security=launch.security, transport=launch.transport)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(peers.close)
        status = stack.enter_context(console.status("starting workers"))
        addresses = await stack.enter_async_context(workers_at(drawn, launch))
        return await measure_workers(
            drawn,
            addresses,
            peers,
            models,
            str(directory.absolute()),
            lambda worker: status.update(f"measuring {worker}"),
        )


def _choose(models: Models, drawn: Plan, workers: Sequence[WorkerSpeed], load: SessionLoad) -> Plan:
    """Return the fastest split that fits. Raises FailedPrecondition where none does."""
    stages = len(drawn.stages)
    draft_worker = workers[stages] if drawn.draft is not None else None
    try:
        return choose_split(models, drawn, workers[:stages], draft_worker, load)
    except FailedPrecondition as error:
        if drawn.draft is None and models.draft is not None:
            error.message += ", or put the draft on another device with --draft-device"
        raise


def _advice(models: Models, chosen: Plan, workers: Sequence[WorkerSpeed], load: SessionLoad) -> list[str]:
    """Return what to know beside the figures: fewer workers that would be faster, if there are such."""
    faster = faster_subset(models, chosen, workers, load)
    if faster is None:
        return []
    indices, prediction = faster
    names = ",".join(str(workers[index].place) for index in indices)
    return [
        f"--target-devices {names} alone would fit and decode at {prediction.tokens_per_s:.1f} tokens/s behind "
        f"{CONTEXT} tokens: every further worker adds a hop to each token"
    ]


def _local_memory() -> tuple[int, int]:
    """Return this host's total and free memory in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
