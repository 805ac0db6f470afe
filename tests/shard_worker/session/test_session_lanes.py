"""Steps that go from device thread to device thread are those that would have gone through event loops."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from services.errors import FlashsplitError, ResourceExhausted
from services.messages.steps import Failure, Forward, StepKind
from shard_worker.stage.stage import StageState
from shard_worker.stage.step_graph import StepRows
from tests.combinations import covering
from tests.shard_worker.chain import BLOCK, Chain, Client, Lane
from tests.shard_worker.session.session_memory import Memory, differing, memory_of, stages_of
from tests.shard_worker.session.test_following import follow, tokens_of
from tests.shard_worker.session.watched_stage import watch
from tests.shard_worker.tiny import Tiny, ids

PROMPT = ids(20)
CUTS = [(1,), (1, 3)]


def always(_: Forward) -> bool:
    return True


def never(_: Forward) -> bool:
    return False


@pytest.fixture
def new_chain(tiny: Tiny) -> Iterator[Callable[..., Chain]]:
    """Makes chains whose lanes carry what the test says."""
    chains: list[Chain] = []

    def make(name: str, cuts: Sequence[int], *, drafted: bool, carries: Callable[[Forward], bool]) -> Chain:
        draft = tiny.draft(name, "session", target_layer_ids=(0, 1, 3)) if drafted else None
        chains.append(Chain(tiny.path(name), cuts, draft=draft, carries=carries))
        return chains[-1]

    yield make
    for chain in chains:
        chain.shutdown()


def shape(step: Forward) -> Forward:
    """Return the step without the numbers of its activation."""
    assert step.activation is not None
    return replace(step, activation=replace(step.activation, data=b""))


async def run(chain: Chain, *, drafted: bool) -> tuple[list[int], Memory]:
    """Return the tokens of a few frames with followers, and what the session holds behind them."""
    propose = BLOCK - 1 if drafted else 0
    produced: list[int] = []
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        for more in (9, 3):
            produced += tokens_of(await follow(client, produced[-1] if produced else PROMPT[-1], more, propose))
            if drafted:
                # The draft tokens behind the last step, for which nothing waits.
                await anext(client.events)
        # And a frame without followers, whose step number must be the next one.
        produced += (await client.step(StepKind.DECODE, produced[-1:]))[0].token_ids
        memory = await memory_of(client)
    return produced, memory


@pytest.mark.parametrize(("name", "drafted", "cuts"), covering(product(["qwen3", "qwen3_5"], [False, True], CUTS)))
async def test_the_same_steps(new_chain: Callable[..., Chain], name: str, drafted: bool, cuts: tuple[int, ...]) -> None:
    """Tokens, and every row and state of every stage, are the same bit for bit, whether lanes carry all steps, none,
    or one in two."""
    draw = random.Random(1)
    expected, memory = await run(new_chain(name, cuts, drafted=drafted, carries=never), drafted=drafted)
    for carries in (always, lambda _: draw.random() < 0.5):
        chain = new_chain(name, cuts, drafted=drafted, carries=carries)
        tokens, remembered = await run(chain, drafted=drafted)
        assert tokens == expected
        assert not differing(memory, remembered)
        if carries is always:
            # The first step of a frame comes through the event loop, all behind it through lanes.
            assert [len(upper.carried) for upper, _ in chain.directory.lanes] == [12] * len(cuts)
            if not drafted:
                # All of these were known before they came, but for the numbers in their activations.
                for upper, lower in chain.directory.lanes:
                    assert [shape(step) for step in lower.expected[:10]] == [shape(step) for step in upper.carried[:10]]
                # The first stage expected all but a frame's first one, but for their tokens.
                [(upper, lower)] = [lane for lane in chain.directory.lanes if lane[0].expected]
                expectable = [replace(step, token_ids=(-1,)) for step in lower.carried]
                assert [step for step in expectable if step in upper.expected] == upper.expected
                assert len(upper.expected) >= 9
            assert all(len(lower.carried) == 12 for _, lower in chain.directory.lanes)


async def test_many_sessions_at_once(new_chain: Callable[..., Chain]) -> None:
    """Steps of six sessions meet on the same threads and stay apart."""
    chain = new_chain("qwen3_5", (1, 3), drafted=True, carries=always)
    expected, memory = await run(chain, drafted=True)
    for tokens, remembered in await asyncio.gather(*(run(chain, drafted=True) for _ in range(6))):
        assert tokens == expected
        assert not differing(memory, remembered)


@pytest.mark.parametrize("drafted", [False, True])
async def test_a_stop_token_is_the_end(new_chain: Callable[..., Chain], drafted: bool) -> None:
    """No step is sent up the chain behind it."""
    chain = new_chain("qwen3", (1, 3), drafted=drafted, carries=always)
    expected, _ = await run(chain, drafted=False)
    stop = next(token for index, token in enumerate(expected) if index > 2 and token not in expected[:index])
    async with chain.session(stop_token_ids=frozenset({stop})) as client:
        await client.prefill(PROMPT[:-1])
        commits = await follow(client, PROMPT[-1], 30, BLOCK - 1 if drafted else 0)
        assert tokens_of(commits) == expected[: expected.index(stop) + 1]
        lower = chain.directory.lanes[-1][1]
        assert len(lower.carried) == len(commits) - 1


def changed(**changes: Any) -> Callable[[Lane, Forward], None]:
    def pass_on(to: Lane, forward: Forward) -> None:
        to.on_step(replace(forward, **{name: change(forward) for name, change in changes.items()}))

    return pass_on


WRONG: dict[str, tuple[bool, Callable[[Lane, Forward], None], str]] = {
    "a repeated step": (False, changed(step=lambda step: step.step - 1), "step is"),
    "another place": (False, changed(base_position=lambda step: step.base_position + 1), "base_position is"),
    "no activation": (False, changed(activation=lambda _: None), "this stage takes an activation"),
    "a token of no vocabulary": (False, changed(token_ids=lambda _: (1 << 20,)), "not below the vocabulary's"),
    "another following step": (True, changed(step=lambda step: step.step + 1), "step is"),
    "more rows than there were": (
        True,
        changed(base_position=lambda step: step.base_position + 99),
        "base_position is",
    ),
    "garbage": (
        True,
        lambda to, _: to.on_failure(FlashsplitError("a step could not be parsed")),
        "could not be parsed",
    ),
}


async def until_failure(client: Client) -> None:
    """Read events; a failure among them is raised."""
    async for event in client.events:
        if isinstance(event, Failure):
            raise FlashsplitError(event.message)


@pytest.mark.parametrize(("wrong", "drafted"), covering(product(WRONG, [False, True]), 1))
async def test_what_does_not_fit_ends_the_session(new_chain: Callable[..., Chain], wrong: str, drafted: bool) -> None:
    """A neighbour that sends another step than the next one is refused by name of the stage; the chain lives on."""
    chain = new_chain("qwen3_5", (1, 3), drafted=drafted, carries=always)
    up, how, words = WRONG[wrong]
    expected, _ = await run(chain, drafted=drafted)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        # Between the second stage and the third.
        own, other = chain.directory.lanes[-2]
        way, end = (other, own) if up else (own, other)
        spoilt = Lane(always)
        spoilt.on_step, spoilt.on_failure = lambda forward: how(end, forward), end.on_failure
        way.far_end = spoilt
        await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], BLOCK - 1 if drafted else 0, more=9))
        with pytest.raises(FlashsplitError, match=words):
            async with asyncio.timeout(20):
                await until_failure(client)
    assert (await run(chain, drafted=drafted))[0] == expected


@pytest.mark.parametrize(
    ("stage", "error", "words"),
    covering(
        (
            (stage, *error)
            for stage in (0, 1, 2)
            for error in (
                (ResourceExhausted("the device has no memory left"), "no memory left"),
                (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "no memory left"),
                (ZeroDivisionError("a mistake of ours"), "internal error"),
            )
        ),
        1,
    ),
)
async def test_an_error_in_the_midst_reaches_the_reader(
    new_chain: Callable[..., Chain], stage: int, error: Exception, words: str
) -> None:
    """Whatever goes wrong in a step that nobody sent, whoever reads the events hears of it, and of the stage."""
    chain = new_chain("qwen3", (1, 3), drafted=False, carries=always)

    def fail(state: StageState) -> None:
        if state.length == len(PROMPT) + 2:
            raise error

    watch(chain.roles[stage], before_step=fail)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=9))
        with pytest.raises(FlashsplitError, match=words) as caught:
            async with asyncio.timeout(20):
                await until_failure(client)
        if stage == 0:
            assert caught.value.where["stage"] == "0"
        else:
            assert f"stage {stage}" in str(caught.value)


async def test_a_closed_session_is_left_alone(new_chain: Callable[..., Chain]) -> None:
    """Steps that are on their way when a session ends come to nothing, and others can be opened."""
    chain = new_chain("qwen3", (1, 3), drafted=False, carries=always)
    for _ in range(10):
        async with chain.session() as client:
            await client.prefill(PROMPT[:-1])
            await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=30))
            await client.commit()
    assert all(role.open_sessions == 0 for role in chain.roles)
    assert (await run(chain, drafted=False))[0]


@pytest.mark.parametrize("known", [False, True])
async def test_a_released_step_is_the_next_one(new_chain: Callable[..., Chain], known: bool) -> None:
    """It is so even where something else is asked for meanwhile: between the release and the step a recurrent layer
    would forget the step, and advance by it again."""
    chain = new_chain("qwen3_5", (1,), drafted=False, carries=always)
    expected, _ = await run(chain, drafted=False)
    order: list[str] = []

    def released(_: StepRows, certain: bool) -> None:
        assert certain
        order.append("release")
        thread.queue_step(order.append, "other")

    watch(chain.roles[1], before_step=lambda _: order.append("step"), before_release=released)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        order.clear()
        upper, lower = chain.directory.lanes[-1]
        thread = stages_of(client)[1].host.thread
        detour = Lane(always)

        def on_the_thread(forward: Forward) -> None:
            if thread.busy:
                # Then it would not be released.
                thread.queue_step(on_the_thread, forward)
                return
            if known:
                assert forward.activation is not None
                lower.on_expected(memoryview(forward.activation.data))
            else:
                lower.on_begun(forward, True)
            lower.on_step(forward)

        detour.on_step, detour.on_failure = lambda step: thread.queue_step(on_the_thread, step), lower.on_failure
        upper.far_end = detour
        await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=9))
        tokens = [(await client.commit()).token_ids[0] for _ in range(10)]
    assert tokens == expected[:10]
    # The frame's own step comes through the event loop.
    assert order[0] == "step"
    releases = [index for index, what in enumerate(order) if what == "release"]
    assert releases
    assert all(order[index + 1] == "step" for index in releases)


@pytest.mark.parametrize("drafted", [False, True])
async def test_a_stage_on_a_gpu_prelaunches_the_expected_step(new_chain: Callable[..., Chain], drafted: bool) -> None:
    """Behind each step but a frame's last one, a step of as many rows is prelaunched for the session's own state. The
    last stage knows its rows, since it sends them to the first.

    Where the next step is there already nothing is prelaunched, so a run may have to be repeated.
    """
    asked: list[tuple[int, int]] = []
    known_rows: list[StepRows] = []

    def on_first(_: StageState, rows: int, known: StepRows | None) -> None:
        asked.append((0, rows))
        assert known is None

    def on_last(state: StageState, rows: int, known: StepRows | None) -> None:
        asked.append((1, rows))
        assert known is not None
        assert known.base == state.length
        known_rows.append(known)

    chain = new_chain("qwen3", (1,), drafted=drafted, carries=always)
    for role, hook in zip(chain.roles, (on_first, on_last), strict=True):
        watch(role, before_prelaunch=hook, with_gpu=True)
    runs = 0
    deadline = time.monotonic() + 60
    while {stage for stage, _ in asked} != {0, 1}:
        assert time.monotonic() < deadline
        await run(chain, drafted=drafted)
        runs += 1
    assert {rows for _, rows in asked} == ({BLOCK} if drafted else {1})
    # A stage that hears how much of a verify counts prelaunches then, if it has not yet.
    assert len(asked) <= runs * (3 if drafted else 2) * 12
    carried = [step for lane in chain.directory.lanes for step in lane[1].carried]
    sent = [StepRows(step.base_position, step.token_ids, drafted, drafted) for step in carried]
    assert known_rows
    assert all(rows in sent for rows in known_rows)
