"""Who answers: a server over HTTP, or workers that this process has started. The terminal cannot tell them apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.answer import Answer
from coordinator.api.http.chat_exchange import Talk, ToolUse, exchange_requests, prepare_exchange
from coordinator.api.http.choices import answer_all
from coordinator.api.http.schemas import ChatRequest
from coordinator.api.http.usage import timings_of
from coordinator.cli.http_client import RemoteServer
from coordinator.engine.engine import Engine
from coordinator.text.parsers.events import ContentDelta, Event, ReasoningDelta
from services.messages.sampling import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How to answer. What sampling and max_tokens don't say is left to who answers. speculate: a draft may be used."""

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    speculate: bool = True

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the request body for `/v1/chat/completions`."""
        fields: dict[str, Any] = self.sampling.numbers()
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        # Only where it is asked for: other servers may not know the field.
        if not self.speculate:
            fields["speculate"] = False
        return {"messages": list(messages), **fields}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer's text; reasoning is what the model thinks before it answers."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer. timings: as a reply of `/v1/chat/completions` has them, as far as they are known."""

    finish_reason: str
    timings: dict[str, Any] = field(default_factory=dict)


class Speaker(Protocol):
    """A model to talk to. name: the model's; place: where it runs, for people."""

    name: str
    place: str

    def answer(self, messages: Sequence[Message], settings: AnswerSettings) -> AsyncGenerator[AnswerPart | AnswerEnd]:
        """Yield the parts of an answer and at last its end. Closing the generator stops the answer.

        Raises FlashsplitError.
        """

    @property
    def lost(self) -> bool:
        """Whether there is nobody left to ask."""


class RemoteSpeaker:
    """A model behind a running server, reached over HTTP."""

    lost = False
    """A server that is gone may come back."""

    def __init__(self, server: RemoteServer, model: str) -> None:
        self._server, self.name, self.place = server, model, server.url

    async def answer(
        self, messages: Sequence[Message], settings: AnswerSettings
    ) -> AsyncGenerator[AnswerPart | AnswerEnd]:
        body = {
            "model": self.name,
            **settings.body(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, reason, timings, tokens = time.monotonic(), 0.0, "", None, 0
        async with contextlib.aclosing(self._server.chat(body)) as chunks:
            async for chunk in chunks:
                timings = chunk.get("timings") or timings
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    part = AnswerPart(delta.get("content") or "", delta.get("reasoning_content") or "")
                    reason = choice.get("finish_reason") or reason
                    if part != AnswerPart():
                        first = first or time.monotonic()
                        yield part
        yield AnswerEnd(reason, timings or _measured_timings(tokens, started, first, time.monotonic()))


class LocalSpeaker:
    """A model behind an engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.name = engine, engine.name
        self.place = ", ".join(
            f"layers {worker.target.layers} on {worker.device}" for worker in engine.cluster.workers if worker.target
        )

    @property
    def lost(self) -> bool:
        """Whether the engine has lost its workers."""
        return not self._engine.ready

    async def answer(
        self, messages: Sequence[Message], settings: AnswerSettings
    ) -> AsyncGenerator[AnswerPart | AnswerEnd]:
        body = ChatRequest.model_validate(settings.body(messages))
        exchange = await prepare_exchange(
            self._engine, body, Talk(body.messages, ToolUse([])), max_tokens=body.max_tokens
        )
        parser = exchange.parser()
        async with contextlib.aclosing(answer_all(self._engine, exchange_requests(exchange))) as events:
            async for event in events:
                if not isinstance(event.content, Answer):
                    for part in _parts(parser.push(event.content.text)):
                        yield part
                    continue
                for part in _parts(parser.finish(cut=event.content.cut)):
                    yield part
                yield AnswerEnd(event.content.finish_reason, timings_of(event.content))


def _parts(events: Iterable[Event]) -> Iterable[AnswerPart]:
    """Yield the text and the reasoning of what a parser has seen."""
    for event in events:
        match event:
            case ContentDelta():
                yield AnswerPart(event.text)
            case ReasoningDelta():
                yield AnswerPart(reasoning=event.text)


def _measured_timings(tokens: int, started: float, first: float, end: float) -> dict[str, Any]:
    """Return what other servers than flashsplit's don't tell, as far as it can be seen from here.

    started, first and end are readings of the monotonic clock in seconds: of the request, its first and its last token.
    """
    if not tokens or not first:
        return {}
    rate = (tokens - 1) / (end - first) if end > first and tokens > 1 else None
    return {"predicted_n": tokens, "predicted_per_second": rate, "prompt_ms": (first - started) * 1e3}
