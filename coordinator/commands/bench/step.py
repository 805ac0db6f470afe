"""`flashsplit bench step`: how near steps come to the time in which their weights can be read."""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import Progress
from rich.table import Table

from coordinator.cluster import Cluster
from coordinator.commands.bench.floor import Floor
from coordinator.commands.bench.report import output_options, show
from coordinator.commands.bench.shapes import TARGETS, write_shape
from coordinator.console import LoadBars, console
from coordinator.generation import CHUNKS_IN_FLIGHT, MORE_STEPS
from coordinator.model_files import read_model_files
from coordinator.options import PlacementOptions, model_options, placement_options
from coordinator.running import run
from services.errors import InternalError, InvalidArgument
from services.stage import StageSession
from services.steps import Commit, Event, Failure, Forward, Proposal, Sampling, StepKind

KINDS = ("decode", "verify", "draft", "cycle", "prefill")
WARM_UP_STEPS = 8
CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """Medians, in milliseconds. ms: as the coordinator sees it; computing_ms: the stages' own share of it; floor_ms: in
    which its weights and caches can be read, or its products be computed."""

    kind: str
    rows: int
    context: int
    ms: float
    computing_ms: float
    floor_ms: float

    @property
    def share(self) -> float:
        """Of the floor that is reached."""
        return self.floor_ms / self.ms if self.ms else 0.0


@click.command()
@click.argument("kinds", nargs=-1, type=click.Choice(KINDS))
@click.option(
    "--shape", type=click.Choice(list(TARGETS)), help="A published shape with random weights, and its draft's."
)
@model_options(required=False)
@placement_options
@click.option("--rows", type=click.IntRange(2, 64), default=16, show_default=True, help="Rows of a verify.")
@click.option("--context", type=click.IntRange(1), default=1024, show_default=True, help="Tokens before the steps.")
@click.option("--prefill-tokens", type=click.IntRange(1), default=4096, show_default=True, help="Of a prefill.")
@click.option(
    "--prefill-chunk", type=click.IntRange(1, CHUNK), default=1024, show_default=True, help="Of a prefill, at once."
)
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Steps of each kind.")
@output_options
def step(
    kinds: tuple[str, ...],
    shape: str | None,
    model: Path | None,
    draft: Path | None,
    rows: int,
    context: int,
    prefill_tokens: int,
    prefill_chunk: int,
    steps: int,
    as_json: bool,
    plot: Path | None,
    **placement: str | int | None,
) -> None:
    """Steps of each kind, one after the other, beside their floors.

    decode: one row. verify: --rows rows. cycle: a verify and the draft's next block. draft: the latter alone, from the
    verify's outcome on. prefill: --prefill-tokens rows in chunks
    of --prefill-chunk, so that stages work on different ones at once. Tokens are random; times do not depend on them.
    """

    async def main() -> None:
        wanted = kinds or KINDS
        with _checkpoints(shape, model, draft, wanted) as (target, drafted):
            options = PlacementOptions(**placement)  # type: ignore[arg-type]
            async with contextlib.AsyncExitStack() as stack:
                with LoadBars() as bars:
                    cluster = options.cluster(read_model_files(target), drafted, bars, prefix_cache_bytes=0)
                    await stack.enter_async_context(cluster)
                bench = Bench(
                    cluster, await Floor.of(cluster, target), rows, context, (prefill_tokens, prefill_chunk), steps
                )
                found: list[Row] = []
                with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
                    for kind in progress.track(wanted, description="measuring"):
                        found.append(await bench.measure(kind))
                engines = [str(worker.target.step_engine) for worker in cluster.workers if worker.target is not None]
                bandwidth = [speed.copy_bytes_per_s for speed in bench.floor.speeds]
        if not as_json:
            rates = ", ".join(f"{rate / 1e12:.2f}" for rate in bandwidth)
            print(f"{target.name if model else shape} by {', '.join(engines)}; copies at {rates} TB/s")
        show(found, table(found), as_json=as_json, plot=plot, engines=engines, copy_bytes_per_s=bandwidth)

    run(main())


@contextlib.contextmanager
def _checkpoints(
    shape: str | None, model: Path | None, draft: Path | None, kinds: Sequence[str]
) -> Iterator[tuple[Path, Path | None]]:
    """Directories of the target and, where a kind needs it, of the draft."""
    drafting = not {"draft", "cycle"}.isdisjoint(kinds)
    if (shape is None) == (model is None):
        raise InvalidArgument("give --shape or --model, one of them", field="--shape")
    if model is not None:
        if drafting and draft is None:
            raise InvalidArgument(
                "--draft is missing: draft and cycle need one; name the kinds to measure, or the checkpoint",
                field="--draft",
            )
        yield model, draft
        return
    if draft is not None:
        raise InvalidArgument("--draft has no effect with --shape, which has its own: leave it out", field="--draft")
    assert shape is not None
    with tempfile.TemporaryDirectory(prefix="flashsplit-bench-") as directory:
        target, drafted = write_shape(shape, Path(directory))
        yield target, drafted if drafting else None


class Bench:
    """One cluster; `measure` opens a session for each kind."""

    def __init__(
        self, cluster: Cluster, floor: Floor, rows: int, context: int, prefill: tuple[int, int], steps: int
    ) -> None:
        """prefill: tokens of one, and of its chunks."""
        self._cluster, self.floor, self._rows, self._context = cluster, floor, rows, context
        (self._prefill_tokens, self._prefill_chunk), self._steps = prefill, steps
        self._draw = random.Random(1)

    async def measure(self, kind: str) -> Row:
        if kind == "prefill":
            return await self._prefill()
        speculate = kind in ("draft", "cycle")
        if speculate and self._cluster.draft is not None:
            self._rows = min(self._rows, self._cluster.draft.block_size)
        rows = 1 if kind == "decode" else self._rows
        propose = rows - 1 if speculate else 0
        async with self._session(speculate=speculate) as client:
            await client.prefill(self._tokens(self._context - 1))
            await client.step(StepKind.DECODE, self._tokens(1))
            times, computing, drafting = await self._run(client, rows, propose)
        if kind == "draft":
            times, computing = drafting, [0.0]
        ms, computing_ms = statistics.median(times), statistics.median(computing)
        return Row(kind, rows, self._context, ms, computing_ms, self.floor.ms(kind, self._context))

    async def _run(self, client: Client, rows: int, propose: int) -> tuple[list[float], list[float], list[float]]:
        """Milliseconds of steps of so many rows, there and back; of the stages alone; and of the draft.

        As in an answer, steps follow each other by themselves, where nothing else than what they produce is needed.
        """
        times, computing, drafting = [], [], []
        guesses: tuple[int, ...] = ()
        following = 0
        for number in range(WARM_UP_STEPS + self._steps):
            started = time.monotonic()
            if not following:
                tokens = (*self._tokens(1), *(guesses or self._tokens(rows - 1)))[:rows]
                kind = StepKind.VERIFY if rows > 1 else StepKind.DECODE
                await client.send(kind, tokens, propose, MORE_STEPS if propose or rows == 1 else 0)
            commit = await client.commit()
            following, drafted_ms = commit.more, 0.0
            if propose:
                proposal = await client.proposal()
                guesses, drafted_ms = proposal.token_ids, proposal.elapsed_ns / 1e6
            if number >= WARM_UP_STEPS:
                times.append((time.monotonic() - started) * 1e3)
                computing.append(sum(timing.forward_ns for timing in commit.timings) / 1e6)
                drafting.append(drafted_ms)
        return times, computing, drafting

    async def _prefill(self) -> Row:
        times, count = [], self._prefill_tokens
        for _ in range(3):
            async with self._session(speculate=False) as client:
                tokens = self._tokens(count)
                started = time.monotonic()
                await client.prefill(tokens[:-1], self._prefill_chunk)
                await client.step(StepKind.DECODE, tokens[-1:])
                times.append((time.monotonic() - started) * 1e3)
        # The first one warms up.
        return Row("prefill", count, 0, min(times[1:]), 0.0, self.floor.prefill_ms(count))

    @contextlib.asynccontextmanager
    async def _session(self, *, speculate: bool) -> AsyncIterator[Client]:
        longest = max(self._prefill_tokens, self._context + 2 * (self._steps + WARM_UP_STEPS) * 2) + 2 * self._rows
        session = await self._cluster.open(
            request_id="bench",
            max_length=min(longest, self._cluster.target.max_position),
            max_rows=CHUNK,
            block_rows=self._rows,
            prompt_length=self._context,
            sampling=Sampling(),
            stop_token_ids=frozenset(),
            speculate=speculate,
        )
        try:
            yield Client(session)
        finally:
            await session.close()

    def _tokens(self, count: int) -> tuple[int, ...]:
        vocabulary = self._cluster.target.vocab_size
        return tuple(self._draw.randrange(vocabulary) for _ in range(count))


class Client:
    """Drives one session, step by step."""

    def __init__(self, session: StageSession) -> None:
        self._session, self._events = session, session.events()
        self._step = self._length = 0

    async def prefill(self, tokens: tuple[int, ...], chunk: int = CHUNK) -> None:
        """In chunks, some of them on their way at once, as those of an answer."""
        base, unanswered = self._length, 0
        for first in range(0, len(tokens), chunk):
            piece = tokens[first : first + chunk]
            await self._session.forward(Forward(self._step + unanswered, base + first, piece, StepKind.PREFILL))
            unanswered += 1
            if unanswered > CHUNKS_IN_FLIGHT:
                await self.commit()
                unanswered -= 1
        for _ in range(unanswered):
            await self.commit()

    async def step(self, kind: StepKind, tokens: tuple[int, ...]) -> Commit:
        await self.send(kind, tokens)
        return await self.commit()

    async def send(self, kind: StepKind, tokens: tuple[int, ...], propose: int = 0, more: int = 0) -> None:
        await self._session.forward(Forward(self._step, self._length, tokens, kind, propose, more=more))

    async def commit(self) -> Commit:
        """Of the step sent, or of one that follows by itself."""
        commit = await self._next()
        if not isinstance(commit, Commit):
            raise InternalError(f"a step was answered by {type(commit).__name__}")
        self._step, self._length = commit.step + 1, commit.length
        return commit

    async def proposal(self) -> Proposal:
        proposal = await self._next()
        if not isinstance(proposal, Proposal):
            raise InternalError(f"{type(proposal).__name__} came where guesses were due")
        return proposal

    async def _next(self) -> Event:
        event = await anext(self._events)
        if isinstance(event, Failure):
            raise InternalError(event.message)
        return event


def table(rows: list[Row]) -> Table:
    made = Table(box=None, pad_edge=False)
    for heading in ("step", "rows", "context", "ms", "in the stages ms", "floor ms", "of the floor"):
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(
            row.kind,
            str(row.rows),
            str(row.context),
            f"{row.ms:.3f}",
            f"{row.computing_ms:.3f}" if row.computing_ms else "",
            f"{row.floor_ms:.3f}",
            f"{row.share:.0%}",
        )
    return made
