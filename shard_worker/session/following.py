"""Steps that follow each other without the coordinator: where it asked for more, the first stage goes on by itself.

What lies between a step's answer and the next step is then the way up the chain alone. Knows steps and their answers,
not what computes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace

from services.errors import CLOSED, InvalidArgument
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    Forward,
    OpenSession,
    Proposal,
    SnapshotRestore,
    SnapshotSave,
    StepKind,
)
from services.rpc.stage import StageSession
from services.streams.step_lane import StepLane
from shard_worker.session.follower import follower, is_followed

MAX_MORE = 64
"""Steps that may follow one frame."""


class FollowingSession:
    """A `StageSession` around that of a first stage."""

    def __init__(self, session: StageSession, request: OpenSession) -> None:
        self._session, self._request = session, request
        self.stages = session.stages
        self.max_tensor_bytes, self.max_feature_slices = session.max_tensor_bytes, session.max_feature_slices
        self.step_lane: StepLane | None = None
        # The step that runs, and its answer while its guesses are still to come.
        self._step: Forward | None = None
        self._answered: Commit | None = None
        self._one_at_a_time = asyncio.Lock()
        self._told: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def forward(self, forward: Forward) -> None:
        """As the port says; InvalidArgument for more followers than MAX_MORE, or behind a step without a token."""
        if forward.more > MAX_MORE or (forward.more and forward.kind is StepKind.PREFILL):
            raise InvalidArgument(
                f"more is {forward.more} behind a {forward.kind}; up to {MAX_MORE} steps may follow one that produces "
                "a token",
                field="more",
            )
        async with self._one_at_a_time:
            if forward.more:
                self._step = forward
            await self._session.forward(forward)

    async def save_snapshot(self, save: SnapshotSave) -> None:
        async with self._one_at_a_time:
            await self._session.save_snapshot(save)

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        await self._session.restore_snapshot(restore)

    async def events(self) -> AsyncIterator[Event]:
        self._begin(self._listen())
        while (told := await self._told.get()) is not None:
            if isinstance(told, Exception):
                raise told
            yield told

    async def close(self, why: str = CLOSED) -> None:
        for task in self._tasks:
            task.cancel()
        await self._session.close(why)

    async def _listen(self) -> None:
        async for event in self._session.events():
            following = None
            if isinstance(event, Commit):
                event, following = self._after_commit(event)
            elif isinstance(event, Proposal):
                following = self._next(event.token_ids, followed=event.followed)
            elif isinstance(event, Failure) and self._answered is not None:
                # The guesses that the next step waits for will not come.
                self._step = self._answered = None
            # At once: nobody waits for the answer's way to the caller.
            if following is not None:
                self._begin(self._follow(following))
            self._told.put_nowait(event)
        self._told.put_nowait(None)

    def _after_commit(self, commit: Commit) -> tuple[Commit, Forward | None]:
        step = self._step
        if step is None or commit.step != step.step:
            return commit, None
        if not is_followed(step, commit.length, commit.token_ids, self._request):
            self._step = None
            return commit, None
        self._answered = replace(commit, more=step.more)
        return self._answered, None if step.propose_tokens else self._next((), followed=commit.followed)

    def _next(self, draft_tokens: tuple[int, ...], *, followed: bool) -> Forward | None:
        """The step behind the one that was answered, if one is to be begun; followed: it has begun."""
        step, commit = self._step, self._answered
        self._answered = None
        if step is None or commit is None:
            return None
        following = follower(step, commit.length, commit.token_ids, draft_tokens, self._request)
        self._step = following if following is not None and following.more else None
        return None if followed else following

    async def _follow(self, forward: Forward) -> None:
        async with self._one_at_a_time:
            await self._session.forward(forward)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        """What goes wrong ends the events, for whoever reads them."""
        try:
            await work
        except Exception as error:
            self._told.put_nowait(error)
