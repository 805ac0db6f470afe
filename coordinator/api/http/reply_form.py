"""What each API says of how it tells answers, so that whoever computes and keeps them need not know the API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from coordinator.answer import Answer, ChoicePart, Request
from coordinator.api.http.replies import SentEvent
from coordinator.engine.engine import Engine

Parts = AsyncGenerator[ChoicePart]
"""The parts of all answers of one reply as they come. It raises the error that ends them, if one does."""


async def answer_of(parts: Parts) -> tuple[Answer, float]:
    """Wait for the answer of a reply that has one. Returns it, and when it was complete in Unix seconds."""
    answer, ended_at = None, 0.0
    async for part in parts:
        if isinstance(part.content, Answer):
            answer, ended_at = part.content, part.came_at
    assert answer is not None
    return answer, ended_at


class ReplyForm(Protocol):
    """How one reply tells its answers. It is plain data, which a journal can write, and what it tells follows from the
    parts alone: the same parts are the same events."""

    @property
    def requests(self) -> Sequence[Request]:
        """The engine's requests, in the order of the choices."""

    @property
    def name(self) -> str:
        """The id by which the client knows the reply."""

    def stream(self, engine: Engine, parts: Parts) -> AsyncGenerator[SentEvent]:
        """Yield the events that tell the answers while they come."""

    async def whole(self, engine: Engine, parts: Parts) -> dict[str, Any]:
        """Return the object that tells the answers once they are complete."""
