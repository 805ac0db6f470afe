"""Long prompts made shorter, through every API: what clients see of it, and who is left alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.messages.inference_types import (
    CompressionMode,
    CompressionParams,
    Conversation,
    Delta,
    Finished,
    GenerateRequest,
    Message,
    Stopping,
)
from services.messages.sampling import SamplingParams
from services.net.channel import connect
from services.rpc.inference import RemoteInference
from tests import forking
from tests.e2e.conftest import children, generate, refusal
from tests.e2e.server import DEMO, PAIR, Server, serving
from tests.e2e.test_compressor import drafter  # noqa: F401  (a fixture)

STORY = "The keeper of the lighthouse counts the ships, and writes each name down. Überraschung! 日本語。\n" * 40
TEXT = STORY + "\nWhat does the keeper count?"
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
COMPRESSION = ("--prefill-compression", "always", "--prefill-keep-ratio", "0.3")


@pytest.fixture(scope="module")
def server(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    with serving(
        tmp_path_factory.mktemp("serve"),
        *(*PAIR, "--target-devices", "cpu", "--served-model-name", "demo"),
        *("--prefill-drafter", drafter, *COMPRESSION),
    ) as running:
        yield running


PLAIN: Any = {"max_tokens": 3, "speculate": False}
"""Nothing is said of how well the draft does."""


def ask(client: openai.OpenAI, messages: list[Any] = CHAT, **fields: Any) -> dict[str, Any]:
    fields = {"max_tokens": 8, "temperature": 0.0, **fields}
    extra = {key: fields.pop(key) for key in list(fields) if key.startswith("prefill_") or key == "speculate"}
    return client.chat.completions.create(model="demo", messages=messages, extra_body=extra, **fields).model_dump()


async def over_grpc(server: Server, wish: CompressionParams) -> tuple[str, Finished]:
    channel = await connect(server.grpc, timeout_s=5)
    messages = tuple(Message(message["role"], message["content"]) for message in CHAT)
    wanted = GenerateRequest(Conversation(messages), SamplingParams(temperature=0), Stopping(8), compression=wish)
    events = [event async for event in RemoteInference(channel, server.grpc).answer(wanted)]
    await channel.close()
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1]


def test_every_door_makes_it_as_short(server: Server, client: openai.OpenAI, drafter: Path) -> None:  # noqa: F811
    """HTTP, gRPC and the command line: one answer to one shorter prompt, whose figures they tell."""
    http = ask(client)
    text, finished = asyncio.run(over_grpc(server, CompressionParams()))
    line = generate(
        *(*PAIR, "--target-devices", "cpu", "--chat", "--system", "Be brief.", "--prompt", TEXT, "--max-tokens", 8),
        *("--prefill-drafter", drafter, *COMPRESSION),
    )

    before, after = http["timings"]["original_prompt_n"], http["usage"]["prompt_tokens"]
    assert 0.25 * before < after < 0.4 * before
    assert http["timings"]["compress_ms"] > 0
    assert text == line["text"] == http["choices"][0]["message"]["content"]
    assert (finished.usage.original_prompt_tokens, finished.usage.prompt_tokens) == (before, after)
    assert (line["stats"]["original_prompt_tokens"], line["stats"]["prompt_tokens"]) == (before, after)


def test_a_request_has_its_own_way(server: Server, client: openai.OpenAI) -> None:
    whole = ask(client, prefill_compression="off")
    assert whole["timings"]["original_prompt_n"] is None
    less = ask(client, prefill_keep_ratio=0.1)
    assert less["usage"]["prompt_tokens"] < 0.2 * whole["usage"]["prompt_tokens"]
    assert less["timings"]["original_prompt_n"] == whole["usage"]["prompt_tokens"]
    everything = ask(client, prefill_keep_ratio=7)
    assert everything["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    _, finished = asyncio.run(over_grpc(server, CompressionParams(CompressionMode.OFF)))
    assert finished.usage.original_prompt_tokens is None
    for field, value in (("prefill_compression", "sometimes"), ("prefill_keep_ratio", "much")):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **{field: value})
        assert refused.value.param == field


@pytest.mark.slow
def test_who_is_left_alone(client: openai.OpenAI) -> None:
    """Earlier answers, tools, structured output, and what is short."""
    tool: Any = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    for left in (
        ask(client, [*CHAT, {"role": "assistant", "content": "Ships."}, {"role": "user", "content": "Why?"}], **PLAIN),
        ask(client, tools=[tool], **PLAIN),
        ask(client, response_format={"type": "json_object"}, **PLAIN),
        ask(client, [{"role": "user", "content": "Why?"}], **PLAIN),
    ):
        assert left["timings"]["original_prompt_n"] is None
        assert left["timings"]["notes"] == []


@pytest.mark.slow
def test_completions_and_what_is_longer_than_the_context(client: openai.OpenAI) -> None:
    """A text that doesn't fit is no trouble once it is shorter."""
    made = client.completions.create(model="demo", prompt=STORY * 4 + "\n\nSo,", max_tokens=4).model_dump()
    assert made["timings"]["original_prompt_n"] > 4096 > made["usage"]["prompt_tokens"]
    with pytest.raises(openai.BadRequestError, match="Please reduce the length of the messages") as refused:
        ask(client, [{"role": "user", "content": STORY * 4}], prefill_compression="off")
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.slow
def test_a_lost_drafter_loses_no_request(server: Server, client: openai.OpenAI) -> None:
    """The worker that reads prompts is killed: the request goes on whole and says so; the next one has a new worker."""
    pids = children(server.process.pid)
    [reader] = [pid for pid in pids if "compress" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    reader = forking.forked(reader)
    os.kill(reader, signal.SIGSTOP)
    body = {"messages": [CHAT[0], {"role": "user", "content": "Well. " + TEXT}], **PLAIN}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )

    async def lose() -> dict[str, Any]:
        asked = asyncio.ensure_future(asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=60))))
        await asyncio.sleep(0.5)
        os.kill(reader, signal.SIGKILL)
        answer: dict[str, Any] = await asked
        return answer

    lost = asyncio.run(lose())
    assert lost["timings"]["original_prompt_n"] is None
    [note] = lost["timings"]["notes"]
    assert "not compressed" in note
    assert "SIGKILL" in note
    assert ask(client, [CHAT[0], {"role": "user", "content": "Oh. " + TEXT}])["timings"]["original_prompt_n"] > 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill-compression", "always"], ["--prefill-compression has no effect without --prefill-drafter"]),
        (["--prefill-device", "cpu"], ["--prefill-device has no effect"]),
        (["--prefill-keep-ratio", "0.1"], ["--prefill-keep-ratio has no effect"]),
        (["--prefill-drafter", "/no/such"], ["/no/such", "does not exist"]),
        (["--prefill-drafter", DEMO / "target", "--prefill-keep-ratio", "much"], ["'much'", "0.05"]),
        (["--prefill-drafter", DEMO / "target", "--prefill-device", "gpu"], ["--prefill-device 'gpu'", "cuda:N"]),
        (
            ["--prefill-drafter", DEMO / "target", "--prefill-compression", "always", "--prefill-threshold", "5"],
            ["--prefill-threshold has no effect"],
        ),
    ],
)
def test_wrong_flags_are_one_sentence(arguments: list[object], words: list[str]) -> None:
    said = refusal(*PAIR, "--target-devices", "cpu", "--prompt", "Hi", *arguments)
    assert all(word in said for word in words), said
