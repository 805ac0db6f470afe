"""The clients' service over real sockets on a fake model: frames, names, errors, all ways to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from flashsplit.inference.v1 import generation_pb2, inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from services.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from services.messages.inference_types import (
    AnswerEvent,
    Conversation,
    Delta,
    GenerateRequest,
    Message,
    Started,
    Stopping,
)
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, GrammarKind
from services.rpc.inference import SERVICE, InferenceServicer, RemoteInference
from tests.services.conftest import Dial, Serve
from tests.services.fake_inference import ANSWER, FINISHED, INFO, LOAD, MODEL, FakeInference
from tests.services.fakes import until
from tests.services.fuzz.fuzzing import ALLOWED, status_of
from tests.services.fuzz.random_messages import RandomStreams

TALK = Conversation(
    (
        Message("system", "Be brief."),
        Message("assistant", None, "bot", '[{"function": {"name": "f"}}]'),
        Message("tool", "", tool_call_id="c1"),
    ),
    tools="[]",
    variables={"enable_thinking": False, "budget": 100, "share": 0.5, "none": None, "deep": {"list": [1, "x", {}]}},
)
FULL = SamplingParams({3: -1.5, 2**32 - 1: 0.0}, 1.1, -0.5, 2.0, 0.0, 0, 0.9, 0.0, 2**64 - 1)


@pytest.fixture
def port() -> FakeInference:
    return FakeInference()


@pytest.fixture
def servicer(port: FakeInference) -> InferenceServicer:
    return InferenceServicer(port)


@pytest.fixture
async def channel(servicer: InferenceServicer, serve: Serve, dial: Dial) -> grpc.aio.Channel:
    return await dial((await serve(servicer.register)).address)


@pytest.fixture
def remote(channel: grpc.aio.Channel) -> RemoteInference:
    return RemoteInference(channel, "here")


async def all_of(events: AsyncIterator[AnswerEvent]) -> list[AnswerEvent]:
    return [event async for event in events]


# --- frames


@pytest.mark.parametrize(
    "ask",
    [
        GenerateRequest(""),
        GenerateRequest("Ünïcode\n", FULL, Stopping(0, ("a", ""), (0, 7), True), speculate=False, model="m"),
        GenerateRequest((0, 5, 2**32 - 1), SamplingParams(temperature=0.7, seed=0)),
        GenerateRequest(()),
        GenerateRequest(TALK, FULL, Stopping(2**32 - 1), logprobs=0, grammar=Grammar(GrammarKind.JSON_OBJECT)),
        GenerateRequest("x", logprobs=20, grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        GenerateRequest("x", prompt_logprobs=0),
        GenerateRequest(TALK, prompt_logprobs=20),
        GenerateRequest(replace(TALK, continue_final_message=True)),
    ],
)
async def test_what_is_asked_arrives(ask: GenerateRequest, port: FakeInference, remote: RemoteInference) -> None:
    """Text, ids and chats with everything around them reach the port as they were, also what is absent or zero."""
    assert await all_of(remote.answer(ask, "mine")) == [Started("mine", 7), *ANSWER]
    assert port.asked == [(ask, "mine")]
    if isinstance(ask.prompt, Conversation):
        found = port.asked[0][0].prompt
        assert isinstance(found, Conversation)
        # A whole number stays one.
        assert repr(found.variables["budget"]) == "100"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (GenerateRequest((5,) * ((1 << 20) + 1)), "1048577 tokens; at most 1048576"),
        (GenerateRequest(Conversation((Message("", ""),) * 20_000)), "20000 messages; give 1 to 16384"),
        (GenerateRequest(Conversation((Message("", ""),), variables={"x": "x" * 70_000})), "chat_template_kwargs has"),
    ],
)
async def test_requests_beyond_all_bounds(
    ask: GenerateRequest, says: str, port: FakeInference, remote: RemoteInference
) -> None:
    """What would take long to convert is refused before it is."""
    with pytest.raises(InvalidArgument, match=says):
        await all_of(remote.answer(ask))
    with pytest.raises(InvalidArgument, match="at most 1048576"):
        await remote.detokenize((5,) * ((1 << 20) + 1))
    assert not port.asked


async def test_who_names_nothing_gets_a_name(port: FakeInference, remote: RemoteInference) -> None:
    """Each request without a name gets its own, told first."""
    names = set()
    for _ in range(3):
        started, *_ = await all_of(remote.answer(GenerateRequest("x")))
        assert isinstance(started, Started)
        names.add(started.request_id)
    assert len(names) == 3
    assert {name for _, name in port.asked} == names


async def test_the_server_tells_of_itself(remote: RemoteInference) -> None:
    """Models, placement and load arrive as they are."""
    assert await remote.models() == (MODEL,)
    assert await remote.info() == INFO
    assert await remote.load() == LOAD


async def test_tokens_and_text(remote: RemoteInference) -> None:
    """Texts and chats become tokens and tokens text; a model that is not served is refused."""
    assert await remote.tokenize("ab") == (1, 97, 98)
    assert await remote.tokenize("ab", add_special_tokens=False, model="demo") == (97, 98)
    assert await remote.tokenize(Conversation((Message("user", "a"),))) == (1, 97)
    assert await remote.detokenize((1, 97)) == "1 97"
    assert await remote.detokenize((1, 97), skip_special_tokens=True) == "97"
    for call in (remote.tokenize("x", model="no"), remote.detokenize((1,), model="no")):
        with pytest.raises(NotFound, match="another model"):
            await call


# --- refusals


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Generate", pb.GenerateRequest(), "prompt"),
        ("Chat", pb.ChatRequest(), "conversation.messages"),
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(conversation=generation_pb2.Conversation()), "conversation.messages"),
    ],
)
async def test_what_is_missing_is_named(method: str, request_: Any, field: str, channel: grpc.aio.Channel) -> None:
    """A call without a prompt or messages is refused by field."""
    call = getattr(pb_grpc.InferenceServiceStub(channel), method)(request_)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call if method == "Tokenize" else call.read())
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(raised.value).metadata["field"] == field


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_switches_are_json(value: float, channel: grpc.aio.Channel) -> None:
    """Numbers that JSON lacks and bottomless nesting are refused."""
    deep = struct_pb2.Value(number_value=1)
    for _ in range(40):
        deep = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[deep]))
    for switch in (struct_pb2.Value(number_value=value), deep):
        request = pb.ChatRequest()
        request.conversation.messages.add(role="user", content="x")
        request.conversation.chat_template_kwargs.fields["a"].CopyFrom(switch)
        with pytest.raises(grpc.aio.AioRpcError, match=r"chat_template_kwargs\.a") as raised:
            await pb_grpc.InferenceServiceStub(channel).Chat(request).read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_bad_names_are_refused(port: FakeInference, channel: grpc.aio.Channel) -> None:
    """A name that cannot stand in a log line, and two of them."""
    stub = pb_grpc.InferenceServiceStub(channel)
    header = "x-request-id"
    for names in ([""], ["a b"], ["x" * 129], ["a", "b"]):
        call = stub.Generate(pb.GenerateRequest(text="x"), metadata=[(header, name) for name in names])
        with pytest.raises(grpc.aio.AioRpcError, match="1 to 128") as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info_of(raised.value).metadata["field"] == header
    assert port.asked == []


def info_of(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return info


async def test_errors_before_and_after_the_first_word(port: FakeInference, remote: RemoteInference) -> None:
    """What the port raises is the stream's status, with its reason and the request's name; deltas before it arrive."""
    port.refusal = InvalidArgument("temperature is -1", reason="BAD", field="temperature")
    with pytest.raises(InvalidArgument, match="temperature is -1") as raised:
        await all_of(remote.answer(GenerateRequest("x"), "r1"))
    assert raised.value.reason == "BAD"
    assert raised.value.where == {"field": "temperature", "request_id": "r1", "address": "here"}

    port.refusal, port.fault = None, Unavailable("stage 1 is gone", reason="WORKER_DIED", stage=1)
    events = remote.answer(GenerateRequest("x"), "r1")
    assert [await anext(events) for _ in ANSWER] == [Started("r1", 7), *ANSWER[:-1]]
    with pytest.raises(Unavailable, match="stage 1 is gone") as late:
        await anext(events)
    assert (late.value.reason, late.value.where["request_id"], late.value.where["stage"]) == ("WORKER_DIED", "r1", "1")

    port.fault = ValueError("the secret of the house")
    with pytest.raises(InternalError) as internal:
        await all_of(remote.answer(GenerateRequest("x")))
    assert "secret" not in internal.value.message
    assert (port.open, port.closed) == (0, 2)


async def test_a_full_queue_says_when_to_come_again(port: FakeInference, channel: grpc.aio.Channel) -> None:
    """The status carries how long a client should wait."""
    port.refusal = ResourceExhausted("too many wait", reason="QUEUE_FULL", retry_after_s=1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pb_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x")).read()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status, retry = rpc_status.from_call(raised.value), error_details_pb2.RetryInfo()
    assert status is not None
    assert info_of(raised.value).reason == "QUEUE_FULL"
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.seconds == 1


# --- ends


@contextlib.asynccontextmanager
async def held(port: FakeInference, remote: RemoteInference, name: str) -> AsyncIterator[asyncio.Task[list[Any]]]:
    """An answer that waits in the middle."""
    port.hold = asyncio.Event()
    task = asyncio.ensure_future(all_of(remote.answer(GenerateRequest("x"), name)))
    await until(lambda: port.open > 0)
    yield task
    await asyncio.wait([task])


async def test_abort_ends_an_answer(port: FakeInference, remote: RemoteInference) -> None:
    """The aborted stream gets CANCELLED, nothing is left of it when Abort answers, and its name is free again."""
    async with held(port, remote, "a") as task:
        await remote.abort("a")
        assert (port.open, port.closed) == (0, 1)
        with pytest.raises(Cancelled) as raised:
            await task
        assert raised.value.reason == "REQUEST_ABORTED"
        assert raised.value.where["request_id"] == "a"
    with pytest.raises(NotFound, match="no request 'a'") as unknown:
        await remote.abort("a")
    assert unknown.value.reason == "REQUEST_NOT_FOUND"
    port.hold = None
    assert len(await all_of(remote.answer(GenerateRequest("x"), "a"))) == 1 + len(ANSWER)


async def test_abort_reaches_an_answer_that_nobody_reads(port: FakeInference, channel: grpc.aio.Channel) -> None:
    """Also where the server waits for a client that takes nothing."""
    port.events = [Delta((), "x" * 100_000) for _ in range(1000)]
    call = pb_grpc.InferenceServiceStub(channel).Generate(
        pb.GenerateRequest(text="x"), metadata=[("x-request-id", "slow")]
    )
    await call.read()
    await asyncio.sleep(0.2)
    assert port.open == 1
    await RemoteInference(channel, "here").abort("slow")
    assert (port.open, port.closed) == (0, 1)
    call.cancel()


async def test_two_of_one_name(port: FakeInference, remote: RemoteInference) -> None:
    """The second is refused while the first runs, which does not notice."""
    async with held(port, remote, "a") as task:
        with pytest.raises(AlreadyExists, match="runs already") as raised:
            await all_of(remote.answer(GenerateRequest("x"), "a"))
        assert raised.value.where["field"] == "x-request-id"
        assert port.hold is not None
        port.hold.set()
        assert (await task)[-1] == FINISHED


async def test_a_deadline_ends_an_answer(port: FakeInference, remote: RemoteInference) -> None:
    """When the time that the client gave is over, the work ends."""
    port.hold = asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await all_of(remote.answer(GenerateRequest("x"), timeout_s=0.2))
    await until(lambda: port.closed == 1)
    assert port.open == 0


async def test_who_goes_away_ends_an_answer(port: FakeInference, remote: RemoteInference) -> None:
    """A cancelled call ends the work, and its id is free."""
    async with held(port, remote, "a") as task:
        task.cancel()
        await until(lambda: port.closed == 1)
    with pytest.raises(NotFound):
        await remote.abort("a")


async def test_a_stopping_server_tells_its_answers(
    port: FakeInference, remote: RemoteInference, servicer: InferenceServicer
) -> None:
    """Answers that run fail with the reason that the server is shutting down."""
    async with held(port, remote, "a") as task:
        await servicer.end_all()
        with pytest.raises(Unavailable, match="shutting down") as raised:
            await task
        assert raised.value.reason == "DRAINING"
    await servicer.end_all()


# --- senseless requests


@pytest.mark.parametrize(
    ("method", "valid"),
    [
        ("Generate", pb.GenerateRequest(text="x", sampling={"temperature": 0.5, "logit_bias": {1: 2.0}})),
        ("Chat", pb.ChatRequest(conversation={"messages": [{"role": "user", "content": "x"}]})),
        ("Tokenize", pb.TokenizeRequest(text="x")),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1])),
        ("Abort", pb.AbortRequest(request_id="x")),
        ("ListModels", pb.ListModelsRequest()),
    ],
)
async def test_senseless_requests(method: str, valid: Any, port: FakeInference, channel: grpc.aio.Channel) -> None:
    """Whatever comes, the answer blames the caller, and nothing stays open."""
    streams = RandomStreams(method, type(valid), {"model": ["demo"]})
    seen: Counter[str] = Counter()
    for _ in range(100):
        for raw in streams.one([valid])[:1] if valid.ListFields() else [b"\xff", b""]:
            status = await status_of(channel, f"/{SERVICE}/{method}", [raw])
            assert status in ALLOWED, (status, raw[:200])
            seen[status] += 1
    assert seen["INVALID_ARGUMENT"] > 1, seen
    assert method == "Abort" or seen["OK"] > 1, seen
    assert port.open == 0
    remote = RemoteInference(channel, "here")
    assert len(await all_of(remote.answer(replace(GenerateRequest("x"), model=None)))) == 1 + len(ANSWER)
