"""Clients that ask one engine, in a closed loop or as they happen to come, and when each of their tokens came."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.answer import Request
from coordinator.engine.engine import Engine
from services.messages.sampling import SamplingParams

LONG_PROMPT_TOKENS = 4096
LONG_ANSWER_TOKENS = 2

GoesOn = Callable[[int], bool]
"""Whether one more request is to come, by the number of those before it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from the first to the last one, all of them equally probable."""

    first: int
    last: int

    def __str__(self) -> str:
        """As a user writes it."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def draw(self, draw: random.Random) -> int:
        """Return one of them."""
        return draw.randint(self.first, self.last)


@dataclass(frozen=True, slots=True)
class AskedLengths:
    """How long prompts and answers are."""

    prompt_tokens: Lengths
    max_tokens: Lengths


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer. Times are those of `time.monotonic`.

    pieces: when its tokens came, and how many at a time. steps: the decode steps that they took. set_aside: how often
    it was set aside, because the workers had no memory for it.
    """

    asked_at: float
    pieces: tuple[tuple[float, int], ...]
    steps: int
    set_aside: int

    @property
    def first_token_s(self) -> float:
        """From the request to the first token."""
        return self.pieces[0][0] - self.asked_at

    @property
    def decoded(self) -> int:
        """How many tokens came behind the first one."""
        return sum(count for _, count in self.pieces) - 1

    @property
    def token_s(self) -> float:
        """The mean time of each of these."""
        return (self.pieces[-1][0] - self.pieces[0][0]) / max(1, self.decoded)

    def gaps_s(self, first: float, last: float) -> list[float]:
        """Return the times between one piece and the next, of those next ones that came between two times."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.pieces) if first <= after <= last]


@dataclass(frozen=True, slots=True)
class Load:
    """What came of clients that asked.

    answers: those that are measured. elapsed_s: from the first request to the last token. gaps_s: the times between one
    piece of an answer and the next; where long prompts came, while they did.
    """

    answers: Sequence[TimedAnswer]
    elapsed_s: float
    gaps_s: Sequence[float]

    @property
    def tokens_per_s(self) -> float:
        """Of all answers together."""
        return sum(answer.decoded + 1 for answer in self.answers) / self.elapsed_s

    @property
    def token_s(self) -> float:
        """The median over the answers."""
        return statistics.median(answer.token_s for answer in self.answers)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a decode step of one answer produced."""
        return sum(answer.decoded for answer in self.answers) / max(1, sum(answer.steps for answer in self.answers))

    def first_token_s(self, share: float) -> float:
        """Return the time to the first token that this share of the answers is below."""
        return percentile([answer.first_token_s for answer in self.answers], share)


class Clients:
    """Asks an engine for answers to random prompts; those of one seed have the same lengths in the same order."""

    def __init__(
        self,
        engine: Engine,
        lengths: AskedLengths,
        *,
        sampling: SamplingParams,
        seed: int,
        prefill_chunk: int | None,
        speculate: bool,
    ) -> None:
        """sampling: of every request, each of which has a seed of its own. prefill_chunk: prompt tokens of a step, None
        for as many as the server would take. speculate: whether a draft proposes, where there is one.
        """
        self._engine, self._lengths, self._draw = engine, lengths, random.Random(seed)
        self._sampling, self._prefill_chunk, self._speculate = sampling, prefill_chunk, speculate

    @property
    def long_prompt_tokens(self) -> int:
        """The tokens of a long prompt, which are fewer where the model's context is shorter."""
        return min(LONG_PROMPT_TOKENS, self._engine.max_model_len - LONG_ANSWER_TOKENS)

    async def closed(self, clients: int, requests: int, long_prompts: int = 0) -> Load:
        """Have so many clients ask at once, each of which asks again when it has its answer, so many times.

        long_prompts: so many come meanwhile, one behind the other; clients go on until the last one is answered.
        """

        async def ask(goes_on: GoesOn, answer: Callable[[], Awaitable[None]]) -> None:
            async def client() -> None:
                for number in itertools.count():
                    if not goes_on(number):
                        return
                    await answer()

            await asyncio.gather(*(client() for _ in range(clients)))

        return await self._measure(ask, requests, long_prompts)

    async def arriving(self, rate: float, requests: int, long_prompts: int = 0) -> Load:
        """Have requests come by themselves: so many a second on average, at times that do not depend on each other.

        long_prompts: as in `closed`.
        """

        async def ask(goes_on: GoesOn, answer: Callable[[], Awaitable[None]]) -> None:
            due = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number in itertools.count():
                    if not goes_on(number):
                        return
                    group.create_task(_run(answer))
                    due += self._draw.expovariate(rate)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))

        return await self._measure(ask, requests, long_prompts)

    async def _measure(
        self,
        ask: Callable[[GoesOn, Callable[[], Awaitable[None]]], Awaitable[None]],
        requests: int,
        long_prompts: int,
    ) -> Load:
        answers: list[TimedAnswer] = []
        answered = asyncio.Event()

        async def answer() -> None:
            prompt_tokens, max_tokens = (
                self._lengths.prompt_tokens.draw(self._draw),
                self._lengths.max_tokens.draw(self._draw),
            )
            answers.append(await self.answer(prompt_tokens, max_tokens))
            answered.set()

        async def answer_long() -> tuple[float, float]:
            # Not before all are at work.
            await answered.wait()
            began = time.monotonic()
            for _ in range(long_prompts):
                await self.answer(self.long_prompt_tokens, LONG_ANSWER_TOKENS)
            return began, time.monotonic()

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            long = group.create_task(answer_long())
            await ask(lambda number: number < requests or (long_prompts > 0 and not long.done()), answer)
        measured = long.result() if long_prompts else (started, time.monotonic())
        elapsed_s = max(one.pieces[-1][0] for one in answers) - started
        return Load(answers, elapsed_s, [gap for one in answers for gap in one.gaps_s(*measured)])

    async def answer(self, prompt_tokens: int, max_tokens: int) -> TimedAnswer:
        """Answer a random prompt of so many tokens with so many."""
        vocabulary = self._engine.cluster.target.vocab_size
        sampling = self._sampling
        if sampling.temperature:
            sampling = replace(sampling, seed=self._draw.getrandbits(32))
        request = Request(
            request_id=secrets.token_hex(8),
            prompt_ids=tuple(self._draw.choices(range(vocabulary), k=prompt_tokens)),
            max_tokens=max_tokens,
            sampling=sampling,
            speculate=self._speculate,
            prefill_chunk=self._prefill_chunk,
        )
        asked_at, pieces = time.monotonic(), []
        async with self._engine.answering(request) as generation:
            async for piece in generation.pieces():
                if piece.token_ids:
                    pieces.append((time.monotonic(), len(piece.token_ids)))
        assert generation.answer is not None
        stats = generation.answer.stats
        return TimedAnswer(asked_at, tuple(pieces), stats.steps, stats.resumed)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values lies below; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def _run(answer: Callable[[], Awaitable[None]]) -> None:
    await answer()
