"""`flashsplit bench serve`: many clients at once, and a short prompt behind a long one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import click
from rich.table import Table

from coordinator.answer import Request
from coordinator.bench.checkpoints import CheckpointOptions
from coordinator.bench.counts import counts_option
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import Flag, with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.engine.engine import Engine
from coordinator.engine.prefill_chunk import chunk_for
from coordinator.text.model_files import read_model_files


@dataclass(frozen=True, slots=True)
class ClientsFigures:
    """Figures of so many clients at once, each of which asks again when it has its answer.

    requests: of all clients together; gain: tokens_per_s over that of the first row.
    """

    clients: int
    requests: int
    tokens_per_s: float
    gain: float
    first_token_p50_ms: float
    first_token_p95_ms: float
    token_p50_ms: float


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
    """What each client asks for, and how often."""

    requests: Annotated[int, Flag("Requests of each client.", type=click.IntRange(1))] = 4
    prompt_tokens: Annotated[int, Flag("Random tokens of each prompt.", type=click.IntRange(1))] = 32
    max_tokens: Annotated[int, Flag("Tokens of each answer.", type=click.IntRange(2))] = 64
    prefill_chunk: Annotated[
        int | None,
        Flag("Prompt tokens a step.  [default: as the server would]", type=click.IntRange(1, 8192), metavar="N"),
    ] = None
    plain: Annotated[bool, Flag("Decode one token a step, even with a draft.")] = False


@click.command(cls=Command)
@with_options
@config_option
@counts_option("--clients", default="1,2,4,8,16", help="Clients at once.")
async def serve(
    checkpoint: CheckpointOptions,
    workers: ClusterOptions,
    load: RequestOptions,
    output: OutputOptions,
    clients: tuple[int, ...],
) -> None:
    """Measure the tokens a second of all clients together, by their number.

    One client leaves each stage idle while the others work; several keep them busy at the same time. Below: how long a
    short prompt waits for its first token while a prompt of eight chunks is being computed.
    """
    async with contextlib.AsyncExitStack() as stack:
        target, draft = stack.enter_context(checkpoint.directories())
        files = read_model_files(target)
        with LoadBars() as bars:
            cluster = await stack.enter_async_context(workers.cluster(files, draft, bars, prefix_cache_bytes=0))
        engine = Engine(cluster, files, None, name="bench", max_running=max(clients), max_waiting=0)
        bench = ClientsBench(engine, load)
        rows: list[ClientsFigures] = []
        with progress_bars() as progress:
            await bench.crowd(1, 1)
            for number in progress.track(clients, description="measuring"):
                rows.append(await bench.crowd(number, load.requests, rows[0] if rows else None))
            progress.add_task("a short prompt behind a long one", total=None)
            fairness = await bench.fairness()
    output.show(rows, table(rows), cluster.workers, fairness=asdict(fairness))
    if not output.as_json:
        print(
            f"short prompt: {fairness.alone_ms:.0f} ms alone, {fairness.behind_ms:.0f} ms behind a long one, "
            f"{fairness.chunks:.1f} chunks of {fairness.chunk_ms:.0f} ms"
        )


class ClientsBench:
    """Measures requests of one kind on one engine."""

    def __init__(self, engine: Engine, load: RequestOptions) -> None:
        self._engine, self._prompt_tokens, self._max_tokens = engine, load.prompt_tokens, load.max_tokens
        self._chunk, self._speculate = load.prefill_chunk or chunk_for(engine.cluster.workers), not load.plain

    async def crowd(self, clients: int, requests: int, first_row: ClientsFigures | None = None) -> ClientsFigures:
        """Measure so many clients, each with so many requests in a row. first_row: the one that gains are ratios to."""
        firsts: list[float] = []
        between: list[float] = []

        async def client() -> None:
            """Ask again and again."""
            for _ in range(requests):
                first, total = await self._answer_ms(self._prompt_tokens, self._max_tokens)
                firsts.append(first)
                between.append((total - first) / (self._max_tokens - 1))

        started = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        rate = clients * requests * self._max_tokens / (time.monotonic() - started)
        return ClientsFigures(
            clients=clients,
            requests=clients * requests,
            tokens_per_s=rate,
            gain=rate / first_row.tokens_per_s if first_row is not None else 1.0,
            first_token_p50_ms=statistics.median(firsts),
            first_token_p95_ms=_percentile(firsts, 0.95),
            token_p50_ms=statistics.median(between),
        )

    async def fairness(self, repeats: int = 3) -> FairnessFigures:
        """Measure a short prompt behind a long one; the median of some tries."""
        room = self._engine.max_model_len - 8
        chunks = max(2, min(8, room // self._chunk))
        length = min(chunks * self._chunk, room)
        long_ms = min([(await self._answer_ms(length, 2))[0] for _ in range(repeats)])
        alone = min([(await self._answer_ms(self._prompt_tokens, 2))[0] for _ in range(repeats)])
        behind = []
        for _ in range(repeats):
            busy = asyncio.ensure_future(self._answer_ms(length, 2))
            # In the middle of it.
            await asyncio.sleep(long_ms / 1e3 / 3)
            behind.append((await self._answer_ms(self._prompt_tokens, 2))[0])
            await busy
        return FairnessFigures(long_ms / chunks, alone, statistics.median(behind))

    async def _answer_ms(self, prompt_tokens: int, max_tokens: int) -> tuple[float, float]:
        """Answer a random prompt, and return the milliseconds to the first token and to the last."""
        vocabulary = self._engine.cluster.target.vocab_size
        request = Request(
            request_id=secrets.token_hex(8),
            prompt_ids=tuple(secrets.randbelow(vocabulary) for _ in range(prompt_tokens)),
            max_tokens=max_tokens,
            speculate=self._speculate,
            prefill_chunk=self._chunk,
        )
        started = time.monotonic()
        first = 0.0
        async with self._engine.answering(request) as generation:
            async for _ in generation.pieces():
                first = first or time.monotonic()
        return (first - started) * 1e3, (time.monotonic() - started) * 1e3


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values lies below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(rows: list[ClientsFigures]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "clients", "requests", "tokens/s", "times one", "first token p50 ms", "p95 ms", "token p50 ms"
    )
    for row in rows:
        figures.add_row(
            str(row.clients),
            str(row.requests),
            f"{row.tokens_per_s:.1f}",
            f"{row.gain:.2f}",
            *(f"{value:.0f}" for value in (row.first_token_p50_ms, row.first_token_p95_ms)),
            f"{row.token_p50_ms:.1f}",
        )
    return figures
