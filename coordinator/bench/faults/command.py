"""The command: starts clusters, runs their cases, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import click

from coordinator.bench.checkpoints import CheckpointOptions
from coordinator.bench.counts import counts_option
from coordinator.bench.faults.cases import Fault, Phase, Shape, Site, spread_cases
from coordinator.bench.faults.drill import ASKED, Asked, Drill, Outcome, Undisturbed
from coordinator.bench.faults.elsewhere import Elsewhere
from coordinator.bench.faults.figures import hand_over_table, hand_overs, recoveries, recovery_table, summarise, table
from coordinator.bench.faults.switch import why_no_switch
from coordinator.bench.faults.traces import Traces, Watched
from coordinator.bench.report import OutputOptions, print_table
from coordinator.bench.shapes import BLOCK_SIZE
from coordinator.cli.command import Command
from coordinator.cli.console import progress_bars
from coordinator.cli.option_groups import Flag, with_options
from coordinator.cli.options.cluster import ClusterOptions, PlacementOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.prefix import PrefixOptions, StoreOptions
from coordinator.cli.options.standby import StandbyOptions
from coordinator.cli.started_model import StartedModel, start_model
from coordinator.cluster.placement import WorkerPlace, parse_place, parse_places
from coordinator.cluster.supervisor import REPLACE_AFTER_S, supervised
from coordinator.text.common_prefix import common_prefix_length
from coordinator.text.model_files import ModelFiles, read_model_files
from services.errors import FailedPrecondition, InvalidArgument
from services.messages.description import WorkerDescription

GONE_S = 5.0
"""How long what a cluster had may take to be gone once it is closed."""

_LOOK_S = 0.05

STAGES = (1, 2, 3)
"""Numbers of stages where neither they nor devices are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """What befalls workers, how often and when."""

    kills: Annotated[
        int,
        Flag("How often a worker is killed (SIGKILL).", type=click.IntRange(0), metavar="N"),
    ] = 100
    stops: Annotated[
        int,
        Flag("How often a worker is stopped (SIGSTOP), as one whose host hangs.", type=click.IntRange(0), metavar="N"),
    ] = 12
    drains: Annotated[
        int,
        Flag(
            "How often a worker is drained: a new one takes its place, as by flashsplit drain.",
            type=click.IntRange(0),
            metavar="N",
        ),
    ] = 12
    pauses: Annotated[
        int,
        Flag(
            "How often a worker that runs apart, as on another host, is stopped (SIGSTOP) and goes on later.",
            type=click.IntRange(0),
            metavar="N",
        ),
    ] = 2
    reboots: Annotated[
        int,
        Flag(
            "How often a worker that runs apart is killed, and started again later, as with its host: where none "
            "stands by the others take over its layers meanwhile.",
            type=click.IntRange(0),
            metavar="N",
        ),
    ] = 0
    cuts: Annotated[
        int,
        Flag(
            "How often the link to a worker drops all packets for a while. Workers have network namespaces of their "
            "own for that, within the one of this command; where that cannot be, the last line says why.",
            type=click.IntRange(0),
            metavar="N",
        ),
    ] = 2
    pause_for: Annotated[
        float,
        Flag(
            "How long those pauses, reboots and cuts last.", type=click.FloatRange(0, min_open=True), metavar="SECONDS"
        ),
    ] = 30.0
    replace_after: Annotated[
        float,
        Flag(
            "How long a lost worker may take to come back, where none stands by, before its layers are split anew over "
            "the others.",
            type=click.FloatRange(0),
            metavar="SECONDS",
        ),
    ] = REPLACE_AFTER_S
    quiet_minutes: Annotated[
        float,
        Flag(
            "Beforehand, how long clients ask for answers while nothing befalls anybody, all clusters together. No "
            "worker may be taken for lost then, however busy the host is.",
            type=click.FloatRange(0),
            metavar="MINUTES",
        ),
    ] = 0.0
    phases: Annotated[
        str | None,
        Flag(
            f"When, joined by commas, of {', '.join(Phase)}: at a step of that kind; while the worker that takes the "
            "lost one's place loads; while prompts' states are kept, or come from the disk; while another worker "
            "takes its place.  [default: all]",
            metavar="PHASE[,PHASE…]",
        ),
    ] = None
    seed: Annotated[int, Flag("Of the order in which workers, phases and numbers of stages meet.")] = 1

    @property
    def counts(self) -> dict[Fault, int]:
        """How many of each fault."""
        return {
            Fault.KILL: self.kills,
            Fault.STOP: self.stops,
            Fault.DRAIN: self.drains,
            Fault.PAUSE: self.pauses,
            Fault.REBOOT: self.reboots,
            Fault.CUT: self.cuts,
        }

    def chosen(self, *, has_draft: bool) -> list[Phase]:
        """Return the phases. Raises InvalidArgument for an unknown one, and for one that there is not."""
        known = [phase for phase in Phase if has_draft or phase is not Phase.VERIFY]
        names = [str(phase) for phase in known] if self.phases is None else self.phases.split(",")
        for name in names:
            if name.strip() not in known:
                raise InvalidArgument(
                    f"--phases {name.strip()!r} is not one of {', '.join(known)}"
                    + ("" if has_draft else "; drafts are verified with --draft alone"),
                    field="--phases",
                )
        return [Phase(name.strip()) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOptions:
    """What is asked for meanwhile."""

    prompt_tokens: Annotated[
        int, Flag("Tokens of each prompt, random ones with --shape.", type=click.IntRange(8), metavar="N")
    ] = ASKED.prompt_tokens
    max_tokens: Annotated[int, Flag("Tokens of each answer at most.", type=click.IntRange(8), metavar="N")] = (
        ASKED.max_tokens
    )
    after_tokens: Annotated[
        int,
        Flag(
            "At a step of an answer nothing befalls a worker before so many tokens of it have come: what answers lose "
            "is computed anew, the longer they are the longer.",
            type=click.IntRange(0),
            metavar="N",
        ),
    ] = 0
    synthetic_acceptance: Annotated[
        float | None,
        Flag(
            "With --shape: use its draft too, of whose draft tokens so many of a whole block are accepted on average, "
            "by chance, as random weights would accept none. Which depends on where blocks begin, so that answers are "
            "not compared then.",
            type=click.FloatRange(0, BLOCK_SIZE - 1),
            metavar="N",
        ),
    ] = None

    def asked(self) -> Asked:
        """Return what is asked for."""
        if self.after_tokens >= self.max_tokens:
            raise InvalidArgument(
                f"--after-tokens {self.after_tokens} is behind the end of answers of {self.max_tokens} tokens: lower "
                "it, or raise --max-tokens",
                field="--after-tokens",
            )
        is_compared = self.synthetic_acceptance is None
        return Asked(self.prompt_tokens, self.max_tokens, self.after_tokens, is_compared=is_compared)


@click.command(cls=Command)
@with_options
@config_option
@counts_option(
    "--workers",
    default=None,
    help="Numbers of stages, each a worker on the CPU.  "
    f"[default: {','.join(map(str, STAGES))}, without --target-devices]",
)
@counts_option("--requests", default="1,8", help="Answers in flight when a worker is lost.")
async def faults(
    checkpoint: CheckpointOptions,
    cluster: ClusterOptions,
    standby: StandbyOptions,
    wanted: FaultOptions,
    asked: AskedOptions,
    output: OutputOptions,
    workers: tuple[int, ...],
    requests: tuple[int, ...],
) -> None:
    """Kill, stop and drain workers while they answer, and see whether every answer survives.

    \b
      flashsplit bench faults --model DIR --draft DIR --exact --standby cpu
      flashsplit bench faults --model DIR --kills 12 --stops 0 --workers 2 --requests 1 --phases decode,save
      flashsplit bench faults --model DIR --quiet-minutes 10 --kills 0 --stops 0 --drains 0 --pauses 0 --cuts 0
      flashsplit bench faults --shape qwen3-8b --target-devices cuda:0@40GiB,cuda:0@40GiB --standby cuda:0@40GiB

    Starts clusters on this host, one for each number of stages, and with --draft one more each that has the draft in a
    worker of its own; with --target-devices that one cluster, with the draft where --draft-device says. Every kind of
    worker is lost in every phase of answers: while prompts are computed, while tokens are, while prefixes are kept or
    restored, while it is handed over, and again while the lost one is being replaced. Others are stopped for a while
    and go on, or are killed and started again later, or are cut off from all others and reached again. Each answer
    (greedy, with penalties and seeded; drafted and plain) is compared with the answer to the same request undisturbed.
    Nothing else on this host is touched; the prefixes go to a temporary directory. A fault takes about five seconds
    with a small model, a pause or a cut as long as --pause-for says. To cut links, start it in a network of its own:

    \b
      unshare --user --map-root-user --net flashsplit bench faults --model DIR --kills 0 --cuts 4 --pause-for 60

    Ctrl-C ends all that was started and shows the figures so far.

    Below the faults stands what the silence behind lost workers was made of, as medians: known, until the cluster knew;
    whole, until all layers were there again, of which "process" and "load" are the start of workers and the loading of
    what they did not hold; anew, restoring or computing again what the answer was; rest, what remains of the silence
    without these three. "By" says how: by a worker that stood by, by its restart, by layers that were split anew
    (--pauses and --reboots with a short --replace-after measure that), or by the worker itself, when it was called
    again. Hand-overs stand below that, with the bytes that were copied while answers waited, and how long these take
    at the speed of the link.

    With --quiet-minutes clients ask first while nothing befalls anybody, as many as --requests says at most; no worker
    may be taken for lost then.

    Exit status 0 says that no answer was lost, none came out otherwise, and nothing was left behind: no process, no
    directory, no socket, no shared memory. 1 says that something of it happened; the table tells what. On CPUs give
    --dtype float32 or --exact: rounding in 16 bits leads answers other ways.
    """
    stages, lengths = stages_of(cluster, workers), asked.asked()
    counts = wanted.counts
    no_cuts = why_no_switch() if counts[Fault.CUT] else None
    if no_cuts is not None:
        counts[Fault.CUT] = 0
    outcomes: list[Outcome] = []
    undisturbed: list[Undisturbed] = []
    left: list[str] = []
    measured: list[WorkerDescription] = []
    with contextlib.ExitStack() as stack:
        target, draft = stack.enter_context(checkpoint.directories(accepted=asked.synthetic_acceptance))
        files = read_model_files(target)
        placement = cluster.placement
        check(placement, standby, has_draft=draft is not None)
        if placement.target_devices is not None:
            draft_places = [placement.draft_device is not None]
        else:
            draft_places = [False] if draft is None else [False, True]
        shapes = [
            Shape(number, apart, len(standby.places), site)
            for site in Site
            for number in stages
            for apart in draft_places
        ]
        cases = spread_cases(shapes, wanted.chosen(has_draft=draft is not None), requests, counts, wanted.seed)
        models = files, draft
        try:
            with progress_bars() as progress, tempfile.TemporaryDirectory(prefix="flashsplit-faults-") as folder:
                quiet = [shape for shape in shapes if shape.site is Site.CHILDREN] if wanted.quiet_minutes else []
                task = progress.add_task("starting workers", total=len(quiet) + len(cases))
                # Libraries open files of their own with the first cluster, and keep them.
                async with started(*models, cluster, standby, shapes[0], folder) as (running, _):
                    check_lengths(asked, running.cluster.target.max_position)
                by_shape = itertools.groupby(cases, key=lambda case: case.shape)
                groups = [(shape, [*of_shape]) for shape, of_shape in by_shape]
                for shape, of_shape in (*((shape, None) for shape in quiet), *groups):
                    watched = Watched()
                    before = watched.traces()
                    async with started(*models, cluster, standby, shape, folder) as (running, elsewhere):
                        assert running.cache is not None
                        measured = [*running.cluster.workers]
                        drill = Drill(running, running.cache, files, watched, elsewhere, wanted.pause_for, lengths)
                        async with supervised(running.cluster, replace_after_s=wanted.replace_after, quiet=drill.quiet):
                            if of_shape is None:
                                progress.update(task, description=f"nothing befalls {shape.stages} stages")
                                lasts_s = 60 * wanted.quiet_minutes / len(quiet)
                                undisturbed.append(await drill.leave_alone(shape, max(requests), lasts_s))
                                progress.advance(task)
                            for case in of_shape or ():
                                place = f"{case.fault} {case.worker} of {shape.stages}, {case.phase}"
                                progress.update(task, description=place)
                                outcomes.append(await drill.run(case))
                                progress.advance(task)
                    left += await left_behind(watched, before)
        finally:
            show(output, outcomes, undisturbed, left, measured, no_cuts, is_compared=lengths.is_compared)
    is_clean = all(row.is_clean for row in summarise(outcomes)) and all(one.is_clean for one in undisturbed)
    if left or not is_clean:
        raise FailedPrecondition(
            "answers were lost or came out otherwise, workers were taken for lost that were not, or something was left "
            "behind: see above"
        )


def stages_of(cluster: ClusterOptions, workers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of stages of the clusters to be started. Raises InvalidArgument for two sources of them."""
    devices = cluster.placement.target_devices
    if devices is None:
        return workers or STAGES
    if workers:
        raise InvalidArgument(
            f"--workers {','.join(map(str, workers))} has no effect with --target-devices {devices}, which names the "
            "workers: leave one of them out",
            field="--workers",
        )
    return (len(parse_places(devices)),)


def check(placement: PlacementOptions, standby: StandbyOptions, *, has_draft: bool) -> None:
    """Raise InvalidArgument for workers that run already, and for a draft's device beside CPU workers of any number."""
    if placement.draft_device is not None and placement.target_devices is None:
        raise InvalidArgument(
            f"--draft-device {placement.draft_device} has no effect without --target-devices: the draft is beside the "
            "last stage and in a worker of its own by turns; name the devices of the stages, or leave it out",
            field="--draft-device",
        )
    if placement.draft_device is not None and not has_draft:
        raise InvalidArgument(
            f"--draft-device {placement.draft_device} has no effect without a draft: give --draft or, with --shape, "
            "--synthetic-acceptance, or leave it out",
            field="--draft-device",
        )
    named = {
        "--target-devices": parse_places(placement.target_devices) if placement.target_devices is not None else (),
        "--draft-device": ()
        if placement.draft_device is None
        else (parse_place(placement.draft_device, "--draft-device"),),
        "--standby": standby.places,
    }
    for flag, places in named.items():
        for place in places:
            if place.devices is None:
                raise InvalidArgument(
                    f"{flag} {place} runs already, and bench faults ends workers: name a device, like cpu or "
                    "cuda:0@40GiB",
                    field=flag,
                )


def check_lengths(asked: AskedOptions, most: int) -> None:
    """Raise InvalidArgument for requests that are longer than a model's context of so many tokens."""
    longest = asked.prompt_tokens + asked.max_tokens
    if longest > most:
        raise InvalidArgument(
            f"--prompt-tokens {asked.prompt_tokens} and --max-tokens {asked.max_tokens} make {longest} tokens, the "
            f"model's context holds {most}: lower one of them",
            field="--prompt-tokens",
        )


@contextlib.asynccontextmanager
async def started(
    files: ModelFiles,
    draft: Path | None,
    cluster: ClusterOptions,
    standby: StandbyOptions,
    shape: Shape,
    folder: str,
) -> AsyncIterator[tuple[StartedModel, Elsewhere | None]]:
    """Start a cluster of this shape, that keeps prefixes in a directory of its own within the folder; with its workers,
    where they are no children of it."""
    store = StoreOptions(kv_cache_dir=str(Path(folder, f"{shape.stages}-{shape.draft_apart}-{shape.site}")))
    prefix = PrefixOptions(store=store, kv_cache_min_tokens=64)
    async with contextlib.AsyncExitStack() as stack:
        devices = [*places_of(cluster.placement, shape), *standby.places]
        places, elsewhere = [str(place) for place in devices], None
        if shape.site is not Site.CHILDREN:
            launch = cluster.launch(prefix.worker_bytes)
            elsewhere = await stack.enter_async_context(Elsewhere(shape, devices, launch))
            places = elsewhere.addresses
            # The workers have these by now.
            own = replace(
                cluster.workers, threads=None, gpu_memory_utilization=None, cuda_graphs=None, worker_command=()
            )
            cluster = replace(cluster, workers=own)
            standby = replace(standby, standby=",".join(places[len(places) - shape.standbys :]) or None)
        placement = replace(
            cluster.placement,
            target_devices=",".join(places[: shape.stages]),
            draft_device=places[shape.stages] if shape.draft_apart else None,
        )
        options = replace(cluster, placement=placement)
        running = await stack.enter_async_context(start_model(files, draft, options, prefix, standby=standby))
        yield running, elsewhere


def places_of(placement: PlacementOptions, shape: Shape) -> list[WorkerPlace]:
    """Return the devices of the workers of a cluster that have a part: those that are named, or CPUs."""
    if placement.target_devices is None:
        return [parse_place("cpu", "--target-devices")] * len(shape.placed)
    draft = placement.draft_device
    return [*parse_places(placement.target_devices), *([] if draft is None else [parse_place(draft, "--draft-device")])]


async def left_behind(watched: Watched, before: Traces) -> list[str]:
    """Return what a closed cluster has left behind, once what takes a moment is gone."""
    deadline = time.monotonic() + GONE_S
    while (left := watched.traces().since(before)) and time.monotonic() < deadline:
        # Calls to a host that was cut off can be part of a cycle, and keep their socket until Python looks for these.
        gc.collect()
        await asyncio.sleep(_LOOK_S)
    return left


def show(
    output: OutputOptions,
    outcomes: Sequence[Outcome],
    undisturbed: Sequence[Undisturbed],
    left: Sequence[str],
    measured: Sequence[WorkerDescription],
    no_cuts: str | None,
    *,
    is_compared: bool,
) -> None:
    """Print the figures so far, with what went wrong where, and what was left behind. no_cuts: why no link could be
    cut; None where none was to be, or it could. is_compared: as of `Asked`."""
    rows, overcome, handed = summarise(outcomes), recoveries(outcomes), hand_overs(outcomes)
    wrong = [line for outcome in outcomes for line in faulty(outcome)]
    missed = [where(outcome) for outcome in outcomes if not outcome.befell]
    notes = [
        *([] if is_compared else ["answers are not compared: draft tokens are accepted by chance"]),
        *wrong,
        *map(while_undisturbed, undisturbed),
        *([f"these found no such worker or phase: {'; '.join(missed)}"] if missed else []),
        "left behind: " + (", ".join(left) or "nothing"),
        *([f"no link was cut: {no_cuts}"] if no_cuts is not None else []),
    ]
    output.show(
        rows,
        table(rows),
        measured,
        note="\n".join(notes),
        left=left,
        wrong=wrong,
        missed=missed,
        no_cuts=no_cuts,
        undisturbed=[asdict(one) for one in undisturbed],
        recoveries=[asdict(row) for row in overcome],
        hand_overs=[asdict(row) for row in handed],
    )
    if not output.as_json:
        for found in [
            *([recovery_table(overcome)] if overcome else []),
            *([hand_over_table(handed)] if handed else []),
        ]:
            print()
            print_table(found)


def while_undisturbed(one: Undisturbed) -> str:
    """Return what became of answers while nothing befell anybody, in words."""
    apart = ", draft apart" if one.draft_apart else ""
    return (
        f"undisturbed, {one.stages} stages{apart}: {one.seconds / 60:.1f} minutes, {one.clients} clients, "
        f"{one.answers} answers, {one.tokens} tokens; {one.lost} lost, {one.different} with other tokens; workers were "
        f"asked {one.doubts} times whether they live, and taken for lost {one.alarms} times"
    )


def where(outcome: Outcome) -> str:
    """Return what was to befall whom, in words."""
    case = outcome.case
    apart = ", draft apart" if case.shape.draft_apart else ""
    return f"case {case.number}: {case.fault} {case.worker} of {case.shape.stages} stages{apart}, {case.phase}"


def faulty(outcome: Outcome) -> Iterator[str]:
    """Yield for each answer that was lost or came out otherwise what happened, as a line."""
    for number, (told, alone) in enumerate(zip(outcome.told, outcome.undisturbed, strict=True)):
        answer, text = f"{where(outcome)}, answer {number} of {outcome.case.requests}", "".join(told.texts)
        if told.answer is None:
            yield f"{answer}: {told.error}"
        elif alone is None:
            continue
        elif told.answer.token_ids != alone.token_ids:
            same = common_prefix_length(told.answer.token_ids, alone.token_ids)
            yield f"{answer}: other tokens from {same} on, {told.answer.stats.notes}"
        elif text != (alone.text or ""):
            yield f"{answer}: the text {text!r} should be {alone.text!r}"
