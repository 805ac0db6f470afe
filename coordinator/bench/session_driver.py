"""One session driven step by step. It keeps the session's position and knows nothing of time."""

from __future__ import annotations

from coordinator.engine.chain_attempt import CHUNKS_IN_FLIGHT
from services.errors import InternalError
from services.messages.steps import Commit, Event, Failure, Forward, Proposal, StepKind
from services.rpc.stage import StageSession

CHUNK = 4096
"""Most tokens of a prefill at once."""


class SessionDriver:
    """Drives one session, step by step. Raises InternalError where the session fails or answers something else."""

    def __init__(self, session: StageSession) -> None:
        self._session, self._events = session, session.events()
        self._step = self._length = 0

    async def prefill(self, tokens: tuple[int, ...], chunk: int = CHUNK) -> None:
        """Prefill tokens in chunks, several of which are under way at once, as those of an answer."""
        base, unanswered = self._length, 0
        for first in range(0, len(tokens), chunk):
            piece = tokens[first : first + chunk]
            await self._session.forward(Forward(self._step + unanswered, base + first, piece, StepKind.PREFILL))
            unanswered += 1
            if unanswered > CHUNKS_IN_FLIGHT:
                await self.commit()
                unanswered -= 1
        for _ in range(unanswered):
            await self.commit()

    async def step(self, kind: StepKind, tokens: tuple[int, ...]) -> Commit:
        """Run one step, and return what it commits."""
        await self.send(kind, tokens)
        return await self.commit()

    async def send(self, kind: StepKind, tokens: tuple[int, ...], propose: int = 0, more: int = 0) -> None:
        """Send a step. propose: draft tokens to propose after it; more: steps that follow it by themselves."""
        await self._session.forward(Forward(self._step, self._length, tokens, kind, propose, more=more))

    async def commit(self) -> Commit:
        """Return what the next step commits: the one that was sent, or one that follows by itself."""
        commit = await self._next()
        if not isinstance(commit, Commit):
            raise InternalError(f"a step was answered by {type(commit).__name__}")
        self._step, self._length = commit.step + 1, commit.length
        return commit

    async def proposal(self) -> Proposal:
        """Return the draft tokens that are proposed after a step."""
        proposal = await self._next()
        if not isinstance(proposal, Proposal):
            raise InternalError(f"{type(proposal).__name__} came where draft tokens were due")
        return proposal

    async def _next(self) -> Event:
        """Return the next event of the session."""
        event = await anext(self._events)
        if isinstance(event, Failure):
            raise InternalError(event.message)
        return event
