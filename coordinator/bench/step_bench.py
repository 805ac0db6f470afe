"""How long steps of each kind take on a cluster, and how long they must.

It owns the sessions that it opens, one for each measurement. Tokens are random: times do not depend on them.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import click

from coordinator.bench.floor import Floor
from coordinator.bench.session_driver import CHUNK, SessionDriver
from coordinator.cli.option_groups import Flag
from coordinator.cluster.cluster import Cluster
from coordinator.engine.chain_attempt import MORE_STEPS
from coordinator.engine.prefill_chunk import chunk_for
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind

KINDS = ("decode", "verify", "draft", "cycle", "prefill")
DRAFTING = frozenset(("draft", "cycle"))
"""Kinds that need a draft."""

WARM_UP_STEPS = 8
PREFILLS = 3


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one kind of step: medians, in milliseconds.

    rows: of a step; context: tokens before it; ms: as the coordinator sees it; computing_ms: the stages' own share;
    floor_ms: in which its weights and caches can be read, or its products be computed.
    """

    kind: str
    rows: int
    context: int
    ms: float
    computing_ms: float
    floor_ms: float

    @property
    def share(self) -> float:
        """The floor's share of the time: 1 where the step takes no longer than it must."""
        return self.floor_ms / self.ms if self.ms else 0.0


def times_decode(rows: Sequence[StepFigures]) -> dict[str, float]:
    """Return, by kind of step, how many decode steps take as long; empty without a decode to compare with."""
    decode = next((row.ms for row in rows if row.kind == "decode"), 0.0)
    return {row.kind: row.ms / decode for row in rows if decode and row.kind not in ("decode", "prefill")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How large the steps are and how many of each kind are measured."""

    rows: Annotated[
        int,
        Flag("Rows of a verify; at most the draft's block where a draft proposes.", type=click.IntRange(2, 64)),
    ] = 16
    context: Annotated[int, Flag("Tokens before the steps.", type=click.IntRange(1))] = 1024
    prefill_tokens: Annotated[int, Flag("Tokens of a prefill.", type=click.IntRange(1))] = 4096
    prefill_chunk: Annotated[
        int | None,
        Flag(
            "Tokens of a prefill at once.  [default: as many as the server would take]", type=click.IntRange(1, CHUNK)
        ),
    ] = None
    steps: Annotated[int, Flag("Steps of each kind.", type=click.IntRange(1))] = 64


class StepBench:
    """Measures steps on one cluster, in a session for each kind."""

    def __init__(self, cluster: Cluster, sizes: StepSizes) -> None:
        self._cluster, self._sizes = cluster, sizes
        self._draw = random.Random(1)

    def check(self, kinds: Sequence[str]) -> None:
        """Raise InvalidArgument for a kind whose steps go beyond the model's context."""
        most = self._cluster.target.max_position
        for kind in kinds:
            length = self._length(kind)
            if length > most and kind == "prefill":
                raise InvalidArgument(
                    f"--prefill-tokens {length}: the model's context holds {most}; ask for fewer",
                    field="--prefill-tokens",
                )
            if length > most:
                raise InvalidArgument(
                    f"--context {self._sizes.context} and --steps {self._sizes.steps} of {kind} may make {length} "
                    f"tokens, the model's context holds {most}: lower one of them",
                    field="--context",
                )

    def ticks(self, kind: str) -> int:
        """Return how often `measure` calls `done`."""
        return PREFILLS if kind == "prefill" else WARM_UP_STEPS + self._sizes.steps

    async def measure(self, kind: str, floor: Floor, done: Callable[[], None]) -> StepFigures:
        """Return the figures of a kind of step. done: called after each step, or prefill."""
        if kind == "prefill":
            count = self._sizes.prefill_tokens
            return StepFigures(kind, count, 0, await self._prefill_ms(done), 0.0, floor.prefill_ms(count))
        rows, context = self._rows(kind), self._sizes.context
        async with self._session(kind) as driver:
            await driver.prefill(self._tokens(context - 1))
            await driver.step(StepKind.DECODE, self._tokens(1))
            times, computing, drafting = await self._run(driver, rows, rows - 1 if kind in DRAFTING else 0, done)
        if kind == "draft":
            times, computing = drafting, [0.0]
        ms, computing_ms = statistics.median(times), statistics.median(computing)
        return StepFigures(kind, rows, context, ms, computing_ms, floor.ms(kind, context))

    async def _run(
        self, driver: SessionDriver, rows: int, propose: int, done: Callable[[], None]
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the milliseconds of steps of so many rows: there and back, of the stages alone, and of the draft.

        As in an answer, steps follow each other by themselves, where nothing else than what they produce is needed.
        """
        times, computing, drafting = [], [], []
        draft_tokens: tuple[int, ...] = ()
        following = 0
        for number in range(WARM_UP_STEPS + self._sizes.steps):
            started = time.monotonic()
            if not following:
                tokens = (*self._tokens(1), *(draft_tokens or self._tokens(rows - 1)))[:rows]
                kind = StepKind.VERIFY if rows > 1 else StepKind.DECODE
                await driver.send(kind, tokens, propose, MORE_STEPS if propose or rows == 1 else 0)
            commit = await driver.commit()
            following, drafted_ms = commit.more, 0.0
            if propose:
                proposal = await driver.proposal()
                draft_tokens, drafted_ms = proposal.token_ids, proposal.elapsed_ns / 1e6
            if number >= WARM_UP_STEPS:
                times.append((time.monotonic() - started) * 1e3)
                computing.append(sum(timing.forward_ns for timing in commit.timings) / 1e6)
                drafting.append(drafted_ms)
            done()
        return times, computing, drafting

    async def _prefill_ms(self, done: Callable[[], None]) -> float:
        """Return the milliseconds of a prefill, without the first one, which warms up."""
        times = []
        for _ in range(PREFILLS):
            async with self._session("prefill") as driver:
                tokens = self._tokens(self._sizes.prefill_tokens)
                started = time.monotonic()
                await driver.prefill(tokens[:-1], self._sizes.prefill_chunk or chunk_for(self._cluster.workers))
                await driver.step(StepKind.DECODE, tokens[-1:])
                times.append((time.monotonic() - started) * 1e3)
            done()
        # The first one warms up.
        return min(times[1:])

    @contextlib.asynccontextmanager
    async def _session(self, kind: str) -> AsyncIterator[SessionDriver]:
        """Give a session with room for all steps of a kind."""
        session = await self._cluster.open(
            request_id="bench",
            max_length=self._length(kind),
            max_rows=CHUNK,
            block_rows=self._rows(kind),
            prompt_length=self._sizes.prefill_tokens if kind == "prefill" else self._sizes.context,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
            speculate=kind in DRAFTING,
        )
        try:
            yield SessionDriver(session)
        finally:
            await session.close()

    def _rows(self, kind: str) -> int:
        """Return the rows of a step; a draft's block may be smaller than asked for."""
        if kind in ("decode", "prefill"):
            return 1
        draft = self._cluster.draft
        return self._sizes.rows if draft is None or kind == "verify" else min(self._sizes.rows, draft.block_size)

    def _length(self, kind: str) -> int:
        """Return the tokens that a session must have room for: each step may keep all of its rows."""
        if kind == "prefill":
            return self._sizes.prefill_tokens
        return self._sizes.context + (WARM_UP_STEPS + self._sizes.steps + MORE_STEPS + 1) * self._rows(kind)

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Return so many random tokens."""
        vocabulary = self._cluster.target.vocab_size
        return tuple(self._draw.randrange(vocabulary) for _ in range(count))
