"""`flashsplit bench serve`: many clients at once, and a short prompt behind a long one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import click
from rich.table import Table

from coordinator.bench.checkpoints import CheckpointOptions
from coordinator.bench.client_load import LONG_PROMPT_TOKENS, AskedLengths, Clients, Lengths, Load, percentile
from coordinator.bench.counts import counts_option
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.bench.shapes import BLOCK_SIZE
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import Flag, with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.sampling import SamplingFlags
from coordinator.engine.engine import Engine
from coordinator.engine.prefill_chunk import chunk_for
from coordinator.status.recent import busy_share
from coordinator.text.model_files import read_model_files
from services.errors import InvalidArgument
from services.messages.description import WorkerDescription
from services.messages.sampling import SamplingParams

CLIENTS = (1, 2, 4, 8, 16)
"""How many clients there are at once where neither they nor rates are named."""

REQUESTS_OF_A_CLIENT, REQUESTS_OF_A_RATE = 4, 64

MOST_AT_ONCE = 1024
"""Requests that may run at once where they come by themselves."""


class LengthsType(click.ParamType[Lengths]):
    """Lengths on the command line: one number, or two with a dash between."""

    name = "lengths"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        """Return the lengths. Raises BadParameter for another text."""
        if isinstance(value, Lengths):
            return value
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value))
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not self._least <= first <= last:
            self.fail(f"{value!r} must be a number of at least {self._least}, or two with a dash: 64-512", param, ctx)
        return Lengths(first, last)


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """Figures of one load. Times between tokens are those between one piece of an answer and the next, which with a
    draft may be several tokens; a token's time is the median over answers of the mean.

    load: how many clients there were at once, or how many requests came a second. draft: how drafts were accepted.
    long_prompts: how many came meanwhile; the times between tokens are then those of that while. gain: tokens_per_s
    over that of the first row. set_aside: how often answers were, for lack of memory. busy: of each stage, the share of
    the time in which it had work.
    """

    load: str
    draft: str
    long_prompts: int
    requests: int
    tokens_per_s: float
    gain: float
    tokens_per_step: float
    first_token_p50_ms: float
    first_token_p95_ms: float
    first_token_p99_ms: float
    token_p50_ms: float
    between_p50_ms: float
    between_p95_ms: float
    between_p99_ms: float
    set_aside: int
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FairnessFigures:
    """Figures of a short prompt: its first token alone, and behind a long prompt, a chunk of which takes chunk_ms."""

    chunk_ms: float
    alone_ms: float
    behind_ms: float

    @property
    def chunks(self) -> float:
        """How many chunks of the long prompt the short one waits for."""
        return self.behind_ms / self.chunk_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What is asked for, when and how often."""

    rate: Annotated[
        tuple[float, ...],
        Flag(
            "In place of clients that wait for their answers: requests come by themselves, so many a second on average "
            "(Poisson). May be given several times.",
            type=click.FloatRange(0, min_open=True),
            metavar="R",
        ),
    ] = ()
    requests: Annotated[
        int | None,
        Flag(
            f"Requests of each client, or at each rate.  [default: {REQUESTS_OF_A_CLIENT} of a client, "
            f"{REQUESTS_OF_A_RATE} at a rate]",
            type=click.IntRange(1),
            metavar="N",
        ),
    ] = None
    prompt_tokens: Annotated[
        Lengths,
        Flag("Random tokens of each prompt, or from how many to how many.", type=LengthsType(1), metavar="N[-M]"),
    ] = Lengths(32, 32)
    max_tokens: Annotated[
        Lengths, Flag("Tokens of each answer, or from how many to how many.", type=LengthsType(2), metavar="N[-M]")
    ] = Lengths(64, 64)
    sampling: Annotated[
        SamplingParams,
        SamplingFlags("temperature", "top_k", "top_p", absent="Without a temperature it is the most probable one."),
    ]
    seed: Annotated[int, Flag("Of lengths, tokens, the times of requests, and of what is drawn at a temperature.")] = 1
    long_prompts: Annotated[
        int,
        Flag(
            f"Measure each load a second time while so many prompts of {LONG_PROMPT_TOKENS} tokens come, one "
            "behind the other.",
            type=click.IntRange(0),
            metavar="N",
        ),
    ] = 0
    prefill_chunk: Annotated[
        int | None,
        Flag("Prompt tokens a step.  [default: as the server would]", type=click.IntRange(1, 8192), metavar="N"),
    ] = None
    plain: Annotated[bool, Flag("Decode one token a step, even with a draft.")] = False
    synthetic_acceptance: Annotated[
        float | None,
        Flag(
            "With --shape: measure its draft too, of whose draft tokens so many of a whole block are accepted on "
            "average, by chance, as random weights would accept none.",
            type=click.FloatRange(0, BLOCK_SIZE - 1),
            metavar="N",
        ),
    ] = None

    def check(self, clients: tuple[int, ...]) -> None:
        """Raise InvalidArgument for options of which one has no effect beside another."""
        if self.rate and clients:
            raise InvalidArgument("--clients has no effect with --rate: leave one of them out", field="--clients")
        if self.plain and self.synthetic_acceptance is not None:
            raise InvalidArgument(
                "--synthetic-acceptance has no effect with --plain: leave one of them out",
                field="--synthetic-acceptance",
            )


@click.command(cls=Command)
@with_options
@config_option
@counts_option(
    "--clients", default=None, help=f"Clients at once.  [default: {','.join(map(str, CLIENTS))}, without --rate]"
)
async def serve(
    checkpoint: CheckpointOptions,
    workers: ClusterOptions,
    load: RequestOptions,
    output: OutputOptions,
    clients: tuple[int, ...],
) -> None:
    """Measure the tokens a second of all clients together, by their number or by the rate of their requests.

    One client leaves each stage idle while the others work; several keep them busy at the same time. Below: how long a
    short prompt waits for its first token while a prompt of eight chunks is being computed.
    """
    load.check(clients)
    counts = () if load.rate else clients or CLIENTS
    synthetic = load.synthetic_acceptance
    async with contextlib.AsyncExitStack() as stack:
        target, draft = stack.enter_context(checkpoint.directories(accepted=synthetic))
        files = read_model_files(target)
        with LoadBars() as bars:
            cluster = await stack.enter_async_context(workers.cluster(files, draft, bars, prefix_cache_bytes=0))
        # Below, a short prompt comes while a long one is computed.
        most = MOST_AT_ONCE if load.rate else max(2, max(counts) + (load.long_prompts > 0))
        engine = Engine(cluster, files, None, name="bench", max_running=most, max_waiting=0)
        bench = ServeBench(engine, load)
        rows: list[ServeFigures] = []
        with progress_bars() as progress:
            await bench.clients().closed(1, 1)
            for count in progress.track(counts or load.rate, description="measuring"):
                for long_prompts in (0, load.long_prompts)[: 1 + (load.long_prompts > 0)]:
                    rows.append(await bench.measure(count, long_prompts, rows[0] if rows else None))
            progress.add_task("a short prompt behind a long one", total=None)
            fairness = await bench.fairness()
    note = ""
    if synthetic is not None:
        note = f"synthetic: {synthetic:g} draft tokens of a block are accepted on average, by chance"
    output.show(rows, table(rows), cluster.workers, note=note, fairness=asdict(fairness))
    if not output.as_json:
        print(
            f"short prompt: {fairness.alone_ms:.0f} ms alone, {fairness.behind_ms:.0f} ms behind a long one, "
            f"{fairness.chunks:.1f} chunks of {fairness.chunk_ms:.0f} ms"
        )


class ServeBench:
    """Measures requests of one kind on one engine."""

    def __init__(self, engine: Engine, asked: RequestOptions) -> None:
        """Raises InvalidArgument for requests that are longer than the engine serves."""
        self._engine, self._asked = engine, asked
        self._chunk = asked.prefill_chunk or chunk_for(engine.cluster.workers)
        longest = asked.prompt_tokens.last + asked.max_tokens.last
        if longest > engine.max_model_len:
            raise InvalidArgument(
                f"--prompt-tokens {asked.prompt_tokens} and --max-tokens {asked.max_tokens} may make {longest} tokens, "
                f"the model's context holds {engine.max_model_len}: lower one of them",
                field="--prompt-tokens",
            )

    def clients(self) -> Clients:
        """Return clients, all of which ask for the same."""
        asked = self._asked
        return Clients(
            self._engine,
            AskedLengths(asked.prompt_tokens, asked.max_tokens),
            sampling=asked.sampling,
            seed=asked.seed,
            prefill_chunk=asked.prefill_chunk,
            speculate=not asked.plain,
        )

    async def measure(self, load: float, long_prompts: int, first_row: ServeFigures | None) -> ServeFigures:
        """Measure a load: so many clients, or so many requests a second.

        long_prompts: so many come meanwhile. first_row: the one that gains are ratios to.
        """
        asked, clients = self._asked, self.clients()
        before = await self._stages()
        if asked.rate:
            found = await clients.arriving(load, asked.requests or REQUESTS_OF_A_RATE, long_prompts)
        else:
            found = await clients.closed(int(load), asked.requests or REQUESTS_OF_A_CLIENT, long_prompts)
        busy = tuple(busy_share(*both) for both in zip(before, await self._stages(), strict=True))
        first_row_rate = found.tokens_per_s if first_row is None else first_row.tokens_per_s
        return ServeFigures(
            load=f"{load:g} requests/s" if asked.rate else f"{load} clients",
            draft=self._draft,
            long_prompts=long_prompts,
            requests=len(found.answers),
            tokens_per_s=found.tokens_per_s,
            gain=found.tokens_per_s / first_row_rate,
            tokens_per_step=found.tokens_per_step,
            **_milliseconds(found),
            set_aside=sum(answer.set_aside for answer in found.answers),
            busy=busy,
        )

    async def _stages(self) -> list[WorkerDescription]:
        """Return what the workers of the stages say of themselves."""
        cluster = self._engine.cluster
        return [await (await cluster.worker(address)).describe() for address in cluster.addresses]

    @property
    def _draft(self) -> str:
        if self._asked.plain or self._engine.cluster.draft is None:
            return "plain"
        return "DFlash" if self._asked.synthetic_acceptance is None else "synthetic"

    async def fairness(self, repeats: int = 3) -> FairnessFigures:
        """Measure a short prompt behind a long one; the median of some tries."""
        clients, short = self.clients(), self._asked.prompt_tokens.first
        room = self._engine.max_model_len - 8
        chunks = max(2, min(8, room // self._chunk))
        length = min(chunks * self._chunk, room)

        async def first_token_ms(prompt_tokens: int) -> float:
            return (await clients.answer(prompt_tokens, 2)).first_token_s * 1e3

        long_ms = min([await first_token_ms(length) for _ in range(repeats)])
        alone = min([await first_token_ms(short) for _ in range(repeats)])
        behind = []
        for _ in range(repeats):
            busy = asyncio.ensure_future(clients.answer(length, 2))
            # In the middle of it.
            await asyncio.sleep(long_ms / 1e3 / 3)
            behind.append(await first_token_ms(short))
            await busy
        return FairnessFigures(long_ms / chunks, alone, statistics.median(behind))


def _milliseconds(load: Load) -> dict[str, float]:
    """Return a load's times by their names in `ServeFigures`."""
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    first = {f"first_token_{name}_ms": load.first_token_s(share) * 1e3 for name, share in shares.items()}
    between = {f"between_{name}_ms": percentile(load.gaps_s, share) * 1e3 for name, share in shares.items()}
    return {**first, "token_p50_ms": load.token_s * 1e3, **between}


def table(rows: list[ServeFigures]) -> Table:
    """Return the figures for people."""
    headings = ("load", "long prompts", "requests", "tokens/s", "times first", "tokens a step", "first token p50 ms")
    figures = empty_table(
        *headings, "p95", "p99", "a token p50 ms", "between tokens p50 ms", "p95", "p99", "set aside", "busy", "draft"
    )
    for row in rows:
        figures.add_row(
            row.load,
            str(row.long_prompts),
            str(row.requests),
            f"{row.tokens_per_s:.1f}",
            f"{row.gain:.2f}",
            f"{row.tokens_per_step:.2f}",
            *(f"{value:.0f}" for value in (row.first_token_p50_ms, row.first_token_p95_ms, row.first_token_p99_ms)),
            f"{row.token_p50_ms:.1f}",
            *(f"{value:.1f}" for value in (row.between_p50_ms, row.between_p95_ms, row.between_p99_ms)),
            str(row.set_aside),
            ", ".join(f"{share:.0%}" for share in row.busy),
            row.draft,
        )
    return figures
