"""Answers in Harmony through the HTTP APIs: channels become reasoning, text and calls, whole and streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.engine.engine import Engine
from coordinator.text.model_files import read_model_files
from coordinator.text.parsers.tags import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tests.coordinator.api.http import test_anthropic, test_chat
from tests.coordinator.api.http.conftest import Connect
from tests.coordinator.fakes import Script, byte_tokenizer, engine, model_files
from tests.reference import checkpoints

TEMPLATE = (
    "{%- for m in messages %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}{#- <|channel|> -#}"
)
THOUGHT = f"{CHANNEL}analysis{MESSAGE}A sum.{END}{START}assistant"
TEXT = f"{THOUGHT}{CHANNEL}final{MESSAGE}It is é.{RETURN}"
CALLING = (
    f"{THOUGHT}{CHANNEL}commentary{MESSAGE}One moment.{END}{START}assistant"
    f'{CHANNEL}commentary to=functions.add {CONSTRAIN}json{MESSAGE}{{"a": [1, "é"]}}{CALL}'
)


def says(text: str, **more: Any) -> Engine:
    """An engine whose model says this text, its markers as special tokens; the last one ends the answer."""
    tokenizer = byte_tokenizer(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
    stops = frozenset(token for tag in (CALL, RETURN) if (token := tokenizer.token_id(tag)) is not None)
    files = replace(model_files(TEMPLATE), tokenizer=tokenizer, stop_token_ids=stops, **more)
    return engine(Script(tuple(tokenizer.encode(text, add_special_tokens=False))), files=files)


async def test_reasoning_and_text(connect: Connect) -> None:
    """In OpenAI's shape and in Anthropic's, whether tools are offered or not, and whatever text tokens shall have."""
    client = await connect(says(TEXT))
    for fields in ({}, {"tools": [test_chat.ADD]}, {"skip_special_tokens": True}):
        [choice] = (await test_chat.whole(client, **fields))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "It is é.", "reasoning_content": "A sum."}
        assert choice["finish_reason"] == "stop"
        parts = await test_chat.chunks(client, **fields)
        assert test_chat.text(parts, field="reasoning_content") == "A sum."
        assert test_chat.text(parts) == "It is é."
    expected = [{"type": "thinking", "thinking": "A sum.", "signature": ""}, {"type": "text", "text": "It is é."}]
    assert (await test_anthropic.whole(client))["content"] == expected
    assert test_anthropic.blocks(await test_anthropic.events(client)) == expected


async def test_a_call(connect: Connect) -> None:
    """What comes before it is text, its arguments stream in pieces, and it ends the answer."""
    client = await connect(says(CALLING))
    [choice] = (await test_chat.whole(client, tools=[test_chat.ADD]))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": [1, "é"]}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "One moment.")
    assert choice["message"]["reasoning_content"] == "A sum."
    parts = await test_chat.chunks(client, tools=[test_chat.ADD])
    calls = [call for delta in test_chat.deltas(parts) for call in delta.get("tool_calls", ())]
    assert len(calls) > 3
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": [1, "é"]}'
    assert test_chat.text(parts) == "One moment."
    thought, text, called = test_anthropic.blocks(await test_anthropic.events(client, tools=[test_anthropic.ADD]))
    assert (thought["thinking"], text["text"], called["name"]) == ("A sum.", "One moment.", "add")
    assert called["json"] == '{"a": [1, "é"]}'


async def test_what_binds_the_answer_leaves_room_for_reasoning(connect: Connect) -> None:
    """A call that must be made and JSON that must be written come behind the markers that lead to them."""
    client = await connect(says(CALLING))
    opening = client.engine.cluster
    await test_chat.whole(client, tools=[test_chat.ADD], tool_choice="required")
    assert "commentary to=functions.add" in opening.session.opening["grammar"].text
    await test_chat.whole(client, response_format={"type": "json_object"})
    assert '<|channel|> "final" <|message|> body' in opening.session.opening["grammar"].text


async def test_an_answer_that_was_begun(connect: Connect) -> None:
    """It goes on in the message that the prompt ends with."""
    template = TEMPLATE.replace("m.role + '<|message|>'", "m.role + '<|channel|>final<|message|>'")
    client = await connect(says(f" day.{RETURN}", chat_template=replace_template(template)))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Good"}]
    reply = await test_chat.whole(client, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert reply["choices"][0]["message"]["content"] == " day."


def replace_template(source: str) -> Any:
    return model_files(source).chat_template


async def test_earlier_calls_have_one_text(connect: Connect) -> None:
    """Templates of this format refuse reasoning and content beside calls: both are shown as reasoning then."""
    shown = (
        "{%- for m in messages %}{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{%- endif %}{{- m.role + ':' + (m.thinking or '') + '|' + (m.content or '') + ';' }}{%- endfor %}"
        "{#- <|channel|> <|message|> -#}"
    )
    served = says(TEXT, chat_template=replace_template(shown))
    client = await connect(served)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "One moment.", "reasoning_content": "A sum.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "Done."},
    ]
    await test_chat.whole(client, messages=messages)
    tokenizer = served.files.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(client.engine.cluster.session.forwards[0].token_ids)
    assert prompt == "user:|hi;assistant:A sum.\nOne moment.|;tool:|3;assistant:Done.|It is 3.;"


async def test_thinking_cannot_be_switched_off(connect: Connect) -> None:
    """Its effort can be said, where the template reads it."""
    client = await connect(says(TEXT))
    error = await test_chat.refusal(client, 400, reasoning_effort="none")
    assert "always thinks" in error["message"]
    await test_chat.whole(client, reasoning_effort="low")


@pytest.mark.parametrize("named", [{"reasoning_format": "openai_gptoss"}, {"tool_call_format": "openai"}])
async def test_a_format_that_is_named(connect: Connect, named: dict[str, str]) -> None:
    """It counts where the chat template does not show it."""
    template = replace_template(TEMPLATE.replace("{#- <|channel|> -#}", ""))
    client = await connect(says(TEXT, chat_template=template, **named))
    message = (await test_chat.whole(client))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is é.", "A sum.")


async def test_tags_that_are_named(connect: Connect) -> None:
    """Reasoning between tags, of a model whose template does not show them."""
    plain = model_files().chat_template
    client = await connect(
        says(f"<think>\nhm\n</think>\n\nYes.{RETURN}", reasoning_format="qwen3", chat_template=plain)
    )
    message = (await test_chat.whole(client))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")


def test_a_call_ends_an_answer_whatever_the_configuration_says(tmp_path: Path) -> None:
    """Where the template is of this format."""
    path = checkpoints.write_gpt_oss(tmp_path / "model", layers=2)
    tokenizer = byte_tokenizer(CALL, RETURN)
    (path / "tokenizer.json").write_text(tokenizer._backend.to_str(), encoding="utf-8")
    before = read_model_files(path).stop_token_ids
    (path / "chat_template.jinja").write_text(TEMPLATE)
    assert read_model_files(path).stop_token_ids == before | {tokenizer.token_id(CALL), tokenizer.token_id(RETURN)}
