"""Steps that follow by themselves are those that would have been sent, one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from services.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from services.messages.steps import Commit, Failure, Forward, Proposal, SnapshotSave, SnapshotSaved, StepKind
from shard_worker.drafting.link import LostDraftLink
from shard_worker.session.following import MAX_MORE
from shard_worker.session.last_stage import LastStageSession
from shard_worker.stage.stage import StageState
from tests.shard_worker.chain import BLOCK, Chain, Client, MakeChain
from tests.shard_worker.session.session_memory import stages_of
from tests.shard_worker.session.watched_stage import watch
from tests.shard_worker.tiny import Tiny, ids

CUTS = [(), (1,), (1, 3)]
PROMPT = ids(20)


async def follow(client: Client, first: int, more: int, propose: int = 0, **changes: Any) -> list[Commit]:
    """Send one step behind a prefill and read the answers of all that follow it."""
    await client.send(client.frame(StepKind.DECODE, [first], propose, more=more, **changes))
    commits = [await client.commit()]
    while commits[-1].more:
        if propose:
            proposal = await anext(client.events)
            assert isinstance(proposal, Proposal)
            assert len(proposal.token_ids) == propose
        client.steps += 1
        commits.append(await client.commit())
        assert commits[-1].step == commits[-2].step + 1
    return commits


async def read_on(client: Client) -> None:
    """Read answers until the events end with an error."""
    while True:
        await client.commit()


def tokens_of(commits: Sequence[Commit]) -> list[int]:
    """Return the tokens of all answers."""
    return [token for commit in commits for token in commit.token_ids]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_plain_steps_follow(make_chain: MakeChain, name: str, cuts: tuple[int, ...]) -> None:
    """Twelve steps from one frame produce the tokens of twelve frames, and the session goes on behind them."""
    chain = make_chain(name, cuts)
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 16)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        commits = await follow(client, PROMPT[-1], 11)
        assert [commit.more for commit in commits] == [11 - index for index in range(12)]
        produced = tokens_of(commits)
        while len(produced) < 16:
            commit, _ = await client.step(StepKind.DECODE, produced[-1:])
            produced += commit.token_ids
    assert produced == expected


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_verifies_follow_with_draft_tokens(make_chain: MakeChain, name: str, cuts: tuple[int, ...]) -> None:
    """Blocks are proposed, verified and committed without being sent; their tokens are those of blocks that are
    sent."""
    chain = make_chain(name, cuts, True)
    async with chain.session() as client:
        expected = await client.speculate(PROMPT, 10)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        commits = await follow(client, PROMPT[-1], 7, propose=BLOCK - 1)
    assert len(commits) == 8
    assert [commit.token_ids for commit in commits[1:]][: len(expected.verified)] == expected.verified[:7]


@pytest.mark.parametrize("cuts", CUTS)
async def test_steps_follow_without_draft_tokens_where_the_draft_is_lost(
    make_chain: MakeChain, cuts: tuple[int, ...]
) -> None:
    """A step that asks for draft tokens, sent before its sender has heard of the loss, is followed all the same."""
    chain = make_chain("qwen3", cuts, True)
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 8)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        last = stages_of(client)[-1]
        assert isinstance(last, LastStageSession)
        last.draft = LostDraftLink(Unavailable("gone"))
        await client.session.save_snapshot(SnapshotSave("lost", client.length))
        await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], BLOCK - 1, more=7))
        events = [await anext(client.events) for _ in range(2 + 2 * 8)]
        assert [type(event) for event in events] == [Failure, SnapshotSaved, *[Commit, Proposal] * 8]
        assert tokens_of([event for event in events if isinstance(event, Commit)]) == expected


@pytest.mark.parametrize("cuts", CUTS)
async def test_a_stop_token_and_the_sessions_end_are_the_end(make_chain: MakeChain, cuts: tuple[int, ...]) -> None:
    """Nothing follows a stop token, nor a step behind whose token there is no room for another."""
    chain = make_chain("qwen3", cuts)
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 12)
    stop = next(token for index, token in enumerate(expected) if index > 3 and token not in expected[:index])
    async with chain.session(stop_token_ids=frozenset({stop})) as client:
        await client.prefill(PROMPT[:-1])
        commits = await follow(client, PROMPT[-1], 30)
        assert tokens_of(commits) == expected[: expected.index(stop) + 1]
    async with chain.session(max_length=len(PROMPT) + 4) as client:
        await client.prefill(PROMPT[:-1])
        commits = await follow(client, PROMPT[-1], 30)
        assert tokens_of(commits) == expected[:4]
        assert client.length == len(PROMPT) + 3


async def test_a_single_stage_goes_on_while_the_event_loop_is_busy(make_chain: MakeChain) -> None:
    """Steps are begun where the one before ended, on the device's thread; nothing is kept or sent in their midst."""
    chain = make_chain("qwen3")
    async with chain.session() as client:
        expected = await client.plain(PROMPT, 48)
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        [session] = stages_of(client)
        await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=47))
        deadline = time.monotonic() + 20
        while session.state.length < len(PROMPT) + 11:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        # Most are yet to come.
        with pytest.raises(FailedPrecondition, match="steps still follow"):
            await session.save_snapshot(SnapshotSave("a", len(PROMPT)))
        commits = [await client.commit() for _ in range(48)]
        assert tokens_of(commits) == expected


async def test_what_cannot_follow_is_refused(make_chain: MakeChain) -> None:
    """Too many following steps are refused, and any behind a prefill, which produces no token, or behind a step whose
    draft tokens for them may be spared."""
    chain = make_chain("qwen3")
    for frame, words in (
        (Forward(0, 0, (1, 2), StepKind.PREFILL, more=1), "prefill"),
        (Forward(0, 0, (1,), StepKind.DECODE, more=MAX_MORE + 1), f"up to {MAX_MORE}"),
        (Forward(0, 0, (1,), StepKind.DECODE, 3, more=3, least_accepted=2), "least_accepted is 2 where 3 steps may"),
    ):
        async with chain.session() as client:
            with pytest.raises(InvalidArgument, match=words):
                await client.send(frame)


async def test_an_error_of_a_following_step_ends_the_events(tiny: Tiny) -> None:
    """A step that the coordinator did not send cannot fail at its sender: whoever reads the events hears of it."""

    def fail(state: StageState) -> None:
        if state.length == len(PROMPT) + 3:
            raise ResourceExhausted("the device has no memory left")

    own = Chain(tiny.path("qwen3"), (1,))
    watch(own.roles[0], before_step=fail)
    try:
        async with own.session() as client:
            await client.prefill(PROMPT[:-1])
            await client.send(client.frame(StepKind.DECODE, PROMPT[-1:], more=20))
            await client.commit()
            with pytest.raises(ResourceExhausted, match="no memory left"):
                await read_on(client)
    finally:
        own.shutdown()
