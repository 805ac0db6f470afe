"""Who answers: a server over HTTP, or workers that this process has started. The terminal cannot tell them apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.answer import Answer
from coordinator.api.http.chat_exchange import ToolUse, answer_exchange, prepare_exchange
from coordinator.api.http.schemas import ChatRequest
from coordinator.api.http.usage import timings_of
from coordinator.cli.http_client import Server
from coordinator.engine.engine import Engine
from coordinator.text.parsers.events import ContentDelta, Event, ReasoningDelta
from services.messages.sampling import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How to answer. What sampling and max_tokens don't say is left to who answers. speculate: a draft may be used."""

    sampling: SamplingParams = SamplingParams(temperature=0.0)
    max_tokens: int | None = None
    speculate: bool = True

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the body for /v1/chat/completions."""
        given: dict[str, Any] = self.sampling.numbers()
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        # Only where it is wished for: servers of others may not know it.
        if not self.speculate:
            given["speculate"] = False
        return {"messages": list(messages), **given}


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer; reasoning is what the model thinks before it speaks."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is whole. timings: as a reply of /v1/chat/completions has them, as far as they are known."""

    finish_reason: str
    timings: dict[str, Any] = field(default_factory=dict)


class Speaker(Protocol):
    """A model to exchange to."""

    name: str
    place: str

    def answer(self, messages: Sequence[Message], options: AnswerOptions) -> AsyncGenerator[Said | Ended]:
        """Pieces and at last the end. Closing it stops the answer. Raises FlashsplitError."""

    @property
    def lost(self) -> bool:
        """Whether no further question makes sense."""


class RemoteSpeaker:
    """A running server."""

    lost = False
    """One that is gone may come back."""

    def __init__(self, server: Server, model: str) -> None:
        self._server, self.name, self.place = server, model, server.url

    async def answer(self, messages: Sequence[Message], options: AnswerOptions) -> AsyncGenerator[Said | Ended]:
        body = {
            "model": self.name,
            **options.body(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, reason, timings, tokens = time.monotonic(), 0.0, "", None, 0
        async with contextlib.aclosing(self._server.chat(body)) as chunks:
            async for chunk in chunks:
                timings = chunk.get("timings") or timings
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    said = Said(delta.get("content") or "", delta.get("reasoning_content") or "")
                    reason = choice.get("finish_reason") or reason
                    if said != Said():
                        first = first or time.monotonic()
                        yield said
        yield Ended(reason, timings or _measured(tokens, began, first, time.monotonic()))


class LocalSpeaker:
    """An engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.name = engine, engine.name
        self.place = ", ".join(
            f"layers {worker.target.layers} on {worker.device}" for worker in engine.cluster.workers if worker.target
        )

    @property
    def lost(self) -> bool:
        """Without its workers there is nothing left."""
        return not self._engine.ready

    async def answer(self, messages: Sequence[Message], options: AnswerOptions) -> AsyncGenerator[Said | Ended]:
        body = ChatRequest.model_validate(options.body(messages))
        exchange = await prepare_exchange(self._engine, body, body.messages, ToolUse([]), max_tokens=body.max_tokens)
        parser = exchange.parser()
        async with contextlib.aclosing(answer_exchange(self._engine, exchange)) as events:
            async for part in events:
                if not isinstance(part.content, Answer):
                    for said in _said(parser.push(part.content.text)):
                        yield said
                    continue
                for said in _said(parser.finish()):
                    yield said
                yield Ended(part.content.finish_reason, timings_of(part.content))


def _said(events: Iterable[Event]) -> Iterable[Said]:
    for event in events:
        match event:
            case ContentDelta():
                yield Said(event.text)
            case ReasoningDelta():
                yield Said(reasoning=event.text)


def _measured(tokens: int, began: float, first: float, end: float) -> dict[str, Any]:
    """What a server of somebody else's doesn't tell, as far as it can be seen from here."""
    if not tokens or not first:
        return {}
    rate = (tokens - 1) / (end - first) if end > first and tokens > 1 else None
    return {"predicted_n": tokens, "predicted_per_second": rate, "prompt_ms": (first - began) * 1e3}
