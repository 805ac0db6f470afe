"""/v1/messages over a scripted engine: what a client of Anthropic's API gets, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import Unavailable
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import HERMES, THINKER, Script, engine, says

PATH = "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 256}
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = 'One moment.\n<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'


async def whole(client: Client, **fields: Any) -> dict[str, Any]:
    status, reply = await client.post(PATH, {**HI, **fields})
    assert status == 200, reply
    return reply


async def events(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream; each one's name is its type."""
    streamed = await client.stream(PATH, {**HI, **fields})
    assert all(name == data["type"] for name, data in streamed)
    return [data for _, data in streamed]


def blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content as a client puts it together that follows the stream; every block is begun and closed once."""
    built: list[dict[str, Any]] = []
    open_index = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (open_index, event["index"]) == (None, len(built))
                built.append({**event["content_block"], **({"json": ""} if "input" in event["content_block"] else {})})
                open_index = event["index"]
            case "content_block_delta":
                assert event["index"] == open_index
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                field = name[delta["type"]]
                built[-1]["json" if field == "partial_json" else field] += delta[field]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
    assert open_index is None
    return built


async def test_an_answer_and_what_it_cost(connect: Connect) -> None:
    """One block of text, why it ended, and the tokens."""
    client = await connect(engine())
    reply = await whole(client)
    assert reply["content"] == [{"type": "text", "text": "hello"}]
    assert (reply["stop_reason"], reply["stop_sequence"], reply["role"]) == ("end_turn", None, "assistant")
    prompt = len(client.engine.cluster.session.forwards[0].token_ids)
    assert reply["usage"]["output_tokens"] == 6
    assert reply["usage"]["input_tokens"] == prompt


async def test_a_stream_in_its_order(connect: Connect) -> None:
    """The message begins, a block grows, and the end tells why and how many tokens."""
    streamed = await events(await connect(engine()))
    kinds = [event["type"] for event in streamed]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert blocks(streamed) == [{"type": "text", "text": "hello"}]
    assert streamed[0]["message"]["usage"]["output_tokens"] == 0
    assert streamed[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert streamed[-2]["usage"]["output_tokens"] == 6


async def test_why_an_answer_ends(connect: Connect) -> None:
    """A stop sequence is named, the limit is max_tokens."""
    client = await connect(engine())
    stopped = await whole(client, stop_sequences=["ll"])
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        "he", "stop_sequence", "ll",
    )  # fmt: skip
    assert (await whole(client, max_tokens=2))["stop_reason"] == "max_tokens"
    assert (await events(client, stop_sequences=["ll"]))[-2]["delta"]["stop_sequence"] == "ll"


async def test_an_empty_answer_is_an_empty_block(connect: Connect) -> None:
    """Clients expect one block at least."""
    client = await connect(engine(Script(says(""))))
    assert (await whole(client))["content"] == [{"type": "text", "text": ""}]
    assert blocks(await events(client)) == [{"type": "text", "text": ""}]


async def test_thinking_is_a_block_of_its_own(connect: Connect) -> None:
    """It comes before the text, whole and streamed alike."""
    client = await connect(engine(Script(says("<think>\nhmm\n</think>\n\nYes.")), template=THINKER))
    expected = [{"type": "thinking", "thinking": "hmm", "signature": ""}, {"type": "text", "text": "Yes."}]
    assert (await whole(client))["content"] == expected
    assert blocks(await events(client)) == expected


async def test_a_tool_call(connect: Connect) -> None:
    """The call is a block with its input as an object; streamed, the input comes as pieces of JSON."""
    client = await connect(engine(Script(says(CALL)), template=HERMES))
    reply = await whole(client, tools=[ADD])
    text, call = reply["content"]
    assert text == {"type": "text", "text": "One moment."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": [1, "é"]})
    assert reply["stop_reason"] == "tool_use"
    streamed = await events(client, tools=[ADD])
    text, call = blocks(streamed)
    assert (text["text"], call["name"], call["json"]) == ("One moment.", "add", '{"a": [1, "é"]}')
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_chat_with_blocks_goes_through_the_template(connect: Connect) -> None:
    """System, text and results of tools reach the model as messages."""
    client = await connect(engine())
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "5"}]},
    ]
    await whole(client, messages=talk, system=[{"type": "text", "text": "Be brief."}])
    tokenizer = client.engine.files.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(client.engine.cluster.session.forwards[0].token_ids, skip_special_tokens=False)
    turns = ("system\nBe brief.", "user\nab", "assistant\nc", "tool\n5")
    assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


async def test_tokens_are_counted_without_an_answer(connect: Connect) -> None:
    """The count is that of the prompt, and the chain is not asked."""
    client = await connect(engine())
    status, reply = await client.post(f"{PATH}/count_tokens", {"messages": HI["messages"]})
    assert (status, client.engine.cluster.sessions) == (200, [])
    await whole(client)
    assert reply == {"input_tokens": len(client.engine.cluster.session.forwards[0].token_ids)}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [ADD, ADD]}, "is there already"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "no tool is called 'sub'"),
    ],
)
async def test_refusals_have_anthropics_form(connect: Connect, fields: dict[str, Any], text: str) -> None:
    """A 400 that names the field at fault."""
    client = await connect(engine(template=HERMES))
    status, reply = await client.post(PATH, {**HI, **fields})
    assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error")
    assert text in reply["error"]["message"]


async def test_a_missing_field_is_named_alone(connect: Connect) -> None:
    """Without the body in which it is missing."""
    client = await connect(engine())
    status, reply = await client.post(PATH, {"messages": HI["messages"]})
    assert (status, reply["error"]["message"]) == (400, "max_tokens: Field required")


async def test_an_error_in_the_middle_of_a_stream(connect: Connect) -> None:
    """It comes as an event of its own name, in Anthropic's form."""
    client = await connect(engine(Script(failures={2: Unavailable("stage 1 has died")})))
    last = (await events(client))[-1]
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "stage 1 has died"}}
