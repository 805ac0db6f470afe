"""A served model without a model: answers what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.errors import FlashsplitError, NotFound
from services.messages.inference_types import (
    AnswerEvent,
    CacheSource,
    Conversation,
    Delta,
    DraftPlace,
    Finished,
    FinishReason,
    GenerateRequest,
    Model,
    PromptToken,
    ServerInfo,
    ServerLoad,
    SpeculationFigures,
    StagePlace,
    Started,
    Timings,
    Usage,
)
from services.messages.steps import TokenLogprobs

FINISHED = Finished(
    FinishReason.LENGTH,
    Usage(7, 3, 5, CacheSource.DISK),
    Timings(1.5, 2.5, 3.5, 4.5, 5.5),
    SpeculationFigures(4, 30, 20, 6.25, ("plain decode: why not",), 7, 5, {15: 1, 8: 1}, {7: 1}),
)
ANSWER: tuple[AnswerEvent, ...] = (
    Delta((), prompt=(PromptToken(2**32 - 1), PromptToken(0, TokenLogprobs(-0.5, (7, 2), (-0.25, -1.5), 2)))),
    Delta((), prompt=(PromptToken(1, TokenLogprobs(0.0)),)),
    Delta((5, 6), "ab"),
    Delta((), "c"),
    Delta((7,), "", (TokenLogprobs(-0.5, (7, 2), (-0.5, -1.25)),)),
    FINISHED,
)
MODEL = Model("demo", ("gpt-4o", "other"), 4096, 1_700_000_000)
INFO = ServerInfo(
    "0.1.0",
    MODEL,
    (StagePlace("unix:/a", "alpha", "cuda:0", 0, 6, 2**40), StagePlace("b:1", "beta", "hip:0+hip:1", 6, 12, 1)),
    DraftPlace("b:1", "beta", "hip:1", 16, 99),
    True,
    12.5,
)
LOAD = ServerLoad(1, 2, 3, 4, True)


class FakeInference:
    """Remembers what it was asked. `hold`: wait before the last event until it is set; `fault`: raised there."""

    def __init__(self, events: Sequence[AnswerEvent] = ANSWER) -> None:
        self.events, self.asked = events, list[tuple[GenerateRequest, str]]()
        self.refusal: Exception | None = None
        self.fault: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.open = self.closed = 0

    async def answer(self, request: GenerateRequest, request_id: str) -> AsyncGenerator[AnswerEvent]:
        self.asked.append((request, request_id))
        if self.refusal is not None:
            raise self.refusal
        self.open += 1
        try:
            yield Started(request_id, 7)
            for event in self.events:
                if event is self.events[-1]:
                    if self.hold is not None:
                        await self.hold.wait()
                    if self.fault is not None:
                        raise self.fault
                yield event
        finally:
            self.open -= 1
            self.closed += 1

    async def models(self) -> tuple[Model, ...]:
        return (MODEL,)

    async def info(self) -> ServerInfo:
        return INFO

    async def load(self) -> ServerLoad:
        return LOAD

    async def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool = True, model: str | None = None
    ) -> tuple[int, ...]:
        self._check(model)
        text = prompt if isinstance(prompt, str) else "".join(message.content or "" for message in prompt.messages)
        return (*([1] if add_special_tokens else []), *text.encode())

    async def detokenize(
        self, token_ids: tuple[int, ...], *, skip_special_tokens: bool = False, model: str | None = None
    ) -> str:
        self._check(model)
        return " ".join(str(token) for token in token_ids if not (skip_special_tokens and token == 1))

    def _check(self, model: str | None) -> None:
        if isinstance(self.refusal, FlashsplitError):
            raise self.refusal
        if model not in (None, "demo"):
            raise NotFound("another model", field="model")
