"""Answers of Gemma 4 through the HTTP APIs: its channel becomes reasoning, its calls are calls, whole and streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.engine.engine import Engine
from coordinator.text.model_files import read_model_files
from coordinator.text.parsers.tags import (
    END_GEMMA_CALL,
    END_GEMMA_CHANNEL,
    GEMMA_CALL,
    GEMMA_CHANNEL,
    GEMMA_QUOTE,
    TAGS,
)
from tests.coordinator.api.http import test_anthropic, test_chat
from tests.coordinator.api.http.conftest import Connect
from tests.coordinator.fakes import Script, byte_tokenizer, engine, model_files
from tests.reference import checkpoints

TEMPLATE = (
    "{%- for m in messages %}{{- '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|turn>model\n' }}"
    "{%- if not enable_thinking | default(false) %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}{%- endif %}"
    "{#- <|tool_call>call: -#}"
)
MARKS = (GEMMA_CALL, END_GEMMA_CALL, GEMMA_QUOTE, GEMMA_CHANNEL, END_GEMMA_CHANNEL, "<|turn>", "<turn|>")
THOUGHT = f"{GEMMA_CHANNEL}thought\nA sum.\n{END_GEMMA_CHANNEL}"
CALL = f"{GEMMA_CALL}call:add{{a:[1,{GEMMA_QUOTE}é{GEMMA_QUOTE}]}}{END_GEMMA_CALL}"
SWITCH = {"chat_template_kwargs": {"enable_thinking": True}}


def says(text: str) -> Engine:
    """An engine whose model says this text and ends its turn, its marks as special tokens."""
    tokenizer = byte_tokenizer(*MARKS)
    end = tokenizer.token_id("<turn|>")
    assert end is not None
    files = replace(model_files(TEMPLATE), tokenizer=tokenizer, stop_token_ids=frozenset({end}))
    return engine(Script((*tokenizer.encode(text, add_special_tokens=False), end)), files=files)


async def test_reasoning_and_text(connect: Connect) -> None:
    """Whether tools are offered or not; where the template has closed the thinking, all is text."""
    client = await connect(says(f"{THOUGHT}It is é."))
    for fields in (SWITCH, SWITCH | {"tools": [test_chat.ADD]}):
        [choice] = (await test_chat.whole(client, **fields))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "It is é.", "reasoning_content": "A sum."}
        parts = await test_chat.chunks(client, **fields)
        assert test_chat.text(parts, field="reasoning_content") == "A sum."
        assert test_chat.text(parts) == "It is é."
    client = await connect(says("Plain."))
    assert (await test_chat.whole(client))["choices"][0]["message"]["content"] == "Plain."


async def test_a_call(connect: Connect) -> None:
    """In OpenAI's shape and in Anthropic's; a text in its arguments needs marks that are special tokens."""
    client = await connect(says(f"One moment.{CALL}"))
    [choice] = (await test_chat.whole(client, tools=[test_chat.ADD]))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": [1, "é"]}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "One moment.")
    text, called = test_anthropic.blocks(await test_anthropic.events(client, tools=[test_anthropic.ADD]))
    assert (text["text"], called["name"], called["json"]) == ("One moment.", "add", '{"a": [1, "é"]}')


async def test_what_binds_the_answer_comes_behind_the_channel(connect: Connect) -> None:
    """A call that must be made may be thought about first where the template leaves that open."""
    client = await connect(says(f"{THOUGHT}{CALL}"))
    forced: dict[str, Any] = {"tools": [test_chat.ADD], "tool_choice": "required"}
    opening = client.engine.cluster
    await test_chat.whole(client, **forced, **SWITCH)
    start = 'start: (<|channel> "thought" thinking)? call'
    assert start in opening.session.opening["grammar"].text
    assert "thinking: /(?s:.*)/ <channel|>" in opening.session.opening["grammar"].text
    await test_chat.whole(client, **forced)
    assert "thinking" not in opening.session.opening["grammar"].text
    assert set(MARKS[:5]) < set(TAGS)


def test_calls_and_turns_end_an_answer_whatever_the_configuration_says(tmp_path: Path) -> None:
    """Where the template is of this format: results would come behind a call."""
    path = checkpoints.write_gemma4(tmp_path / "model", layers=2)
    tokenizer = byte_tokenizer("<turn|>", "<|tool_response>")
    (path / "tokenizer.json").write_text(tokenizer._backend.to_str(), encoding="utf-8")
    before = read_model_files(path).stop_token_ids
    (path / "chat_template.jinja").write_text(TEMPLATE)
    added = {tokenizer.token_id("<turn|>"), tokenizer.token_id("<|tool_response>")}
    assert read_model_files(path).stop_token_ids == before | added
