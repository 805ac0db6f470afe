"""Steps follow one another without the coordinator, which lets them go on, changes or ends them in time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from coordinator.answer import Answer
from coordinator.engine.chain_attempt import MOST_MORE_STEPS
from coordinator.engine.generation import generate
from coordinator.prefix.cache import PrefixCache
from coordinator.prefix.policy import KeepPolicy
from services.messages.steps import StepKind
from tests.coordinator.fakes import START, Script, ScriptedCluster, byte_tokenizer, engine, request, says

TOKENIZER = byte_tokenizer()
TEXT = says("".join(f"{number} ships, " for number in range(60)))


async def answered(cluster: ScriptedCluster, *, prefixes: PrefixCache | None = None, **fields: object) -> Answer:
    return await generate(cluster, request(**fields), TOKENIZER, lambda _: None, prefixes)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [0, 4])
async def test_no_step_waits_for_the_coordinator(block_size: int) -> None:
    """But for an answer's first, and the first two blocks of a draft that is alone, which are judged one by one. The
    others are allowed in time, so many at once that this is seldom done."""
    cluster = ScriptedCluster(Script(TEXT), block_size=block_size)
    answer = await answered(cluster, max_tokens=400)
    assert answer.token_ids == TEXT[:400]
    session = cluster.session
    # The prompt, and the first step behind it.
    assert session.sent == (4 if block_size else 2)
    assert len(session.forwards) > 90
    assert 1 < len(session.limits) <= 5 + len(session.forwards) / (MOST_MORE_STEPS / 2)


@pytest.mark.parametrize("block_size", [0, 4])
async def test_workers_of_a_release_before_are_sent_more_steps(block_size: int) -> None:
    """They cannot be told anything of what follows, and know nothing of a text that ends an answer."""
    cluster = ScriptedCluster(Script(TEXT), block_size=block_size)
    cluster.workers = (replace(cluster.workers[0], protocol_minor=1),)
    answer = await answered(cluster, max_tokens=400)
    assert answer.token_ids == TEXT[:400]
    session = cluster.session
    assert 5 < session.sent == len(session.limits) < len(session.forwards)
    await answered(cluster, max_tokens=50, stop_strings=("30 ships",))
    session = cluster.session
    assert session.sent == len(session.limits) == len(session.forwards)


@pytest.mark.parametrize("spares", [True, False])
async def test_no_block_is_made_that_is_not_verified(spares: bool) -> None:
    """Behind the second block of a draft that is never right plain steps are measured, and none is asked for in vain;
    workers of a release before make one."""
    cluster = ScriptedCluster(Script(TEXT, guess=lambda _: START), block_size=4)
    cluster.workers = (replace(cluster.workers[0], protocol_minor=6 if spares else 5),)
    answer = await answered(cluster, max_tokens=200)
    assert answer.token_ids == TEXT[:200]
    first, second, plain = cluster.session.forwards[1:4]
    assert [step.kind for step in (first, second, plain)] == [StepKind.VERIFY, StepKind.VERIFY, StepKind.DECODE]
    assert [step.propose_tokens for step in (first, second)] == [3, 3]
    assert [step.least_accepted > 0 for step in (first, second)] == [False, spares]


async def test_a_text_that_is_copied_leaves_the_draft_alone() -> None:
    """From the first answer on, though no plain step has told yet what blocks cost."""
    cluster = ScriptedCluster(Script(TEXT, guess=lambda _: START), block_size=16)
    # What is copied is found behind the first block: no plain step comes before.
    asked = request((*b"#", *TEXT, *b"#"), max_tokens=400)
    answer = await generate(cluster, asked, TOKENIZER, prompt_lookup=True)  # type: ignore[arg-type]
    assert answer.token_ids == TEXT[:400]
    steps = cluster.session.forwards[1:]
    assert len(steps) < 60
    assert sum(step.propose_tokens > 0 for step in steps) <= 3


@pytest.mark.parametrize("block_size", [0, 4])
async def test_a_text_that_ends_an_answer_ends_its_steps(block_size: int) -> None:
    """They follow by themselves also where a text may end it. What was computed behind that is dropped; the session is
    kept as it is once nothing follows any more."""
    cluster = ScriptedCluster(Script(TEXT), block_size=block_size)
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:  # type: ignore[arg-type]
        answer = await answered(cluster, max_tokens=600, stop_strings=("20 ships", "never"), prefixes=prefixes)
        session = cluster.session
        assert session.sent == (4 if block_size else 2)
        assert answer.text == bytes(TEXT[:-1]).split(b"20 ships")[0].decode()
        while not session.closed:
            await asyncio.sleep(0)
    length = session.forwards[-1].base_position
    assert 2 + len(answer.token_ids) <= length <= 2 + len(answer.token_ids) + 2 * max(1, block_size)
    assert session.forwards[-1].more == 0
    assert max(session.kept.values()) >= length


async def test_among_others_no_block_is_waited_for() -> None:
    """Whatever is measured and chosen meanwhile, of plain decode and of blocks."""
    serving = engine(Script(TEXT), block_size=4)
    cluster: Any = serving.cluster

    async def ask() -> tuple[int, ...]:
        async with serving.answering(request(max_tokens=300)) as generation:
            tokens: list[int] = []
            async for piece in generation.pieces():
                tokens += piece.token_ids
                # The others' turn.
                await asyncio.sleep(0)
        return tuple(tokens)

    assert await asyncio.gather(*(ask() for _ in range(6))) == [TEXT[:300]] * 6
    lengths = {limit.propose_tokens for session in cluster.sessions for limit in session.limits}
    assert len(lengths) > 1
    assert sum(session.sent for session in cluster.sessions) <= 3 * len(cluster.sessions)


async def test_steps_end_where_the_state_is_to_be_kept() -> None:
    """The state is kept between two steps every so often, and the next one is sent."""
    cluster = ScriptedCluster(Script(TEXT))
    policy = KeepPolicy(min_tokens=4, checkpoint_tokens=100)
    async with PrefixCache(cluster, "text", policy=policy) as prefixes:  # type: ignore[arg-type]
        answer = await answered(cluster, max_tokens=350, prefixes=prefixes)
        assert answer.token_ids == TEXT[:350]
        session = cluster.session
        while not session.closed:
            await asyncio.sleep(0)
    kept = sorted(save.length for save in session.saves)
    assert len(kept) == 4
    assert all(100 <= after - before <= 103 for before, after in zip([2, *kept[:-1]], kept[:-1], strict=False))
    assert session.sent == 2 + 3


async def test_a_pause_does_not_wait_until_all_have_followed_that_may() -> None:
    """Answers pause behind the steps that are under way, and go on from there."""
    serving = engine(Script(TEXT))
    tokens: list[int] = []
    pausing = asyncio.Event()

    async def ask() -> None:
        async with serving.answering(request(max_tokens=300)) as generation:
            async for piece in generation.pieces():
                tokens.extend(piece.token_ids)
                if len(tokens) == 40:
                    pausing.set()
                await asyncio.sleep(0)

    asking = asyncio.ensure_future(ask())
    await pausing.wait()
    async with serving.paused(10) as going_on:
        assert going_on == 0
        assert 40 <= len(tokens) <= 43
    await asking
    assert tuple(tokens) == TEXT[:300]
