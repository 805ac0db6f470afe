"""The gRPC API of `flashsplit serve` over the demo pair on two workers: the same tokens as every other way in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from flashsplit.inference.v1 import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from services.errors import Cancelled, DeadlineExceeded, FlashsplitError, InvalidArgument, NotFound
from services.messages.inference_types import Conversation, Delta, Finished, GenerateRequest, Message, Started, Stopping
from services.messages.sampling import SamplingParams
from services.messages.steps import Grammar, GrammarKind
from services.net.channel import connect
from services.rpc.inference import SERVICE, RemoteInference
from tests.e2e.conftest import generate
from tests.e2e.server import DEMO, PAIR, Server, serving
from tests.services.fuzz.fuzzing import ALLOWED
from tests.services.fuzz.random_messages import RandomMessages

KEY = "the-key-of-this-test"
TALK = Conversation((Message("user", "Calculate 4729 + 3485."),))
TEXT = "def mean(values):\n"
WARM = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
LONG = GenerateRequest("x", SamplingParams(temperature=0), Stopping(2000, ignore_eos=True), speculate=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--target-devices", "cpu,cpu", "--served-model-name", "demo", "--api-key", KEY)
    with serving(tmp_path_factory.mktemp("grpc"), *PAIR, *arguments, "--max-concurrent-requests", 2) as running:
        yield running


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    channel = await connect(server.grpc, timeout_s=5)
    yield channel
    await channel.close()


@pytest.fixture
def client(channel: grpc.aio.Channel) -> RemoteInference:
    return RemoteInference(channel, "the server", api_key=KEY)


async def whole(
    client: RemoteInference, ask: GenerateRequest, **more: Any
) -> tuple[Started, tuple[int, ...], str, Finished]:
    """An answer in one piece."""
    events = [event async for event in client.answer(ask, **more)]
    started, *deltas, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    tokens, text = [], []
    for delta in deltas:
        assert isinstance(delta, Delta)
        tokens += delta.token_ids
        text.append(delta.text)
    return started, tuple(tokens), "".join(text), finished


def over_http(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"content-type": "application/json", "x-api-key": KEY}
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, json.dumps(body).encode(), headers), timeout=30
    ) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


async def idle(client: RemoteInference, seconds: float = 5) -> None:
    """Wait until nothing runs."""
    async with asyncio.timeout(seconds):
        while (load := await client.load()).running + load.waiting:
            await asyncio.sleep(0.02)


# --- the same tokens


async def test_chat_is_the_command_line_and_http(server: Server, client: RemoteInference) -> None:
    """A chat gives the tokens of `generate --chat` and HTTP's text, with the figures of both."""
    said = await asyncio.to_thread(
        generate, *PAIR, "--target-devices", "cpu", "--threads", "1", "--chat", "--prompt", TALK.messages[0].content
    )
    ask = GenerateRequest(TALK, SamplingParams(temperature=0))
    started, tokens, text, finished = await whole(client, ask, request_id="mine")
    assert (started.request_id, started.prompt_tokens) == ("mine", said["stats"]["prompt_tokens"])
    assert (list(tokens), text, finished.finish_reason) == (said["token_ids"], said["text"], said["finish_reason"])
    assert finished.usage.completion_tokens == len(tokens)
    assert finished.speculation.acceptance_length is not None
    assert finished.speculation.acceptance_length > 4
    assert finished.timings.decode_tokens_per_second > 0

    talk = Conversation((Message("system", "You do sums, and show how. " * 20), *TALK.messages))
    messages = [{"role": message.role, "content": message.content} for message in talk.messages]
    body = {"messages": messages, "temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 40}
    http = await asyncio.to_thread(over_http, server, "/v1/chat/completions", body)
    _, warm, warm_text, ending = await whole(client, GenerateRequest(talk, WARM, Stopping(40)))
    assert warm_text == http["choices"][0]["message"]["content"]
    assert len(warm) == http["usage"]["completion_tokens"]
    assert ending.usage.cached_tokens > 0
    assert ending.usage.cache_source == "memory"


async def test_generate_is_http_from_text_and_from_ids(server: Server, client: RemoteInference) -> None:
    """A text and its tokens give the same answer, speculated or not, and HTTP's with the same seed."""
    ids = await client.tokenize(TEXT)
    assert await client.detokenize(ids, skip_special_tokens=True) == TEXT
    body = {"prompt": TEXT, "temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 30}
    http = await asyncio.to_thread(over_http, server, "/v1/completions", body)
    answers = [
        await whole(client, GenerateRequest(prompt, WARM, Stopping(30), speculate=speculate, model="demo"))
        for prompt in (TEXT, ids)
        for speculate in (True, False)
    ]
    assert len({(tokens, text) for _, tokens, text, _ in answers}) == 1
    assert answers[0][2] == http["choices"][0]["text"]
    assert answers[0][3].usage.completion_tokens == http["usage"]["completion_tokens"]


async def test_stopping(client: RemoteInference) -> None:
    """Limits, strings and tokens end an answer where they say."""
    greedy = SamplingParams(temperature=0)
    _, tokens, text, finished = await whole(client, GenerateRequest(TEXT, greedy, Stopping(12, ignore_eos=True)))
    assert (len(tokens), finished.finish_reason) == (12, "length")
    _, _, cut, ending = await whole(client, GenerateRequest(TEXT, greedy, Stopping(12, stop=(text[5:8],))))
    assert (cut, ending.finish_reason) == (text[: text.index(text[5:8])], "stop")
    _, until, _, _ = await whole(client, GenerateRequest(TEXT, greedy, Stopping(12, stop_token_ids=(tokens[3],))))
    assert until == tokens[: tokens.index(tokens[3]) + 1]
    await whole(client, GenerateRequest(TEXT, SamplingParams(logit_bias={tokens[0]: 100.0}), Stopping(1)))


async def test_grammar_and_logprobs(client: RemoteInference) -> None:
    """An answer is bound by a regular expression, and every token comes with the numbers that were asked for."""
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{3}-[a-f]{2}")
    events = [e async for e in client.answer(GenerateRequest(TEXT, WARM, Stopping(20), logprobs=3, grammar=grammar))]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert re.fullmatch(grammar.text, "".join(delta.text for delta in deltas))
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.token_ids)
        assert all(one.logprob <= 0 and len(one.top_token_ids) == 3 for one in delta.logprobs)
    assert sum(len(delta.token_ids) for delta in deltas) > 3


# --- what the server tells


async def test_the_server_tells_of_itself(client: RemoteInference) -> None:
    info = await client.info()
    [model] = await client.models()
    assert info.model == model
    assert (model.name, model.context_length, info.ready) == ("demo", 4096, True)
    assert [(stage.first_layer, stage.last_layer, stage.device) for stage in info.stages] == [
        (0, 6, "cpu"),
        (6, 12, "cpu"),
    ]
    assert all(stage.weight_bytes > 1e6 and stage.host and stage.address for stage in info.stages)
    assert info.draft is not None
    assert (info.draft.block_size, info.draft.address) == (16, info.stages[-1].address)
    assert 0 < info.uptime_seconds < 600
    load = await client.load()
    assert (load.max_running, load.draining) == (2, False)


async def test_a_chat_as_tokens(client: RemoteInference) -> None:
    tokens = await client.tokenize(TALK)
    assert "4729" in await client.detokenize(tokens)
    started, *_ = await whole(client, GenerateRequest(tokens, stopping=Stopping(1)))
    assert started.prompt_tokens == len(tokens)


# --- keys, health, reflection


class _WithKey(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=[("authorization", f"Bearer {KEY}")]), requests)


def test_reflection_needs_the_key(server: Server) -> None:
    """A client with the key finds every service and message; one without finds nothing."""
    with grpc.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, _WithKey()))
        services = set(database.get_services())
        reflection = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
        assert {SERVICE, "grpc.health.v1.Health", *reflection} == services
        found = database.FindFileContainingSymbol(SERVICE)
        assert {method.name for method in found.service[0].method} >= {"Generate", "Chat", "Abort"}
        database.FindFileContainingSymbol("google.protobuf.Struct")
        with pytest.raises(grpc.RpcError) as raised:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_has_no_key_gets_nothing_but_health(channel: grpc.aio.Channel) -> None:
    stub = pb_grpc.InferenceServiceStub(channel)
    for metadata in ([], [("authorization", "Bearer no")], [("x-api-key", "no")], [("authorization", f"Basic {KEY}")]):
        calls = [
            stub.GetLoad(pb.GetLoadRequest(), metadata=metadata),
            stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata).read(),
            channel.unary_unary("/no.such.Service/Method")(b"", metadata=metadata),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="API key") as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await stub.GetLoad(pb.GetLoadRequest(), metadata=[("x-api-key", KEY)])
    for name in ("", SERVICE):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# --- wrong requests


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (GenerateRequest(TEXT, SamplingParams(temperature=-1.0)), "temperature"),
        (GenerateRequest(TEXT, SamplingParams(temperature=float("nan"))), "temperature"),
        (GenerateRequest(TEXT, SamplingParams(temperature=1e300)), "temperature"),
        (GenerateRequest(TEXT, SamplingParams(top_p=1.5)), "top_p"),
        (GenerateRequest(TEXT, SamplingParams(min_p=-0.1)), "min_p"),
        (GenerateRequest(TEXT, SamplingParams(repetition_penalty=0.0)), "repetition_penalty"),
        (GenerateRequest(TEXT, SamplingParams(logit_bias={2**32 - 1: 1.0})), "logit_bias"),
        (GenerateRequest(TEXT, stopping=Stopping(2**32 - 1)), "max_tokens"),
        (GenerateRequest(TEXT, stopping=Stopping(stop=("x",) * 65)), "stop"),
        (GenerateRequest(TEXT, stopping=Stopping(stop_token_ids=(2**31,))), "stop_token_ids"),
        (GenerateRequest(()), "prompt"),
        (GenerateRequest((2**32 - 1,)), "prompt"),
        (GenerateRequest((5,) * 5000), "prompt"),
        (GenerateRequest(TEXT, logprobs=21), "logprobs"),
        (GenerateRequest(TEXT, grammar=Grammar(GrammarKind.REGEX, "(")), "grammar.regex"),
        (GenerateRequest(TALK, grammar=Grammar(GrammarKind.JSON_SCHEMA, "x" * 300_000)), "grammar.json_schema"),
        (GenerateRequest(Conversation((Message("assistant", tool_calls="{"),))), "messages.0.tool_calls"),
        (GenerateRequest(Conversation((Message("assistant", tool_calls='[{"id": 1}]'),))), "messages.0.tool_calls"),
        (
            GenerateRequest(
                Conversation((Message("assistant", tool_calls='[{"function": {"name": "f", "arguments": 5}}]'),))
            ),
            "messages.0.tool_calls",
        ),
        (GenerateRequest(Conversation(TALK.messages, tools="[1]")), "conversation.tools"),
        (GenerateRequest(Conversation(TALK.messages, variables={"messages": []})), "chat_template_kwargs"),
    ],
)
async def test_wrong_input_names_its_field(ask: GenerateRequest, field: str, client: RemoteInference) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await whole(client, ask)
    assert raised.value.where["field"] == field, raised.value.message
    assert "request_id" in raised.value.where


async def test_another_model_is_not_found(client: RemoteInference) -> None:
    with pytest.raises(NotFound, match="use 'demo'") as raised:
        await whole(client, GenerateRequest(TEXT, model="gpt-5"))
    assert (raised.value.reason, raised.value.where["field"]) == ("MODEL_NOT_FOUND", "model")


async def test_names_of_parameters_are_free_for_switches(client: RemoteInference) -> None:
    """What the code around the template calls its own means nothing to a chat."""
    variables = {"files": 1, "template": "x", "tokenizer": None, "full_ids": [], "enable_thinking": False}
    await whole(client, GenerateRequest(Conversation(TALK.messages, variables=variables), stopping=Stopping(1)))


async def test_senseless_requests_are_never_our_fault(channel: grpc.aio.Channel, client: RemoteInference) -> None:
    """Random valid messages, half-way sensible ones among them: no INTERNAL, no UNKNOWN, and all is idle after."""
    hints = {"model": ["demo"], "role": ["user", "tool"], "max_tokens": [1, 2], "tool_calls": ["[]", "[{}]"]}
    hints |= {"temperature": [0.0, 1.0], "ids": [1, 7], "stop_token_ids": [3], "token_ids": [1, 99]}
    messages = RandomMessages(random.Random("grpc api"), hints)
    stub = pb_grpc.InferenceServiceStub(channel)
    seen = set()
    for _ in range(60):
        for method in ("Generate", "Chat", "Tokenize", "Detokenize"):
            request = messages.fill(getattr(pb, f"{method}Request")())
            if method in ("Generate", "Chat"):
                limit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 2
                request.stopping.max_tokens = min(limit, 2)
            call = getattr(stub, method)(request, timeout=10, metadata=[("x-api-key", KEY)])
            with contextlib.suppress(grpc.aio.AioRpcError):
                [event async for event in call] if isinstance(call, grpc.aio.UnaryStreamCall) else await call
            status = (await call.code()).name
            assert status in ALLOWED, (await call.details(), request)
            seen.add((method, status))
    assert {("Generate", "INVALID_ARGUMENT"), ("Chat", "INVALID_ARGUMENT"), ("Tokenize", "OK")} <= seen
    await idle(client)


# --- ends


async def test_who_cancels_frees_the_session(client: RemoteInference) -> None:
    """A client that goes in the middle of an answer leaves nothing that runs."""
    events = client.answer(LONG)
    assert isinstance(await anext(events), Started)
    await anext(events)
    assert (await client.load()).running == 1
    await events.aclose()
    await idle(client, 2)


async def test_a_deadline_bounds_the_answer(client: RemoteInference) -> None:
    with pytest.raises(DeadlineExceeded):
        await whole(client, LONG, timeout_s=0.4)
    await idle(client, 2)


async def test_abort(client: RemoteInference) -> None:
    """It ends what runs and what waits for its turn; when it answers, the turn is free."""
    running = [asyncio.ensure_future(whole(client, LONG, request_id=f"long-{number}")) for number in range(3)]
    async with asyncio.timeout(5):
        while (load := await client.load()).running + load.waiting < 3:
            await asyncio.sleep(0.02)
    assert (load.running, load.waiting) == (2, 1)
    for number in (2, 1, 0):
        await client.abort(f"long-{number}")
    load = await client.load()
    assert (load.running, load.waiting) == (0, 0)
    for error in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(error, Cancelled)
        assert error.reason == "REQUEST_ABORTED"
    with pytest.raises(NotFound):
        await client.abort("long-0")


@pytest.mark.slow
async def test_a_full_queue_and_a_drain(tmp_path: Any) -> None:
    """One more than may wait is told when to come again; while draining, new ones are refused and running ones end."""
    arguments = ("--model", DEMO / "target", "--target-devices", "cpu", "--dtype", "float32", "--threads", 1)
    with serving(tmp_path, *arguments, "--max-concurrent-requests", 1, "--max-waiting-requests", 0) as server:
        channel = await connect(server.grpc, timeout_s=5)
        client, stub = RemoteInference(channel, "it"), pb_grpc.InferenceServiceStub(channel)
        events = client.answer(GenerateRequest("x", SamplingParams(temperature=0), Stopping(150, ignore_eos=True)))
        await anext(events)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await stub.Generate(pb.GenerateRequest(text="x")).read()
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(full.value)
        assert status is not None
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)

        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await client.load()).draining
        with pytest.raises(FlashsplitError) as late:
            await whole(client, GenerateRequest("x"))
        assert (late.value.code_name, late.value.reason) == ("UNAVAILABLE", "DRAINING")
        *_, finished = [event async for event in events]
        assert isinstance(finished, Finished)
        assert finished.usage.completion_tokens == 150
        assert await asyncio.to_thread(server.process.wait, 20) == 0
        await channel.close()
