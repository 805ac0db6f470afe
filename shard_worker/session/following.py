"""Steps that follow each other without the coordinator: where it asked for more, the first stage goes on by itself.

What lies between a step's answer and the next step is then the way up the chain alone, and nothing on an only stage,
whose device thread goes on by itself. Which step follows another, and how the coordinator changes that meanwhile, is
said in `stage.proto`. This module knows steps and their answers, not what computes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
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
    StepLimit,
)
from services.rpc.stage import StageSession
from services.streams.direct_queue import DirectQueue
from services.streams.step_lane import StepLane
from shard_worker.session.background import BackgroundTasks

MAX_MORE = 64
"""Steps that may follow one frame."""

UNKNOWN_TOKEN = -1
"""Stands in a step for a token that is not known yet."""


def check_more(step: Forward) -> None:
    """Raise InvalidArgument for more following steps than MAX_MORE, or behind a step that produces no token, and where
    draft tokens may be spared that a following step would verify."""
    if step.more > MAX_MORE or (step.more and step.kind is StepKind.PREFILL):
        raise InvalidArgument(
            f"more is {step.more} behind a {step.kind}; up to {MAX_MORE} steps may follow one that produces a token",
            field="more",
        )
    if step.more and step.least_accepted:
        raise InvalidArgument(
            f"least_accepted is {step.least_accepted} where {step.more} steps may follow; it is 0 there, or more is",
            field="least_accepted",
        )


class StepLimits:
    """What a first stage was told of the steps that follow by themselves behind the last one that was sent.

    It is written on the event loop and read where steps begin, on either thread: a change counts from whichever step
    begins next.
    """

    def __init__(self) -> None:
        self._limit: StepLimit | None = None

    def change(self, limit: StepLimit | None) -> None:
        """Have the steps follow that the limit says; None for those that the step that was sent says."""
        self._limit = limit

    def applied(self, following: Forward) -> Forward:
        """Return a step that follows by itself and is about to begin as it is to be by now."""
        limit = self._limit
        if limit is None:
            return following
        more = max(0, limit.last_step - following.step)
        if (more, limit.propose_tokens) == (following.more, following.propose_tokens):
            return following
        return replace(following, propose_tokens=limit.propose_tokens, more=more)


def check_limit(limit: StepLimit, next_step: int) -> None:
    """Raise InvalidArgument where a limit has more than MAX_MORE steps follow. next_step: the number of the next one
    that is not answered, or a later one."""
    if limit.last_step > next_step + MAX_MORE:
        raise InvalidArgument(
            f"last_step is {limit.last_step}; it may be up to {next_step + MAX_MORE}, {MAX_MORE} behind the next step",
            field="last_step",
        )


def is_followed(more: int, length: int, token_ids: tuple[int, ...], request: OpenSession) -> bool:
    """Return whether another step follows a step by itself.

    more: how many may follow it. length: committed tokens behind it. token_ids: the tokens that it produced.
    """
    if not more or not token_ids or token_ids[-1] in request.stop_token_ids:
        return False
    return _tokens_left(length, request) > 0


def _tokens_left(length: int, request: OpenSession) -> int:
    """Return how many tokens the session has room for behind `length` committed ones and the one produced there."""
    return request.max_length - length - 1


def following_step(
    step: Forward | Commit, length: int, token_ids: tuple[int, ...], draft_tokens: tuple[int, ...], request: OpenSession
) -> Forward | None:
    """Return the step that follows this one by itself, None where none does.

    step: it, or its answer, which says how many follow and for how many draft tokens they ask as well. draft_tokens:
    what the draft proposed behind `token_ids`. The other arguments are as in `is_followed`.
    """
    if not is_followed(step.more, length, token_ids, request):
        return None
    if draft_tokens:
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


def step_behind(commit: Commit, draft_tokens: tuple[int, ...], request: OpenSession) -> Forward | None:
    """Return the step that follows by itself the one that was answered, None where none does. commit: says how many
    follow and for how many draft tokens they ask; draft_tokens: those for the step."""
    return following_step(commit, commit.length, commit.token_ids, draft_tokens, request)


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

    session: the session of the stage, whose commits say how many steps follow and for how many draft tokens they ask.
    limits: of its steps.
    """

    def __init__(self, session: StageSession, request: OpenSession, limits: StepLimits) -> None:
        self.session, self._request, self._limits = session, request, limits
        self.stages = session.stages
        self.max_tensor_bytes, self.max_feature_slices = session.max_tensor_bytes, session.max_feature_slices
        self.step_lane: StepLane | None = None
        self._answer: Commit | None = None
        """The answer to the last step while the draft tokens for the next one are still to come."""
        self._one_at_a_time = asyncio.Lock()
        # What `events` yields; an exception is raised there, None ends it.
        self._events: DirectQueue[Event | Exception | None] = DirectQueue()
        self._tasks = BackgroundTasks(self._events.put)

    async def forward(self, forward: Forward) -> None:
        """Take one step, as the port says."""
        async with self._one_at_a_time:
            self._limits.change(None)
            await self.session.forward(forward)

    async def limit_steps(self, limit: StepLimit) -> None:
        await self.session.limit_steps(limit)

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

    def answer_at_once(self, take: Callable[[Event], bool]) -> None:
        self._events.take = lambda event: event is not None and not isinstance(event, Exception) and take(event)

    async def close(self, why: str = CLOSED) -> None:
        self._tasks.cancel()
        await self.session.close(why)

    async def _listen(self) -> None:
        """Read the session's events."""
        async for event in self.session.events():
            self.take(event)
        self._events.put(None)

    def take(self, event: Event) -> None:
        """Take the session's next event, and begin the step that follows by itself, if it has not begun."""
        following = None
        if isinstance(event, Commit) and event.more:
            if event.propose_tokens:
                self._answer = event
            elif not event.followed:
                following = self._step_behind(event, ())
        elif isinstance(event, Proposal):
            answer, self._answer = self._answer, None
            if answer is not None and not event.followed:
                following = self._step_behind(answer, event.token_ids)
        # At once: nobody waits for the answer's way to the caller.
        if following is not None:
            self._tasks.begin(self._follow, following)
        self._events.put(event)

    def _step_behind(self, commit: Commit, draft_tokens: tuple[int, ...]) -> Forward | None:
        """Return the step that follows the one that was answered. It has not begun yet, on its way through step
        lanes."""
        following = step_behind(commit, draft_tokens, self._request)
        return None if following is None else self._limits.applied(following)

    async def _follow(self, forward: Forward) -> None:
        async with self._one_at_a_time:
            await self.session.forward(forward)
