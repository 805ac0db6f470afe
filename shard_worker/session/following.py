"""Steps that follow each other without the coordinator: where it asked for more, the first stage goes on by itself.

What lies between a step's answer and the next step is then the way up the chain alone, and nothing on an only stage,
whose device thread goes on by itself. Which step follows another
stands in `stage.proto`. This module knows steps and their answers, not what computes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from services.errors import CLOSED, InvalidArgument
from services.messages.steps import (
    Commit,
    Event,
    Forward,
    OpenSession,
    Proposal,
    SnapshotRestore,
    SnapshotSave,
    StepKind,
)
from services.rpc.stage import StageSession
from services.streams.step_lane import StepLane
from shard_worker.session.background import BackgroundTasks

MAX_MORE = 64
"""Steps that may follow one frame."""

UNKNOWN_TOKEN = -1
"""Stands in a step for a token that is not known yet."""


def check_more(step: Forward) -> None:
    """Raise InvalidArgument for more following steps than MAX_MORE, or behind a step that produces no token."""
    if step.more > MAX_MORE or (step.more and step.kind is StepKind.PREFILL):
        raise InvalidArgument(
            f"more is {step.more} behind a {step.kind}; up to {MAX_MORE} steps may follow one that produces a token",
            field="more",
        )


def is_followed(step: Forward, length: int, token_ids: tuple[int, ...], request: OpenSession) -> bool:
    """Return whether another step follows this one by itself.

    length: committed tokens behind it. token_ids: the tokens that it produced.
    """
    return (
        bool(step.more and token_ids)
        and token_ids[-1] not in request.stop_token_ids
        and _tokens_left(length, request) > 0
    )


def _tokens_left(length: int, request: OpenSession) -> int:
    """Return how many tokens the session has room for behind `length` committed ones and the one produced there."""
    return request.max_length - length - 1


def following_step(
    step: Forward, length: int, token_ids: tuple[int, ...], draft_tokens: tuple[int, ...], request: OpenSession
) -> Forward | None:
    """Return the step that follows this one by itself, None where none does.

    draft_tokens: what the draft proposed behind `token_ids`. The other arguments are as in `is_followed`.
    """
    if not is_followed(step, length, token_ids, request):
        return None
    # A verify produces one token more than it has draft tokens.
    draft_tokens = draft_tokens[: _tokens_left(length, request) - 1]
    return Forward(
        step.step + 1,
        length,
        (token_ids[-1], *draft_tokens),
        StepKind.VERIFY if draft_tokens else StepKind.DECODE,
        step.propose_tokens,
        more=step.more - 1,
    )


def probable_following_step(step: Forward, request: OpenSession) -> Forward | None:
    """Return the step that follows a decode step, with UNKNOWN_TOKEN in the place of the token that this one will
    produce; None where none follows, whatever the token is."""
    length = step.base_position + len(step.token_ids)
    return following_step(step, length, (UNKNOWN_TOKEN,), (), request)


def probable_following_block(step: Forward, request: OpenSession) -> Forward | None:
    """Return the verify that follows a step with as many draft tokens as it asks for, with UNKNOWN_TOKEN for every
    token, and at the highest position at which it may begin; None where none follows, or a shorter one might."""
    length = step.base_position + len(step.token_ids)
    if _tokens_left(length, request) <= step.propose_tokens:
        return None
    return following_step(step, length, (UNKNOWN_TOKEN,), (UNKNOWN_TOKEN,) * step.propose_tokens, request)


class FollowingSession:
    """A `StageSession` around that of a first stage with others behind it, which begins the steps that follow by
    themselves.

    session: the session of the stage.
    """

    def __init__(self, session: StageSession, request: OpenSession) -> None:
        self.session, self._request = session, request
        self.stages = session.stages
        self.max_tensor_bytes, self.max_feature_slices = session.max_tensor_bytes, session.max_feature_slices
        self.step_lane: StepLane | None = None
        # The step that runs, and its answer while the draft tokens for the next one are still to come.
        self._step: Forward | None = None
        self._answer: Commit | None = None
        self._one_at_a_time = asyncio.Lock()
        # What `events` yields; an exception is raised there, None ends it.
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._tasks = BackgroundTasks(self._events.put_nowait)

    async def forward(self, forward: Forward) -> None:
        """Take one step, as the port says."""
        async with self._one_at_a_time:
            if forward.more:
                self._step = forward
            await self.session.forward(forward)

    async def save_snapshot(self, save: SnapshotSave) -> None:
        async with self._one_at_a_time:
            await self.session.save_snapshot(save)

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        await self.session.restore_snapshot(restore)

    async def events(self) -> AsyncIterator[Event]:
        self._tasks.begin(self._listen)
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    async def close(self, why: str = CLOSED) -> None:
        self._tasks.cancel()
        await self.session.close(why)

    async def _listen(self) -> None:
        """Read the session's events."""
        async for event in self.session.events():
            self.take(event)
        self._events.put_nowait(None)

    def take(self, event: Event) -> None:
        """Take the session's next event, and begin the step that follows by itself, if it has not begun."""
        following = None
        if isinstance(event, Commit):
            event, following = self._after_commit(event)
        elif isinstance(event, Proposal):
            following = self._next_step(event.token_ids, begun=event.followed)
        # At once: nobody waits for the answer's way to the caller.
        if following is not None:
            self._tasks.begin(self._follow, following)
        self._events.put_nowait(event)

    def _after_commit(self, commit: Commit) -> tuple[Commit, Forward | None]:
        """Return the answer as the caller gets it, and the step to begin now, if there is one."""
        step = self._step
        if step is None or commit.step != step.step:
            return commit, None
        if not is_followed(step, commit.length, commit.token_ids, self._request):
            self._step = None
            return commit, None
        self._answer = replace(commit, more=step.more)
        return self._answer, None if step.propose_tokens else self._next_step((), begun=commit.followed)

    def _next_step(self, draft_tokens: tuple[int, ...], *, begun: bool) -> Forward | None:
        """Go on to the step behind the one that was answered, if there is one. Returns it where it is to be begun from
        here. begun: it has begun already, on its way through step lanes."""
        step, commit = self._step, self._answer
        self._answer = None
        if step is None or commit is None:
            return None
        following = following_step(step, commit.length, commit.token_ids, draft_tokens, self._request)
        self._step = following if following is not None and following.more else None
        return None if begun else following

    async def _follow(self, forward: Forward) -> None:
        async with self._one_at_a_time:
            await self.session.forward(forward)
