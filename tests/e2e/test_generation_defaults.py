"""The defaults of a checkpoint and of a server, by every API and every command that answers.

The checkpoint is the demo target with a generation_config.json that shows: at this temperature any answer is noise,
but for top_k, which leaves the most probable token alone. So whoever heeds both says what a greedy request says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from services.messages.inference_types import Conversation, Delta, Finished, GenerateRequest, Message
from services.net.channel import connect
from services.rpc.inference import RemoteInference
from tests.e2e.conftest import ROOT, generate
from tests.e2e.server import DEMO, Server, get, serving

QUESTION = "Tell me a story."
ASK: Any = [{"role": "user", "content": QUESTION}]
PROMPT = "def add(a, b):"
LIMIT = 24
SETTINGS = {
    "do_sample": True,
    "temperature": 50.0,
    "top_k": 1,
    "repetition_penalty": 4.0,
    "max_new_tokens": LIMIT,
    "eos_token_id": [2, 0],
}
GREEDY: Any = {"temperature": 0, "extra_body": {"top_k": 0, "repetition_penalty": 4}}
COMPUTE = ("--dtype", "float32", "--target-devices", "cpu", "--threads", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target with these defaults."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    folder.mkdir()
    for file in (DEMO / "target").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "--model", model, *COMPUTE) as running:
        yield running


@pytest.fixture(scope="module")
def chat_text(client: openai.OpenAI) -> str:
    """What a request says that asks for these settings, and greedily."""
    reply = client.chat.completions.create(model="demo", messages=ASK, max_tokens=LIMIT, **GREEDY)
    assert reply.choices[0].finish_reason == "length"
    return reply.choices[0].message.content or ""


@pytest.fixture(scope="module")
def plain_text(client: openai.OpenAI) -> str:
    reply = client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, **GREEDY)
    assert reply.choices[0].finish_reason == "length"
    return reply.choices[0].text


# --- the checkpoint's


def test_openai(client: openai.OpenAI, chat_text: str, plain_text: str) -> None:
    """Chats, streamed too, completions and responses."""
    whole = client.chat.completions.create(model="demo", messages=ASK)
    streamed = client.chat.completions.create(model="demo", messages=ASK, stream=True)
    response = client.responses.create(model="demo", input=QUESTION)
    plain = client.completions.create(model="demo", prompt=PROMPT)

    assert whole.choices[0].message.content == chat_text
    assert whole.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == chat_text
    assert response.output_text == chat_text
    assert (response.temperature, response.top_p) == (50, 1)
    assert plain.choices[0].text == plain_text
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 16


def test_a_request_that_says_something_has_that(client: openai.OpenAI, chat_text: str) -> None:
    """0 for top_k switches it off, and then the temperature shows; another value of one leaves the others."""
    noise = client.chat.completions.create(model="demo", messages=ASK, extra_body={"top_k": 0})
    longer = client.chat.completions.create(model="demo", messages=ASK, temperature=99, max_tokens=30)
    repeating = client.chat.completions.create(model="demo", messages=ASK, extra_body={"repetition_penalty": 1})

    assert noise.choices[0].message.content != chat_text
    assert (longer.choices[0].message.content or "").startswith(chat_text)
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 30
    assert repeating.choices[0].message.content != chat_text


def test_anthropic(server: Server, chat_text: str) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        reply = client.messages.create(model="demo", messages=ASK, max_tokens=LIMIT)
    assert "".join(block.text for block in reply.content if block.type == "text") == chat_text


async def test_grpc(server: Server, chat_text: str, plain_text: str) -> None:
    """Conversations and plain prompts."""
    channel = await connect(server.grpc, timeout_s=20)
    try:
        for prompt, text, tokens in (
            (Conversation((Message("user", QUESTION),)), chat_text, LIMIT),
            (PROMPT, plain_text, 16),
        ):
            events = [event async for event in RemoteInference(channel, "the server").answer(GenerateRequest(prompt))]
            assert "".join(event.text for event in events if isinstance(event, Delta)) == text
            finished = events[-1]
            assert isinstance(finished, Finished)
            assert finished.usage.completion_tokens == tokens
    finally:
        await channel.close()


def test_the_command_line(model: Path, server: Server, chat_text: str) -> None:
    """generate, and chat with a server."""
    said = generate("--model", model, *COMPUTE, "--chat", "--prompt", QUESTION)
    command = [sys.executable, "-m", "coordinator", "chat", "--url", server.url, "--no-history"]
    chatted = subprocess.run(command, cwd=ROOT, input=QUESTION, capture_output=True, text=True, timeout=60, check=True)

    assert (said["text"], said["finish_reason"]) == (chat_text, "length")
    assert chatted.stdout.strip() == chat_text.strip()


def test_operators_see_them(server: Server) -> None:
    """When the server starts, and in its list of models."""
    lines = " ".join(server.log.read_text().split())
    assert (
        "unless a request says otherwise: repetition_penalty 4, temperature 50, top_k 1, answers of up to 24 tokens, "
        "to plain prompts 16"
    ) in lines
    [listed] = json.loads(get(f"{server.url}/v1/models")[1])["data"]
    assert listed["default_sampling"] == {"repetition_penalty": 4, "temperature": 50, "top_k": 1}


# --- the server's


@pytest.mark.slow
def test_a_server_with_defaults_of_its_own(model: Path, tmp_path: Path) -> None:
    """The checkpoint's are left out, others hold; a chat may use the rest of the context, which a flag shortens."""
    flags = ("--generation-config", "vllm", "--default-sampling", "temperature=0", "--max-model-len", 120)
    with (
        serving(tmp_path, "--model", model, *COMPUTE, *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        endless: Any = {"model": "demo", "extra_body": {"ignore_eos": True}}
        first, second = (client.chat.completions.create(messages=ASK, **endless) for _ in range(2))
        greedy = client.chat.completions.create(messages=ASK, **endless, temperature=0)
        response = client.responses.create(input=QUESTION, **endless)
        plain = client.completions.create(prompt=PROMPT, **endless)

        assert first.usage is not None
        assert first.usage.total_tokens == 120
        assert (
            first.choices[0].message.content == second.choices[0].message.content == greedy.choices[0].message.content
        )
        assert response.usage is not None
        assert response.usage.total_tokens == 120
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 16
