"""/v1/responses over a scripted engine: what a client gets, whole and streamed, and what it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import Unavailable
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import HERMES, THINKER, Script, engine, says

PATH = "/v1/responses"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = 'One moment.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def whole(client: Client, **fields: Any) -> dict[str, Any]:
    status, reply = await client.post(PATH, {"input": "hi", **fields})
    assert status == 200, reply
    return reply


async def events(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream; each one's name is its type, and they are numbered."""
    streamed = await client.stream(PATH, {"input": "hi", **fields})
    assert all(name == data["type"] for name, data in streamed)
    assert [data["sequence_number"] for _, data in streamed] == list(range(len(streamed)))
    return [data for _, data in streamed]


def texts(reply: dict[str, Any]) -> list[tuple[str, str]]:
    """Kind and text of each item of the output."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in reply["output"]
    ]


async def test_an_answer_and_what_it_cost(connect: Connect) -> None:
    """One message, completed, and the tokens."""
    client = await connect(engine())
    reply = await whole(client)
    assert (texts(reply), reply["status"]) == ([("message", "hello")], "completed")
    prompt = len(client.engine.cluster.session.forwards[0].token_ids)
    usage = reply["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (prompt, 6, prompt + 6)
    assert usage["input_tokens_details"]["cached_tokens"] == 0


async def test_what_was_asked_for_is_repeated(connect: Connect) -> None:
    """Parameters that the client gave, and the defaults of those that it didn't."""
    client = await connect(engine())
    given = await whole(client, temperature=0.5, top_p=0.25, metadata={"a": "b"}, instructions="Be brief.")
    assert (given["temperature"], given["top_p"], given["metadata"]) == (0.5, 0.25, {"a": "b"})
    assert given["instructions"] == "Be brief."
    plain = await whole(client)
    assert (plain["temperature"], plain["top_p"], plain["tool_choice"]) == (1.0, 1.0, "auto")


async def test_an_answer_that_was_cut_is_incomplete(connect: Connect) -> None:
    """The status says so, and why."""
    client = await connect(engine())
    reply = await whole(client, max_output_tokens=2)
    assert (texts(reply), reply["status"]) == ([("message", "he")], "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await events(client, max_output_tokens=2))[-1]["type"] == "response.incomplete"


async def test_a_stream_ends_with_the_whole_reply(connect: Connect) -> None:
    """It begins with the reply in progress; the pieces of text add up to what the last event holds."""
    streamed = await events(await connect(engine()))
    assert [event["type"] for event in streamed[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert streamed[0]["response"]["status"] == "in_progress"
    pieces = [event["delta"] for event in streamed if event["type"] == "response.output_text.delta"]
    assert "".join(pieces) == "hello"
    assert streamed[-1]["type"] == "response.completed"
    assert texts(streamed[-1]["response"]) == [("message", "hello")]
    assert streamed[-1]["response"]["usage"]["output_tokens"] == 6


async def test_reasoning_is_an_item_and_is_counted(connect: Connect) -> None:
    """It comes before the message, and its tokens stand in the usage."""
    client = await connect(engine(Script(says("<think>\nhmm\n</think>\n\nYes.")), template=THINKER))
    reply = await whole(client)
    assert texts(reply) == [("reasoning", "hmm"), ("message", "Yes.")]
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call(connect: Connect, stream: bool) -> None:
    """The call is an item with a call_id; the text before it a message."""
    client = await connect(engine(Script(says(CALL)), template=HERMES))
    reply = (await events(client, tools=[ADD]))[-1]["response"] if stream else await whole(client, tools=[ADD])
    assert texts(reply) == [("message", "One moment."), ("function_call", '{"a": 1}')]
    call = reply["output"][1]
    assert (call["name"], call["status"]) == ("add", "completed")
    assert call["call_id"].startswith("call_")


async def test_input_items_go_through_the_template(connect: Connect) -> None:
    """Instructions, messages and outputs of functions reach the model as messages."""
    client = await connect(engine())
    talk = [
        {"role": "developer", "content": "And polite."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call_output", "call_id": "x", "output": "5"},
    ]
    await whole(client, input=talk, instructions="Be brief.")
    tokenizer = client.engine.files.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(client.engine.cluster.session.forwards[0].token_ids, skip_special_tokens=False)
    turns = ("system\nBe brief.\n\nAnd polite.", "user\na", "assistant\nb", "tool\n5")
    assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": []}, "input", "input is an empty list"),
        ({"input": [{"role": "poet", "content": "x"}]}, "input.0.role", "must be user, assistant, system or developer"),
        ({"input": [{"type": "image"}]}, "input.0.type", "input.0.type is 'image'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input.0.arguments", "JSON object"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"background": True}, "background", "leave it out and use stream"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "no other tools are built in"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length is 4096 tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format.schema is missing"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ],
)
async def test_refusals_name_the_field(connect: Connect, fields: dict[str, Any], param: str, text: str) -> None:
    """Each is a 400 in the words of this API, and no session is opened for it."""
    client = await connect(engine(template=HERMES))
    status, reply = await client.post(PATH, {"input": "hi", **fields})
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert text in reply["error"]["message"]
    assert not client.engine.cluster.sessions


async def test_an_error_in_the_middle_of_a_stream(connect: Connect) -> None:
    """The reply has failed, with the message."""
    client = await connect(engine(Script(failures={2: Unavailable("stage 1 has died")})))
    last = (await events(client))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == "stage 1 has died"


async def test_an_error_before_the_first_token_has_a_status(connect: Connect) -> None:
    """A stream that has not begun is refused like a whole answer."""
    client = await connect(engine(Script(failures={0: Unavailable("stage 1 has died")})))
    status, reply = await client.post(PATH, {"input": "hi", "stream": True})
    assert (status, reply["error"]["message"]) == (503, "stage 1 has died")
