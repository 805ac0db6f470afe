"""What follows by itself may be changed while it does: answers are the same whatever is changed, and when."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from services.errors import InvalidArgument
from services.messages.description import FeatureTransport
from services.messages.steps import Commit, Forward, Proposal, StepKind, StepLimit
from shard_worker.batches import step_batches
from shard_worker.session.following import MAX_MORE, StepLimits
from shard_worker.stage.stage import StageState
from tests.combinations import others_slow
from tests.shard_worker.chain import BLOCK, Chain, Client, MakeChain
from tests.shard_worker.session.session_memory import stages_of
from tests.shard_worker.session.test_following import tokens_of
from tests.shard_worker.session.test_step_batches import BlocksMadeAtOnce
from tests.shard_worker.session.watched_stage import watch
from tests.shard_worker.tiny import Tiny, ids

CUTS = [(), (1,), (1, 3)]
PROMPT = ids(20)
INVARIANT: dict[str, Any] = {"batch_invariant_rows": 16}


@pytest.fixture
def new_chain(tiny: Tiny) -> Iterator[Callable[..., Chain]]:
    """Makes chains with a draft beside the last stage."""
    chains: list[Chain] = []

    def make(name: str, cuts: Sequence[int], **options: Any) -> Chain:
        draft = tiny.draft(name, "session", target_layer_ids=(0, 1, 3))
        chains.append(Chain(tiny.path(name), cuts, draft=draft, dtype="bfloat16", **options))
        return chains[-1]

    yield make
    for chain in chains:
        chain.shutdown()


async def read(client: Client) -> tuple[Commit, tuple[int, ...]]:
    """Read a step's answer, and the draft tokens behind it where it asked for some."""
    commit = await client.commit()
    if not commit.propose_tokens:
        return commit, ()
    proposal = await anext(client.events)
    assert isinstance(proposal, Proposal), proposal
    assert proposal.step == commit.step
    return commit, proposal.token_ids


async def steered(
    client: Client, prompt: Sequence[int], count: int, draw: random.Random, proposes: Sequence[int]
) -> list[int]:
    """Return the first tokens behind a prompt. Steps are sent where none follows by itself; before and behind every
    answer that is read what follows is changed, or is not. proposes: among which the numbers of draft tokens are."""

    async def change() -> None:
        if draw.random() < 0.3:
            limit = StepLimit(client.steps + draw.choice([0, 1, 4, 30]), draw.choice(proposes))
            await client.session.limit_steps(limit)

    await client.prefill(prompt[:-1], 8)
    produced, rows, kind = list[int](), tuple(prompt[-1:]), StepKind.DECODE
    while len(produced) < count:
        await client.send(client.frame(kind, rows, draw.choice(proposes), more=draw.choice([0, 1, 2, 9])))
        await change()
        commit, draft_tokens = await read(client)
        produced += commit.token_ids
        while commit.more:
            await change()
            client.steps += 1
            before, (commit, draft_tokens) = commit, await read(client)
            assert commit.step == before.step + 1
            assert len(commit.token_ids) <= 1 + before.propose_tokens
            produced += commit.token_ids
        rows = (produced[-1], *draft_tokens)
        kind = StepKind.VERIFY if draft_tokens else StepKind.DECODE
    return produced[:count]


def always(_: object) -> bool:
    return True


async def assert_alike(chain: Chain, seed: int, proposes: Sequence[Sequence[int]], count: int = 20) -> None:
    """Sessions whose steps are changed at random come to the tokens of plain steps that were sent one by one.

    proposes: for each session, among which the numbers of its draft tokens are; none where it has no draft.
    """

    async def plain(number: int) -> list[int]:
        async with chain.session(draft=None, **INVARIANT) as client:
            return await client.plain(ids(7 + number, seed=number), count)

    async def changed(number: int) -> list[int]:
        drafted = {} if proposes[number] else {"draft": None}
        async with chain.session(**drafted, **INVARIANT) as client:
            prompt, draw = ids(7 + number, seed=number), random.Random(100 * seed + number)
            return await steered(client, prompt, count, draw, proposes[number] or [0])

    expected = [await plain(number) for number in range(len(proposes))]
    # One by itself, and all at once.
    assert await changed(1) == expected[1]
    assert await asyncio.gather(*map(changed, range(len(proposes)))) == expected


@pytest.mark.parametrize(
    ("name", "cuts", "options"),
    others_slow(
        [
            (name, *way)
            for name in ("qwen3", "qwen3_5")
            for way in (
                ((), {}),
                ((1, 3), {}),
                ((1, 3), {"carries": always}),
                ((1, 3), {"carries": always, "carries_batch": always}),
            )
        ],
        [
            ("qwen3_5", (), {}),
            ("qwen3", (1, 3), {}),
            ("qwen3", (1, 3), {"carries": always}),
            ("qwen3_5", (1, 3), {"carries": always, "carries_batch": always}),
        ],
    ),
)
async def test_changes_at_any_moment_change_no_token(
    new_chain: Callable[..., Chain], name: str, cuts: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Whatever way steps go, and whoever begins those that follow."""
    chain, any_length = new_chain(name, cuts, **options), [0, 0, 3, BLOCK - 1]
    proposes = [[], any_length, any_length, [], [3, BLOCK - 1]]
    await assert_alike(chain, len(name) + len(cuts) + len(options), proposes)


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
async def test_changes_behind_steps_that_were_launched_ahead_change_no_token(
    new_chain: Callable[..., Chain], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched before the results of the step before were read stays as it was launched."""
    chain = new_chain(name, (), transport=FeatureTransport.SUM)
    blocks = BlocksMadeAtOnce(monkeypatch)
    monkeypatch.setattr(step_batches, "BLOCKS_AHEAD_FROM", 2)
    watch(chain.roles[0], behind=[])
    await assert_alike(chain, 7, [[3, BLOCK - 1], [3, BLOCK - 1], [2, BLOCK - 1], [0, 3, BLOCK - 1]])
    assert max(blocks.behind) > 1


@pytest.mark.parametrize("cuts", [CUTS[0], pytest.param(CUTS[1], marks=pytest.mark.slow), CUTS[2]])
async def test_steps_go_on_as_long_as_they_are_told_to(make_chain: MakeChain, cuts: tuple[int, ...]) -> None:
    """Told in time, they follow until the answer has its last token, though no second step is ever sent."""
    chain = make_chain("qwen3", cuts)
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 80)
    async with chain.session(max_length=len(PROMPT) + 80) as client:
        await client.prefill(PROMPT[:-1])
        await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=20))
        commits = [await client.commit()]
        while commits[-1].more:
            if commits[-1].more < 15:
                await client.session.limit_steps(StepLimit(client.steps + 30))
            client.steps += 1
            commits.append(await client.commit())
    assert tokens_of(commits) == expected


async def read_all(client: Client) -> list[Commit]:
    """Read the answers to the step that was sent and to all that follow it."""
    commits = [await client.commit()]
    while commits[-1].more:
        client.steps += 1
        commits.append(await client.commit())
    return commits


@pytest.mark.parametrize("cuts", CUTS)
async def test_steps_end_once_they_are_told_to(tiny: Tiny, cuts: tuple[int, ...]) -> None:
    """None follows but the one behind the step that is computed. Then the session keeps its state, and goes on with the
    next step that is sent, whose followers are as that one says."""
    begun, told = threading.Event(), threading.Event()

    def hold(state: StageState) -> None:
        if state.length == len(PROMPT) + 3:
            begun.set()
            assert told.wait(20)

    own = Chain(tiny.path("qwen3"), cuts)
    try:
        async with own.session() as client:
            expected = await client.plain(PROMPT, 10)
        watch(own.roles[0], before_step=hold)
        async with own.session() as client:
            await client.prefill(PROMPT[:-1])
            await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=60))
            commits = asyncio.ensure_future(read_all(client))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            await client.session.limit_steps(StepLimit(0))
            told.set()
            # It computes the fifth token, which the sixth follows.
            produced = tokens_of(await commits)
            assert produced == expected[:6]
            await client.save("here")
            # It comes too late to change anything, and says nothing of what is sent behind it.
            await client.session.limit_steps(StepLimit(client.steps + 50))
            await client.send(client.frame(StepKind.DECODE, produced[-1:], more=2))
            after = await read_all(client)
            assert [commit.more for commit in after] == [2, 1, 0]
            assert produced + tokens_of(after) == expected[:9]
    finally:
        own.shutdown()


async def test_what_makes_no_sense_is_refused(make_chain: MakeChain) -> None:
    """A step too far ahead, and a limit for a later stage, which does not begin steps."""
    chain = make_chain("qwen3", (1,))
    async with chain.session() as client:
        await client.prefill(PROMPT)
        await client.session.limit_steps(StepLimit(client.steps + MAX_MORE))
        with pytest.raises(InvalidArgument, match=f"last_step is {client.steps + MAX_MORE + 1}; it may be up to"):
            await client.session.limit_steps(StepLimit(client.steps + MAX_MORE + 1))
        with pytest.raises(InvalidArgument, match="a later stage"):
            await stages_of(client)[1].limit_steps(StepLimit(1))


def test_a_limit_is_no_more_than_the_steps_behind_it() -> None:
    """The next step is never taken back; behind it so many follow as there are up to the last one."""
    limits, following = StepLimits(), Forward(5, 10, (1,), StepKind.DECODE, 7, more=3)
    assert limits.applied(following) == following
    for last, more in ((0, 0), (5, 0), (6, 1), (20, 15)):
        limits.change(StepLimit(last, 2))
        assert limits.applied(following) == Forward(5, 10, (1,), StepKind.DECODE, 2, more=more)
    limits.change(None)
    assert limits.applied(following) == following
