"""The engine as the gRPC service sees it: events for requests, refusals by field, and what a server says of itself."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from coordinator.api.grpc.inference_port import EnginePort
from coordinator.engine.engine import Engine
from services.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from services.messages.inference_types import (
    AnswerEvent,
    CompressionMode,
    CompressionParams,
    Conversation,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    Started,
    Stopping,
)
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, GrammarKind
from tests.coordinator.fakes import END, Script, engine, says
from tests.services.fakes import until

HI = Conversation((Message("user", "hi"),))


async def events(served: Engine, asked: GenerateRequest) -> list[AnswerEvent]:
    return [event async for event in EnginePort(served).answer(asked, "mine")]


def text(events: list[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def test_an_answer_s_events() -> None:
    """It starts under its id, comes in pieces, and ends with reason and figures."""
    first, *deltas, last = await events(engine(), GenerateRequest("hi"))
    assert first == Started("mine", 2)
    assert text(deltas) == "hello"
    assert tuple(token for delta in deltas for token in delta.token_ids) == says("hello")
    assert isinstance(last, Finished)
    assert last.finish_reason is FinishReason.STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 6, 0)
    assert (last.usage.cache_source, last.usage.original_prompt_tokens) == (None, None)
    assert last.timings.decode_ms > 0


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", (97, 98)),
        ((5, 6), (5, 6)),
        (HI, (257, *b"user\nhi", END, 10, 257, *b"assistant\n")),
    ],
)
async def test_prompts_of_every_kind(prompt: Any, tokens: tuple[int, ...]) -> None:
    """Text, ids and chats reach the chain as tokens."""
    served: Any = engine()
    await events(served, GenerateRequest(prompt))
    assert served.cluster.session.forwards[0].token_ids == tokens


async def test_what_is_asked_for_reaches_the_chain() -> None:
    """Sampling, limits, stop tokens, speculation, log-probabilities and grammar."""
    served: Any = engine(block_size=4)
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    asked = GenerateRequest(
        "hi",
        SamplingParams(temperature=0.5, seed=3, logit_bias={5: 1.0}),
        Stopping(4, (), (7,)),
        speculate=False,
        logprobs=1,
        grammar=grammar,
    )
    received = await events(served, asked)
    opening = served.cluster.session.opening
    assert opening["sampling"] == SamplingParams({5: 1.0}, temperature=0.5, seed=3)
    assert (opening["max_length"], opening["stop_token_ids"], opening["grammar"]) == (6, {7, END}, grammar)
    assert not opening["speculate"]
    assert all(len(event.logprobs) == len(event.token_ids) for event in received if isinstance(event, Delta))
    assert isinstance(received[-1], Finished)
    assert received[-1].finish_reason is FinishReason.LENGTH


async def test_a_prompt_is_scored() -> None:
    """Its tokens come before the answer's, which may have none; not of a prompt that is to be compressed."""
    for prompt in ("hi", HI):
        received = await events(engine(), GenerateRequest(prompt, stopping=Stopping(0), prompt_logprobs=2))
        tokens = [token for event in received if isinstance(event, Delta) for token in event.prompt]
        assert isinstance(received[0], Started)
        assert len(tokens) == received[0].prompt_tokens
        assert [token.logprobs is None for token in tokens] == [True] + [False] * (len(tokens) - 1)
        assert isinstance(received[-1], Finished)
        assert received[-1].usage.completion_tokens == 0
    always = CompressionParams(CompressionMode.ALWAYS)
    with pytest.raises(InvalidArgument, match="prefill_compression is always, and log-probabilities of the prompt"):
        await events(engine(), GenerateRequest("hi", prompt_logprobs=0, compression=always))


async def test_speculation_s_figures() -> None:
    """What the draft did stands in the last event."""
    received = await events(engine(Script(says("abcdefghijkl")), block_size=4), GenerateRequest("hi"))
    assert isinstance(received[-1], Finished)
    figures = received[-1].speculation
    assert figures.draft_tokens >= figures.accepted_tokens > 0
    assert figures.acceptance_length is not None


async def test_closing_the_events_ends_the_work() -> None:
    """The session is closed and the turn free, as when a client cancels its call."""
    served: Any = engine(Script(says("x" * 50)))
    async with contextlib.aclosing(EnginePort(served).answer(GenerateRequest("hi"), "mine")) as stream:
        assert isinstance(await anext(stream), Started)
        assert isinstance(await anext(stream), Delta)
        assert served.load.running == 1
    assert served.load.running == 0
    assert served.cluster.session.closed


@pytest.mark.parametrize(
    ("asked", "error", "field"),
    [
        (GenerateRequest("hi", model="gpt-9"), NotFound, "model"),
        (GenerateRequest(""), InvalidArgument, "prompt"),
        (GenerateRequest((999,)), InvalidArgument, "prompt"),
        (GenerateRequest("hi", SamplingParams(top_p=1.5)), InvalidArgument, "top_p"),
        (GenerateRequest("hi", stopping=Stopping(9999)), InvalidArgument, "max_tokens"),
        (GenerateRequest("x" * 4096), InvalidArgument, "prompt"),
        (GenerateRequest(Conversation((Message("user", "x" * 4096),))), InvalidArgument, "conversation"),
        (GenerateRequest(Conversation(HI.messages, tools="{}")), InvalidArgument, "conversation.tools"),
    ],
)
async def test_refusals_name_the_field(asked: GenerateRequest, error: type[Exception], field: str) -> None:
    """Nothing was started for them."""
    served: Any = engine()
    with pytest.raises(error) as refused:
        await events(served, asked)
    assert refused.value.where["field"] == field  # type: ignore[attr-defined]
    assert not served.cluster.sessions


async def test_a_full_queue_and_a_server_that_drains() -> None:
    """Both are refused before an answer starts."""
    release = asyncio.Event()
    served = engine(Script(hold=release), max_running=1, max_waiting=0)
    first = asyncio.ensure_future(events(served, GenerateRequest("hi")))
    await until(lambda: served.load.running == 1)
    with pytest.raises(ResourceExhausted):
        await events(served, GenerateRequest("hi"))
    await served.drain(0)
    with pytest.raises(Unavailable, match="shutting down"):
        await events(served, GenerateRequest("hi"))
    load = await EnginePort(served).load()
    assert (load.running, load.waiting, load.max_running, load.draining) == (1, 0, 1, True)
    release.set()
    assert text(await first) == "hello"


async def test_tokens_and_text() -> None:
    """Texts and chats become tokens and tokens text; another model's name is refused."""
    port = EnginePort(engine())
    assert await port.tokenize("a") == (97,)
    assert await port.tokenize(HI) == (257, *b"user\nhi", END, 10, 257, *b"assistant\n")
    assert await port.detokenize((97, END)) == "a<|im_end|>"
    assert await port.detokenize((97, END), skip_special_tokens=True) == "a"
    with pytest.raises(NotFound):
        await port.tokenize("a", model="gpt-9")


async def test_what_a_server_says_of_itself() -> None:
    """Model, stages and draft as the workers describe them."""
    served: Any = engine(aliases=("other",), max_model_len=100, block_size=4)
    [model] = await EnginePort(served).models()
    assert (model.name, model.aliases, model.context_length) == ("demo", ("other",), 100)
    info = await EnginePort(served).info()
    [stage] = info.stages
    assert (stage.address, stage.first_layer, stage.last_layer) == ("alpha:7001", 0, 12)
    assert info.draft is not None
    assert (info.draft.block_size, info.ready) == (4, True)
    served.cluster.alive = False
    assert not (await EnginePort(served).info()).ready
