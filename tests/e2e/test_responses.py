"""OpenAI's Responses API through its own SDK, against `flashsplit serve` over the demo pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server import PAIR, serving

ASK = "You do sums, and show how. " * 4 + "Calculate 4729 + 3485."


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("serve")
    with (
        serving(folder, *PAIR, "--target-devices", "cpu", "--served-model-name", "demo") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def test_whole_streamed_and_chat_say_the_same(client: openai.OpenAI) -> None:
    """One text four ways: a whole reply, raw events, the SDK's stream helper, and chat completions."""
    chat = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": ASK}], temperature=0)
    whole = client.responses.create(model="demo", input=ASK, temperature=0, metadata={"a": "b"})
    events = list(client.responses.create(model="demo", input=ASK, temperature=0, stream=True))
    with client.responses.stream(model="demo", input=ASK, temperature=0) as stream:
        helped = [event.type for event in stream]
        final = stream.get_final_response()

    assert whole.output_text == chat.choices[0].message.content
    assert final.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert whole.status == "completed"
    assert whole.metadata == {"a": "b"}
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.total_tokens == chat.usage.total_tokens
    assert whole.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens

    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds[-1] == helped[-1] == "response.completed"


@pytest.mark.slow
def test_items_make_the_conversation_of_chat(client: openai.OpenAI) -> None:
    """Instructions and messages in parts are the same prompt, token for token, as a chat's messages."""
    messages: Any = [
        {"role": "system", "content": "You do sums.\n\nBriefly."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": ASK},
    ]
    items: Any = [
        {"role": "developer", "content": "Briefly."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
        },
        {"role": "user", "content": ASK},
    ]
    chat = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    made = client.responses.create(
        model="demo",
        instructions="You do sums.",
        input=items,
        temperature=0,
        store=False,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        reasoning={"effort": "low"},
        truncation="auto",
        prompt_cache_key="k",
    )
    again = client.responses.create(
        model="demo", instructions="You do sums.", input=[*items, *made.output], temperature=0, max_output_tokens=1
    )

    assert chat.usage is not None
    assert made.usage is not None
    assert again.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.output_text == chat.choices[0].message.content
    assert again.usage.input_tokens > made.usage.input_tokens


def test_a_limit_leaves_it_incomplete(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="demo", input=ASK, temperature=0, max_output_tokens=5)
    *_, last = client.responses.create(model="demo", input=ASK, temperature=0, max_output_tokens=5, stream=True)

    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 5


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
        ({"background": True}, "background", "stream"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "function_call_output"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "developer"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "input_text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "1"}]}, "input.0.arguments", "JSON object"),
        ({"input": "long " * 5000}, "input", "reduce the length"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"max_output_tokens": 100000}, "max_output_tokens", "100000"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "function"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "required"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client: openai.OpenAI, fields: dict[str, Any], param: str, says: str) -> None:
    body: dict[str, Any] = {"model": "demo", "input": ASK, **fields}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            client.post("/responses", body={**body, "stream": stream}, cast_to=object)
        assert refused.value.param == param
