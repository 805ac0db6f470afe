"""Tool calls and thinking through every chat API, by the SDKs of those who made them, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.qwen import CALLED, INTRODUCTION
from tests.e2e.server import Server
from tests.shard_worker.schemas import fits

ASK: Any = [{"role": "user", "content": INTRODUCTION}]
SUM: Any = [{"role": "user", "content": "Calculate 4729 + 3485."}]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99999} for name in "ab"},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "greet": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FLAT_TOOLS: Any = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
BLOCK_TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def server(qwen_server: Server) -> Server:
    return qwen_server


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def reasoning_of(message: Any) -> str | None:
    thought: str | None = (message.model_extra or {}).get("reasoning_content")
    return thought


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """A streamed chat, put together by the SDK."""
    with client.chat.completions.stream(model="qwen", **fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0]


# --- /v1/chat/completions


def test_a_call_of_the_models_own_accord(client: openai.OpenAI) -> None:
    """`auto`: the call is taken out of the text, which goes on behind it; streamed the arguments come in pieces."""
    fields: Any = {"messages": ASK, "tools": CHAT_TOOLS, "temperature": 0}
    whole = client.chat.completions.create(model="qwen", **fields).choices[0]
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(model="qwen", stream=True, **fields)
        if chunk.choices
    ]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]

    assert calls_of(whole.message) == [CALLED]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
    assert whole.message.content is not None
    assert whole.message.content.startswith("to meet you!")
    assert "".join(chunk.delta.content or "" for chunk in chunks).strip() == whole.message.content
    assert len(pieces) > 2
    assert pieces[0].function is not None
    assert (pieces[0].index, pieces[0].type, pieces[0].function.name) == (0, "function", CALLED[0])
    assert pieces[0].id
    assert all(piece.id is None for piece in pieces[1:])
    arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert json.loads(arguments) == CALLED[1]


def test_none_and_no_tools_leave_text(client: openai.OpenAI) -> None:
    """With `none` the tools aren't even shown: the prompt is that without."""
    none = client.chat.completions.create(
        model="qwen", messages=ASK, tools=CHAT_TOOLS, tool_choice="none", temperature=0
    )
    without = client.chat.completions.create(model="qwen", messages=ASK, temperature=0)

    assert none.choices[0].message == without.choices[0].message
    assert none.choices[0].message.tool_calls is None
    assert "<tool_call>" in (none.choices[0].message.content or "")
    assert none.choices[0].finish_reason == "stop"
    assert none.usage is not None
    assert without.usage is not None
    assert none.usage.prompt_tokens == without.usage.prompt_tokens


ADD: Any = {"type": "function", "function": {"name": "add"}}
GREEDY, DRAWN = {"temperature": 0}, {"temperature": 1.0, "seed": 5}


@pytest.mark.parametrize(
    ("choice", "names", "thinking", "drawn"),
    [
        pytest.param("required", {"add", "greet"}, None, DRAWN, id="required, drawn", marks=pytest.mark.slow),
        pytest.param(ADD, {"add"}, False, GREEDY, id="named, thinking closed, greedy"),
        pytest.param("required", {"add", "greet"}, None, GREEDY, id="required, greedy", marks=pytest.mark.slow),
        pytest.param(ADD, {"add"}, False, DRAWN, id="named, thinking closed, drawn", marks=pytest.mark.slow),
    ],
)
def test_forced_calls_fit_their_schema(
    client: openai.OpenAI, choice: Any, names: set[str], thinking: bool | None, drawn: dict[str, Any]
) -> None:
    """Nothing but a call comes, streamed or not, greedy or drawn, with a draft or without."""
    extra: Any = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    fields: Any = {
        "messages": SUM,
        "tools": CHAT_TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 150,
    }
    whole = client.chat.completions.create(model="qwen", **fields, **drawn, extra_body=extra)
    alone = client.chat.completions.create(model="qwen", **fields, **drawn, extra_body={**extra, "speculate": False})
    pieced = streamed(client, **fields, **drawn, extra_body=extra)

    [(name, arguments)] = calls_of(whole.choices[0].message)
    assert name in names
    assert fits(arguments, SCHEMAS[name])
    assert whole.choices[0].message.content is None
    assert whole.choices[0].finish_reason == pieced.finish_reason == "tool_calls"
    assert calls_of(alone.choices[0].message) == calls_of(pieced.message) == [(name, arguments)]
    assert whole.usage is not None
    assert alone.usage is not None
    assert whole.usage.completion_tokens == alone.usage.completion_tokens


@pytest.mark.slow
def test_parallel_calls(client: openai.OpenAI) -> None:
    """Several calls have ids and indices of their own; each of `n` choices too."""
    fields: Any = {
        "messages": SUM,
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "temperature": 1,
        "seed": 3,
        "max_tokens": 90,
        "n": 2,
    }
    whole = client.chat.completions.create(model="qwen", **fields)
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls or []]
    indices = [
        (chunk.choices[0].index, piece.index)
        for chunk in client.chat.completions.create(model="qwen", stream=True, **fields)
        if chunk.choices
        for piece in chunk.choices[0].delta.tool_calls or []
        if piece.id
    ]

    assert len(calls_of(whole.choices[0].message)) > 1
    assert len(set(ids)) == len(ids) == len(indices)
    assert sorted(indices) == [
        (choice.index, number) for choice in whole.choices for number in range(len(choice.message.tool_calls or []))
    ]
    for choice in whole.choices:
        assert all(fits(arguments, SCHEMAS[name]) for name, arguments in calls_of(choice.message))


def test_a_result_goes_back(client: openai.OpenAI) -> None:
    """The SDK's own message and a tool's result are a prompt that goes on from the one before."""
    first = client.chat.completions.create(model="qwen", messages=ASK, tools=CHAT_TOOLS, temperature=0)
    [call] = first.choices[0].message.tool_calls or []
    messages = [
        *ASK,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Hello Paul!"},
    ]
    second = client.chat.completions.create(
        model="qwen", messages=messages, tools=CHAT_TOOLS, temperature=0, max_tokens=4
    )

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens // 2


def test_reasoning_is_told_apart(client: openai.OpenAI) -> None:
    """Where the prompt opens the thinking it comes on its own, streamed or not, and bound answers begin behind it."""
    bound: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    fields: Any = {"messages": ASK, "temperature": 0, "max_tokens": 60, "extra_body": THINKING}
    free = client.chat.completions.create(model="qwen", **fields).choices[0]
    chunks = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model="qwen", stream=True, **fields)
        if chunk.choices
    ]
    fitting = client.chat.completions.create(model="qwen", **fields, response_format=bound).choices[0]
    plain = client.chat.completions.create(model="qwen", **{**fields, "extra_body": {}}).choices[0]

    assert reasoning_of(free.message)
    assert "think" not in f"{free.message.content}{reasoning_of(free.message)}"
    assert "".join(reasoning_of(delta) or "" for delta in chunks) == reasoning_of(free.message)
    assert "".join(delta.content or "" for delta in chunks) == free.message.content
    assert reasoning_of(fitting.message) == reasoning_of(free.message)
    assert fits(json.loads(fitting.message.content or ""), PERSON)
    assert fitting.finish_reason == "stop"
    assert reasoning_of(plain.message) is None


def test_a_forced_call_behind_thinking(client: openai.OpenAI) -> None:
    """The model thinks first, here briefly, as the token that ends it is made likely."""
    token = client.post("/../tokenize", body={"prompt": "</think>"}, cast_to=object)["tokens"][0]  # type: ignore[index]
    made = client.chat.completions.create(
        model="qwen",
        messages=ASK,
        tools=CHAT_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        seed=1,
        max_tokens=150,
        logit_bias={str(token): 7},
        extra_body=THINKING,
    ).choices[0]

    assert reasoning_of(made.message)
    [(name, arguments)] = calls_of(made.message)
    assert fits(arguments, SCHEMAS[name])
    assert made.finish_reason == "tool_calls"


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    """A choice that cannot be, tools of one name, and parameters that are no schema."""
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "no type"}}}}}
    for fields, param in (
        ({"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": CHAT_TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*CHAT_TOOLS, CHAT_TOOLS[0]]}, "tools"),
        ({"tools": [broken], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/chat/completions", body={"messages": ASK, **fields}, cast_to=object)
        assert refused.value.param == param


# --- /v1/responses


def test_responses_call_functions(client: openai.OpenAI) -> None:
    """The same call as an item, whole and by the stream helper; its output goes back with the reply's own items."""
    whole = client.responses.create(model="qwen", input=INTRODUCTION, tools=FLAT_TOOLS, temperature=0)
    with client.responses.stream(model="qwen", input=INTRODUCTION, tools=FLAT_TOOLS, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    [call] = [item for item in whole.output if item.type == "function_call"]
    again = client.responses.create(
        model="qwen",
        input=[*ASK, *whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Hello!"}],  # type: ignore[arg-type]
        tools=FLAT_TOOLS,
        temperature=0,
        max_output_tokens=4,
    )

    assert (call.name, json.loads(call.arguments)) == CALLED
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param("required", id="required"),
        pytest.param({"type": "function", "name": "add"}, id="named", marks=pytest.mark.slow),
    ],
)
def test_responses_forced(client: openai.OpenAI, choice: Any) -> None:
    made = client.responses.create(
        model="qwen",
        input=SUM,
        tools=FLAT_TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=150,
    )

    [call] = made.output
    assert call.type == "function_call"
    assert fits(json.loads(call.arguments), SCHEMAS[call.name])
    assert made.status == "completed"


def test_responses_think_and_fit(client: openai.OpenAI) -> None:
    """`text.format` over thinking: a reasoning item, then a message that fits."""
    bound: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    fields: Any = {"input": INTRODUCTION, "temperature": 0, "max_output_tokens": 60, "extra_body": THINKING}
    made = client.responses.create(model="qwen", text=bound, **fields)
    with client.responses.stream(model="qwen", text=bound, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()

    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert fits(json.loads(made.output_text), PERSON)
    assert final.output_text == made.output_text
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= kinds
    assert made.usage is not None
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            model="qwen",
            input="x",
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "no type"}}},
        )
    assert refused.value.param == "text.format"


# --- /v1/messages


def test_messages_use_tools(claude: anthropic.Anthropic) -> None:
    """`auto` whole and by the stream helper, and the result sent back as a block."""
    fields: Any = {
        "model": "qwen",
        "messages": ASK,
        "tools": BLOCK_TOOLS,
        "max_tokens": 60,
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    [used] = [block for block in whole.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "Hello!"}]}
    history: Any = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    again = claude.messages.create(**{**fields, "messages": history, "max_tokens": 4})
    counted = claude.messages.count_tokens(model="qwen", messages=history, tools=BLOCK_TOOLS)

    assert (used.name, used.input) == CALLED
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert [block.input for block in final.content if block.type == "tool_use"] == [used.input]
    assert "input_json" in kinds
    read = again.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == again.usage.input_tokens + read
    assert read > 0


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        pytest.param({"type": "any"}, {"add", "greet"}, id="any"),
        pytest.param({"type": "tool", "name": "add"}, {"add"}, id="tool", marks=pytest.mark.slow),
        pytest.param({"type": "none"}, set(), id="none"),
    ],
)
def test_messages_choices(claude: anthropic.Anthropic, choice: Any, names: set[str]) -> None:
    once = {} if choice["type"] == "none" else {"disable_parallel_tool_use": True}
    fields: Any = {
        "model": "qwen",
        # What the model says to this of its own accord is a call, and short.
        "messages": SUM if names else ASK,
        "tools": BLOCK_TOOLS,
        "tool_choice": {**choice, **once},
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    used = [block for block in whole.content if block.type == "tool_use"]

    assert {block.name for block in used} <= names
    assert len(used) == (1 if names else 0)
    assert all(fits(block.input, SCHEMAS[block.name]) for block in used)
    assert whole.stop_reason == final.stop_reason == ("tool_use" if names else "end_turn")
    assert [block.input for block in final.content if block.type == "tool_use"] == [block.input for block in used]


def test_messages_think(claude: anthropic.Anthropic) -> None:
    """Thinking is a block in front of the text, streamed as its own events, and may be sent back."""
    fields: Any = {
        "model": "qwen",
        "max_tokens": 1100,
        "extra_body": {**THINKING, "temperature": 0},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = claude.messages.create(**fields, messages=ASK)
    with claude.messages.stream(**fields, messages=ASK) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    history: Any = [*ASK, {"role": "assistant", "content": whole.content}, *ASK]
    without: Any = [*ASK, {"role": "assistant", "content": whole.content[1:]}, *ASK]

    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == final.content[0].thinking == thought != ""  # type: ignore[union-attr]
    assert whole.content[1].text == final.content[1].text != ""  # type: ignore[union-attr]
    counted = [claude.messages.count_tokens(model="qwen", messages=one) for one in (history, without)]
    assert counted[0].input_tokens > counted[1].input_tokens


def test_messages_refuse_tools_of_others(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        claude.messages.create(
            model="qwen", messages=ASK, max_tokens=1, tools=[{"type": "web_search_20250305", "name": "web_search"}]
        )
