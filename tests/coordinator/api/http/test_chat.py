"""/v1/chat/completions over a scripted engine: what a client gets, whole and streamed, and what it is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.errors import Unavailable
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import HERMES, THINKER, Script, engine, model_files, says
from tests.services.fakes import until

PATH = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = 'One moment.\n<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'


async def whole(client: Client, **fields: Any) -> dict[str, Any]:
    status, reply = await client.post(PATH, {**HI, **fields})
    assert status == 200, reply
    return reply


async def chunks(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """All chunks of a stream that ended as it should."""
    events = await client.stream(PATH, {**HI, **fields})
    assert {name for name, _ in events} == {"message"}
    assert events[-1][1] == "[DONE]"
    return [data for _, data in events[:-1]]


def deltas(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text(chunks: list[dict[str, Any]], index: int = 0, field: str = "content") -> str:
    return "".join(delta.get(field) or "" for delta in deltas(chunks, index))


async def refusal(client: Client, status: int, **fields: Any) -> dict[str, Any]:
    """The error object of a request that gets this status."""
    got, reply = await client.post(PATH, {**HI, **fields})
    assert (got, set(reply)) == (status, {"error"}), reply
    return reply["error"]


# --- answers


async def test_an_answer_and_what_it_cost(connect: Connect) -> None:
    """The message, why it ended, and the tokens of prompt and answer."""
    client = await connect(engine())
    reply = await whole(client)
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], reply["object"], reply["model"]) == ("stop", "chat.completion", "demo")
    prompt = len(client.engine.cluster.session.forwards[0].token_ids)
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 6, prompt + 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (reply["timings"]["prompt_n"], reply["timings"]["predicted_n"]) == (prompt, 6)


async def test_the_conversation_goes_through_the_template(connect: Connect) -> None:
    """System, user and assistant messages reach the model in the template's form."""
    client = await connect(engine())
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    await whole(client, messages=talk)
    tokenizer = client.engine.files.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(client.engine.cluster.session.forwards[0].token_ids, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_is_the_whole_answer_in_pieces(connect: Connect) -> None:
    """The first chunk names the role, the last one says why the answer ended."""
    client = await connect(engine(Script(says("héllo"))))
    parts = await chunks(client)
    assert deltas(parts)[0] == {"role": "assistant", "content": ""}
    assert text(parts) == "héllo"
    assert [chunk["choices"][0]["finish_reason"] for chunk in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in parts}) == 1
    assert parts[-1]["timings"]["predicted_n"] == 7


async def test_usage_of_a_stream(connect: Connect) -> None:
    """Asked for, it comes in a last chunk without choices, and the other chunks say that it will."""
    client = await connect(engine())
    *parts, last = await chunks(client, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in parts)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


async def test_stop_strings_and_limits(connect: Connect) -> None:
    """A stop string across tokens cuts the text; max_tokens ends it as "length"."""
    client = await connect(engine())
    stopped = await whole(client, stop=["ll"])
    assert (stopped["choices"][0]["message"]["content"], stopped["choices"][0]["finish_reason"]) == ("he", "stop")
    assert text(await chunks(client, stop="ll")) == "he"
    cut = await whole(client, max_completion_tokens=2)
    assert (cut["choices"][0]["message"]["content"], cut["choices"][0]["finish_reason"]) == ("he", "length")


async def test_several_choices(connect: Connect) -> None:
    """Each has its index, whole and streamed; the prompt counts once, the answers' tokens all; seeds differ."""
    client = await connect(engine())
    reply = await whole(client, n=3, seed=7)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["hello"] * 3
    assert reply["usage"]["completion_tokens"] == 18
    seeds = sorted(session.opening["sampling"].seed for session in client.engine.cluster.sessions)
    assert seeds == [7, 8, 9]
    parts = await chunks(client, n=2)
    assert (text(parts, 0), text(parts, 1)) == ("hello", "hello")


async def test_reasoning_is_told_apart(connect: Connect) -> None:
    """What the model thinks comes as reasoning_content, whole and streamed alike."""
    client = await connect(engine(Script(says("<think>\nhmm\n</think>\n\nYes.")), template=THINKER))
    message = (await whole(client))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hmm"}
    parts = await chunks(client)
    assert (text(parts, field="reasoning_content"), text(parts)) == ("hmm", "Yes.")


async def test_log_probabilities(connect: Connect) -> None:
    """One entry for each token, with as many alternatives as were asked for."""
    client = await connect(engine(Script(says("ab"))))
    content = (await whole(client, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "<|im_end|>"]
    assert [other["token"] for other in content[0]["top_logprobs"]] == ["A", "B"]
    assert content[0]["bytes"] == [97]
    streamed = [
        entry
        for chunk in await chunks(client, logprobs=True)
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in streamed] == ["a", "b", "<|im_end|>"]


async def test_log_probabilities_of_the_prompt(connect: Connect) -> None:
    """In vLLM's form beside the choices: once for all of them, streamed in the first choice's first chunk."""
    client = await connect(engine())
    reply = await whole(client, prompt_logprobs=1, n=2)
    tokens = client.engine.cluster.sessions[0].forwards[0].token_ids
    first, second, *others = reply["prompt_logprobs"]
    assert (first, len(others)) == (None, len(tokens) - 2)
    own = {"logprob": -0.5, "rank": 3, "decoded_token": chr(tokens[1])}
    assert second == {str(tokens[1]): own, "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"}}
    assert [session.opening["prompt_logprobs"] for session in client.engine.cluster.sessions] == [1, None]

    streamed = await chunks(client, prompt_logprobs=1, n=2)
    [told] = [chunk for chunk in streamed if "prompt_logprobs" in chunk]
    assert told["prompt_logprobs"] == reply["prompt_logprobs"]
    assert told["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert told["choices"][0]["index"] == 0
    assert (text(streamed), text(streamed, 1)) == ("hello", "hello")
    assert "prompt_logprobs" not in await whole(client)
    for wrong in (21, -1):
        error = await refusal(client, 400, prompt_logprobs=wrong)
        assert (error["param"], f"given {wrong}" in error["message"]) == ("prompt_logprobs", True)


# --- tools


async def test_a_tool_call(connect: Connect) -> None:
    """The call becomes a tool call with JSON arguments, the text before it stays content."""
    client = await connect(engine(Script(says(CALL)), template=HERMES))
    [choice] = (await whole(client, tools=[ADD]))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": [1, "é"]}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "One moment.")


async def test_a_format_that_is_named(connect: Connect) -> None:
    """It counts before what the chat template shows, which gets the tools then."""
    said = '{"name": "add", "parameters": {"a": [1, "é"]}}'
    for files in (model_files(HERMES), model_files()):
        client = await connect(engine(Script(says(said)), files=replace(files, tool_call_format="llama3_json")))
        [choice] = (await whole(client, tools=[ADD]))["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": [1, "é"]}'}
        assert choice["message"]["content"] is None


async def test_a_streamed_tool_call(connect: Connect) -> None:
    """Name and id come first, then the arguments in pieces that add up; no tag is shown as text."""
    client = await connect(engine(Script(says(CALL)), template=HERMES))
    parts = await chunks(client, tools=[ADD])
    calls = [call for delta in deltas(parts) for call in delta.get("tool_calls", ())]
    assert (calls[0]["function"], calls[0]["type"]) == ({"name": "add", "arguments": ""}, "function")
    assert calls[0]["id"].startswith("call_")
    assert len(calls) > 3
    assert {call["index"] for call in calls} == {0}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": [1, "é"]}'
    assert text(parts) == "One moment."
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_calls_of_unknown_tools_stay_text(connect: Connect) -> None:
    """Nothing is called that the client doesn't offer."""
    client = await connect(engine(Script(says(CALL)), template=HERMES))
    for tools in ({}, {"tools": [ADD], "tool_choice": "none"}, {"tools": [{**ADD, "function": {"name": "sub"}}]}):
        [choice] = (await whole(client, **tools))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_a_forced_call_binds_the_answer_by_a_grammar(connect: Connect) -> None:
    """The chain gets a grammar for the chosen tool, and none where the choice is left to the model."""
    client = await connect(engine(Script(says(CALL)), template=HERMES))
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        await whole(client, tools=[ADD], tool_choice=choice)
        assert "add" in client.engine.cluster.session.opening["grammar"].text
    await whole(client, tools=[ADD], tool_choice="auto")
    assert client.engine.cluster.session.opening["grammar"] is None


# --- refusals and failures


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "reads text only"),
        ({"temperature": 101}, "temperature", "less than or equal to 100"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x'; keys are token ids"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"max_tokens": 5000}, "max_tokens", "maximum context length is 4096 tokens"),
        ({"stop": ["x"] * 65}, "stop", "stop has 65 strings; at most 64"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "stop_token_ids has 999; they must be from 0 to 257"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs: true"),
        ({"tools": [ADD], "tool_choice": "perhaps"}, "tool_choice", "tool_choice is 'perhaps'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "is set by the request itself"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema is missing"),
        ({"prefill_compression": "always"}, "prefill_compression", "this server has no model for it"),
    ],
)
async def test_refusals_name_the_field(connect: Connect, fields: dict[str, Any], param: str, text: str) -> None:
    """Each is a 400 that says what is wrong with which field, and no session is opened for it."""
    client = await connect(engine(template=HERMES))
    error = await refusal(client, 400, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert text in error["message"]
    assert not client.engine.cluster.sessions


async def test_another_model_is_not_found(connect: Connect) -> None:
    """The error has OpenAI's code and names the model that is served."""
    error = await refusal(await connect(engine()), 404, model="gpt-9")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "use 'demo'" in error["message"]


async def test_a_prompt_beyond_the_context(connect: Connect) -> None:
    """The code is the one that clients know."""
    client = await connect(engine(max_model_len=16))
    error = await refusal(client, 400)
    assert error["code"] == "context_length_exceeded"


async def test_a_full_queue(connect: Connect) -> None:
    """A 429 says when to come again, also for a stream, which has not begun then."""
    release = asyncio.Event()
    client = await connect(engine(Script(hold=release), max_running=1, max_waiting=0))
    first = asyncio.ensure_future(whole(client))
    await until(lambda: client.engine.load.running == 1)
    for fields in ({}, {"stream": True}):
        reply = await client.http.post(PATH, json={**HI, **fields})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    release.set()
    assert (await first)["choices"][0]["message"]["content"] == "hello"


async def test_a_server_that_drains(connect: Connect) -> None:
    """New requests get a 503; the one that runs is answered."""
    release = asyncio.Event()
    client = await connect(engine(Script(hold=release)))
    first = asyncio.ensure_future(whole(client))
    await until(lambda: client.engine.load.running == 1)
    assert not await client.engine.drain(0)
    error = await refusal(client, 503)
    assert "shutting down" in error["message"]
    release.set()
    assert (await first)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_its_request(connect: Connect, stream: bool) -> None:
    """The session is closed and the turn is free, though the chain never answers."""
    client = await connect(engine(Script(hold=asyncio.Event())), network=True)
    waiting = asyncio.ensure_future(client.http.post(PATH, json={**HI, "stream": stream}))
    await until(lambda: client.engine.load.running == 1)
    waiting.cancel()
    await until(lambda: client.engine.load.running == 0)
    assert client.engine.cluster.session.closed


async def test_an_error_in_the_middle_of_a_stream(connect: Connect) -> None:
    """What came before it is there, and the error comes as the last event."""
    client = await connect(engine(Script(failures={2: Unavailable("stage 1 has died")})))
    events = await client.stream(PATH, HI)
    assert text([data for _, data in events[:-1]]) == "he"
    assert events[-1][1]["error"]["message"] == "stage 1 has died"


async def test_an_error_before_the_first_token_has_a_status(connect: Connect) -> None:
    """A stream that has not begun is refused like a whole answer."""
    client = await connect(engine(Script(failures={0: Unavailable("stage 1 has died")})))
    assert (await refusal(client, 503, stream=True))["message"] == "stage 1 has died"


async def test_keys(connect: Connect) -> None:
    """A server with keys answers those who show one of them."""
    client = await connect(engine(), "secret", "other")
    assert (await client.post(PATH, HI))[0] == 401
    assert (await client.post(PATH, HI, authorization="Bearer wrong"))[0] == 401
    assert (await client.post(PATH, HI, authorization="Bearer secret"))[0] == 200
    assert (await client.post(PATH, HI, **{"x-api-key": "other"}))[0] == 200


async def test_bodies_that_are_no_json(connect: Connect) -> None:
    """A 400 says what is wrong with the body."""
    client = await connect(engine())
    for content, words in ((b"{", "not JSON"), (b"", "empty"), (b'{"a": NaN}', "NaN"), (b"\xff", "not UTF-8")):
        reply = await client.http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
