"""Answers of many requests that run together are those of each alone: what a step was computed with never shows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.engine import Engine
from coordinator.prefix.cache import PrefixCache
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import chat_prompt
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, GrammarKind, TokenLogprobs
from services.processes.launch import Launch
from tests.e2e.conftest import when_idle
from tests.e2e.server import DEMO

CALCULATOR, STORY = "You are a calculator. " * 5, "The keeper of the lighthouse counts the ships. " * 4
SYSTEMS = ["", CALCULATOR, STORY]
"""What stands in front of questions: nothing, or what is long enough to be kept."""

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.2, top_p=0.9, seed=4),
    SamplingParams(temperature=0.9, top_k=20, seed=5, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.0, min_p=0.05, seed=2**40, logit_bias={100: 2.0}),
]
NUMBERED = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
GRAMMARS = [
    *[None] * 3,
    Grammar(GrammarKind.REGEX, "[a-z]{3,9}( [a-z]{3,9}){2,5}"),
    Grammar(GrammarKind.JSON_SCHEMA, NUMBERED),
]
LONG, SHORT = 40, 10
"""Fewer tokens than that are asked for."""

ROUNDING = 1e-4
"""By how much log-probabilities in float32 may differ where steps were not asked to be batch-invariant."""


@dataclass(frozen=True)
class Asked:
    """A request, and behind how many tokens its client leaves; None for one that stays."""

    request: Request
    leaves_behind: int | None = None


Told = tuple[tuple[int, ...], Answer | None]
"""The tokens that a client got while it stayed, and its answer if that came to its end."""


@functools.cache
def demo_files() -> ModelFiles:
    return read_model_files(DEMO / "target")


def request_for(system: str, question: str, max_tokens: int, **fields: Any) -> Request:
    """A chat's request. fields: further ones of the request."""
    messages = [{"role": "system", "content": system}] * bool(system)
    prompt = chat_prompt(demo_files(), [*messages, {"role": "user", "content": question}])
    return Request(question, prompt.token_ids, max_tokens, boundaries=prompt.boundaries, **fields)


def mixed_requests(count: int) -> list[Asked]:
    """Greedy ones and seeded ones, with penalties, grammars, log-probabilities and stop strings, with the draft and
    without, of all lengths; some prompts begin alike or are the same. One client in eight leaves half-way."""
    draw, stops = random.Random(21), demo_files().stop_token_ids
    questions = [case["prompt"] for case in json.loads((DEMO / "prompts.json").read_text())["chat"]][: count // 2]
    asked = []
    for number in range(count):
        tokens = draw.randrange(2, SHORT if number % 4 else LONG)
        request = request_for(
            draw.choice(SYSTEMS),
            draw.choice(questions),
            tokens,
            sampling=draw.choice(SAMPLINGS),
            stop_token_ids=stops if draw.random() < 0.8 else frozenset(),
            stop_strings=draw.choice([(), (), ("e ", "10")]),
            speculate=draw.random() < 0.6,
            logprobs=draw.choice([None, 0, 3]),
            grammar=draw.choice(GRAMMARS),
        )
        asked.append(Asked(request, tokens // 2 if number % 8 == 4 else None))
    return asked


@contextlib.asynccontextmanager
async def demo_cluster(stages: int, dtype: str) -> AsyncIterator[Cluster]:
    """The demo pair on workers of one thread each; steps are batch-invariant in bfloat16."""
    devices = ",".join(["cpu"] * stages)
    plan = make_plan(target_devices=devices, layer_split=None, draft_device=None, num_layers=12, has_draft=True)
    pair = Checkpoints(DEMO / "target", DEMO / "draft", dtype)
    async with Cluster(plan, pair, launch=Launch(threads=1), exact=dtype == "bfloat16") as cluster:
        yield cluster


async def ask(engine: Engine, asked: Asked) -> Told:
    tokens: list[int] = []
    async with engine.answering(asked.request) as generation:
        async for piece in generation.pieces():
            tokens += piece.token_ids
            if asked.leaves_behind is not None and len(tokens) >= asked.leaves_behind:
                break
    return tuple(tokens), generation.answer


async def answers_alone(requests: Sequence[Asked], dtype: str) -> list[Answer]:
    """Whole answers on one stage, one behind the other, each of which finds no prefix."""
    answers = []
    async with demo_cluster(1, dtype) as cluster:
        for asked in requests:
            async with PrefixCache(cluster, "text") as prefixes:
                _, answer = await ask(Engine(cluster, demo_files(), prefixes, name="demo"), Asked(asked.request))
            assert answer is not None
            assert answer.stats.cached_tokens == 0
            answers.append(answer)
    return answers


async def assert_alike_together(
    requests: Sequence[Asked], alone: Sequence[Answer], stages: int, dtype: str, waits: Sequence[float] = (0.0,)
) -> None:
    """Every stage computes steps of several requests at once, some of them find kept prefixes, draft tokens are
    verified, and all answers are those alone.

    waits: of so many rounds; within how many seconds clients come, in another order and others with a draft each time.
    """
    draw = random.Random(22)
    async with demo_cluster(stages, dtype) as cluster:
        for spread in waits:
            async with PrefixCache(cluster, "text") as prefixes:
                engine = Engine(cluster, demo_files(), prefixes, name="demo", max_running=len(requests))
                for system in (CALCULATOR, STORY):
                    # From here on the system's part is kept, as one request leaves it.
                    await ask(engine, Asked(request_for(system, "Hello", 2)))
                while prefixes.pending:
                    await asyncio.sleep(0.01)

                async def come(asked: Asked, engine: Engine = engine, spread: float = spread) -> Told:
                    request = replace(asked.request, speculate=draw.random() < 0.6)
                    await asyncio.sleep(spread * draw.random())
                    return await ask(engine, replace(asked, request=request))

                found = await asyncio.gather(*map(come, requests))
            for one, asked, expected in zip(found, requests, alone, strict=True):
                assert_alike(one, asked, expected, exact=dtype == "bfloat16")
            stats = [answer.stats for _, answer in found if answer is not None]
            assert sum(one.cached_tokens > 0 for one in stats) > len(requests) / 8
            assert sum(one.accepted_tokens for one in stats) > 0
        for address in cluster.addresses:
            counts = (await when_idle(cluster, address)).batches
            assert counts is not None
            assert counts.sessions > counts.steps


def assert_alike(told: Told, asked: Asked, expected: Answer, *, exact: bool) -> None:
    """exact: log-probabilities are the same to the bit."""
    tokens, answer = told
    if asked.leaves_behind is not None:
        assert tokens == expected.token_ids[: len(tokens)]
        return
    assert answer is not None
    assert (tokens, answer.text, answer.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
    if exact:
        assert answer.logprobs == expected.logprobs
    else:
        assert numbers(answer.logprobs) == pytest.approx(numbers(expected.logprobs), abs=ROUNDING)


def numbers(logprobs: Sequence[TokenLogprobs] | None) -> list[float]:
    """All of an answer's log-probabilities."""
    return [number for token in logprobs or () for number in (token.logprob, *token.top_logprobs)]


SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("dtype", "count", "places", "waits"),
    [
        pytest.param("bfloat16", 32, [3], [0.0], id="some"),
        pytest.param("bfloat16", 64, [1, 2, 3], [0.0, 0.5, 3.0], marks=SLOW, id="exact"),
        pytest.param("float32", 64, [1, 2, 3], [0.0, 0.5, 3.0], marks=SLOW, id="float32"),
    ],
)
async def test_answers_together_are_those_alone(
    dtype: str, count: int, places: Sequence[int], waits: Sequence[float]
) -> None:
    """Over one, two and three stages, in bfloat16 with `--exact` to the bit; requests as of `mixed_requests`."""
    requests = mixed_requests(count)
    alone = await answers_alone(requests, dtype)
    for stages in places:
        await assert_alike_together(requests, alone, stages, dtype, waits)
