"""How a session takes what comes from the stages below and from its draft: wrong answers, broken streams, a lost
draft."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.errors import CLOSED, FlashsplitError, InvalidArgument, Unavailable
from services.layers import LayerRange
from services.messages.description import HeadPlace
from services.messages.draft_session import OpenDraft
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    FeatureSlice,
    Forward,
    Location,
    OpenSession,
    Proposal,
    StageIdentity,
    StepKind,
)
from shard_worker.roles.draft import DraftRole
from tests.shard_worker.chain import BLOCK, DRAFT_ADDRESS, Chain, Client, MakeChain
from tests.shard_worker.tiny import Tiny

PREFILL, DECODE, VERIFY = StepKind.PREFILL, StepKind.DECODE, StepKind.VERIFY
COUNT = 100


class ScriptedStage:
    """A stage below that answers with what it was given, whatever it is sent; an exception ends its stream."""

    max_tensor_bytes = max_feature_slices = 0

    def __init__(self, *answers: Event | FlashsplitError) -> None:
        self.stages = (StageIdentity(Location(1, "far", "cpu", "far:1"), LayerRange(3, 8)),)
        self._answers = answers
        self.step_lane = None
        self.closed = 0

    async def forward(self, forward: Forward) -> None:
        return None

    async def events(self) -> AsyncIterator[Event]:
        for answer in self._answers:
            if isinstance(answer, FlashsplitError):
                raise answer
            yield answer

    async def close(self, why: str = CLOSED) -> None:
        self.closed += 1

    async def open(self, _: OpenSession) -> ScriptedStage:
        return self


async def upstream_of(chain: Chain, below: ScriptedStage, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Open a session on the first of two stages, the second of which is scripted."""
    monkeypatch.setitem(chain.directory.stages, "stage:1", below)
    return Client(await chain.roles[0].open(chain.request()))


@pytest.mark.parametrize(
    ("kind", "commit"),
    [
        (VERIFY, Commit(1, 6, (7,), ())),
        (VERIFY, Commit(0, 0, (), ())),
        (VERIFY, Commit(0, 6, (7,), ())),
        (DECODE, Commit(0, 3, (7,), ())),
        (PREFILL, Commit(0, 6, (), ())),
    ],
)
async def test_an_answer_that_fits_no_step_ends_the_session(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch, kind: StepKind, commit: Commit
) -> None:
    """A commit of another step, or to a length that the step cannot reach, is a failure and is never applied."""
    client = await upstream_of(make_chain("qwen3_5", (3,)), ScriptedStage(commit), monkeypatch)
    await client.send(client.frame(kind, (1, 2, 3, 4, 5)))

    events = [event async for event in client.events]

    [failure] = events
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.code) == (FailureReason.STAGE_FAILED, "FAILED_PRECONDITION")
    assert f"commit of step {commit.step} to length {commit.length}" in failure.message
    await client.session.close()


async def test_an_answer_without_a_step_ends_the_session(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that nobody waits for is a failure."""
    client = await upstream_of(make_chain("qwen3_5", (3,)), ScriptedStage(Commit(0, 1, (), ())), monkeypatch)

    [failure] = [event async for event in client.events]

    assert isinstance(failure, Failure)
    assert "no step was waiting" in failure.message
    await client.session.close()


@pytest.mark.parametrize(
    ("answers", "reason", "code", "words"),
    [
        ([Unavailable("connection reset")], FailureReason.LINK_BROKEN, "UNAVAILABLE", "connection reset"),
        ([InvalidArgument("bad frame")], FailureReason.STAGE_FAILED, "INVALID_ARGUMENT", "bad frame"),
        ([], FailureReason.LINK_BROKEN, "UNAVAILABLE", "ended the session"),
    ],
)
async def test_a_stage_that_is_lost_is_named(
    make_chain: MakeChain,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[FlashsplitError],
    reason: FailureReason,
    code: str,
    words: str,
) -> None:
    """A broken, refused or silently ended stream below becomes one failure that says which stage, host and device."""
    below = ScriptedStage(*answers)
    client = await upstream_of(make_chain("qwen3_5", (3,)), below, monkeypatch)

    [failure] = [event async for event in client.events]

    assert isinstance(failure, Failure)
    assert (failure.reason, failure.code) == (reason, code)
    assert failure.location == below.stages[0].location
    assert "stage 1 (cpu on far, far:1)" in failure.message
    assert words in failure.message
    await client.session.close()
    assert below.closed == 1


async def test_a_failure_from_further_below_is_passed_on(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that a stage reports of one behind it travels up unchanged, and nothing after it."""
    origin = Failure(FailureReason.LINK_BROKEN, "gone", Location(2, "b", "cpu", "b:1"), "UNAVAILABLE")
    below = ScriptedStage(origin, Commit(0, 1, (), ()))
    client = await upstream_of(make_chain("qwen3_5", (3,)), below, monkeypatch)

    assert [event async for event in client.events] == [origin]
    await client.session.close()


# --- losing the draft


class FlakyDraft:
    """A draft worker whose sessions take no features any more once `error` is set."""

    def __init__(self, role: DraftRole) -> None:
        self._role = role
        self.describe = role.describe
        self.error: FlashsplitError | None = None
        self.failed = 0

    async def open(self, request: OpenDraft) -> Any:
        session: Any = await self._role.open(request)
        take = session.feature_slice

        async def feature_slice(piece: FeatureSlice) -> None:
            if self.error is not None:
                self.failed += 1
                raise self.error
            await take(piece)

        session.feature_slice = feature_slice
        return session


@pytest.mark.parametrize("error", [Unavailable("gone", address="draft:1"), InvalidArgument("refused")])
async def test_a_lost_draft_is_reported_and_the_session_goes_on(
    tiny: Tiny, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch, error: FlashsplitError
) -> None:
    """When the draft fails there is one notice, no proposal any more, and plain steps go on to the same tokens."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)
    chain = make_chain("qwen3_5", (3,), True, place=HeadPlace.LOADED)
    assert chain.draft_role is not None
    draft = FlakyDraft(chain.draft_role)
    monkeypatch.setitem(chain.directory.drafts, DRAFT_ADDRESS, draft)

    async with chain.session() as client:
        await client.prefill(prompt[:-1])
        await client.step(DECODE, prompt[-1:], BLOCK - 1)
        assert chain.draft_role.open_sessions == 1

        draft.error = error
        await client.send(client.frame(VERIFY, truth[:3], BLOCK - 1))
        assert (await client.commit()).token_ids == tuple(truth[1:4])
        failure = await anext(client.events)
        assert isinstance(failure, Failure)
        assert failure.reason is FailureReason.DRAFT_LOST
        assert "draft worker" in failure.message
        assert error.message in failure.message
        nothing = await anext(client.events)
        assert isinstance(nothing, Proposal)
        assert nothing.token_ids == ()
        assert chain.draft_role.open_sessions == 0

        commit, none = await client.step(VERIFY, truth[3:6], BLOCK - 1)
        assert (commit.token_ids, none) == (tuple(truth[4:7]), ())
        assert await client.plain(truth[6:7], 5) == truth[7:12]
    assert draft.failed == 1
