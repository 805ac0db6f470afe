"""Fields that change an answer or are refused, over a scripted engine: what reaches the model, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from coordinator.api.http.field_decisions import DECISIONS, Accepted, Api, Refused
from coordinator.text.tokenizer import Tokenizer
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import CHATML, THINKER, Script, byte_tokenizer, engine, model_files, says

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"messages": HI},
    Api.COMPLETIONS: {"prompt": "hi"},
    Api.RESPONSES: {"input": "hi"},
    Api.MESSAGES: {"messages": HI, "max_tokens": 64},
}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SWITCHED = CHATML + (
    "{%- if add_generation_prompt and enable_thinking is defined %}"
    "{{- '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- reasoning_effort }}{{- thinking_budget }}{{- verbosity }}"
)
"""A template whose thinking can be switched, and that writes the effort and the budget where it is told them."""


def prompt_of(client: Client) -> str:
    """The prompt that the model saw last."""
    session = client.engine.cluster.session
    tokens = [token for forward in session.forwards for token in forward.token_ids][: session.opening["prompt_length"]]
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)


async def ask(client: Client, api: Api = Api.CHAT, **fields: Any) -> Any:
    status, reply = await client.post(api, {**BODIES[api], **fields})
    assert status == 200, reply
    return reply


async def refused(client: Client, api: Api = Api.CHAT, **fields: Any) -> str:
    """The message of a 400."""
    status, reply = await client.post(api, {**BODIES[api], **fields})
    assert status == 400, reply
    return str(reply["error"]["message"])


# --- the table


@pytest.mark.parametrize("api", Api)
async def test_the_table_holds(connect: Connect, api: Api) -> None:
    """What it refuses is refused by name and value; null, values that ask for nothing and all else are taken."""
    client = await connect(engine())
    decisions = DECISIONS[api]
    for name, decision in decisions.items():
        if isinstance(decision, Refused):
            value = ["message.output_text.logprobs"] if name == "include" else 987
            assert (await refused(client, api, **{name: value})).startswith(f"{name} is ")
            await ask(client, api, **{name: None})
    await ask(client, api, **{name: "any" for name, found in decisions.items() if isinstance(found, Accepted)})
    nothing: dict[str, Any] = {"best_of": 1, "use_beam_search": False, "priority": 0, "logits_processors": []}
    await ask(client, api, **nothing, nobody_knows_this=1)
    assert "use_beam_search is true" in await refused(client, api, use_beam_search=True)
    if api is Api.MESSAGES:
        await ask(client, api, context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
        edits = [{"type": "clear_tool_uses_20250919"}]
        assert "not shortened" in await refused(client, api, context_management={"edits": edits})


# --- answers that have begun


async def test_a_last_message_is_continued(connect: Connect) -> None:
    """The prompt ends with its text, white space at its end too, and the answer is what comes behind it."""
    client = await connect(engine())
    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    chat = await ask(client, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert prompt_of(client) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert chat["choices"][0]["message"]["content"] == "hello"
    message = await ask(client, Api.MESSAGES, messages=begun)
    assert prompt_of(client).endswith("assistant\nWell, ")
    assert message["content"] == [{"type": "text", "text": "hello"}]
    status, count = await client.post("/v1/messages/count_tokens", {"messages": begun})
    assert (status, count) == (200, {"input_tokens": message["usage"]["input_tokens"]})
    _, count = await client.post("/tokenize", {"messages": begun, "continue_final_message": True})
    assert count["count"] == message["usage"]["input_tokens"]
    await ask(client, messages=begun)
    assert prompt_of(client).endswith("Well, <|im_end|>\n<|im_start|>assistant\n")
    await ask(client, add_generation_prompt=False)
    assert prompt_of(client).endswith("hi<|im_end|>\n")


async def test_what_cannot_be_continued(connect: Connect) -> None:
    """Two wishes at once, a message without text, and thinking behind an answer that has begun."""
    client = await connect(engine(template=SWITCHED))
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert "are both true" in await refused(client, **both)
    empty = [*HI, {"role": "assistant", "content": ""}]
    assert "it must have text" in await refused(client, messages=empty, continue_final_message=True)
    begun = [*HI, {"role": "assistant", "content": "Well"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields: Any = {"messages": begun, "thinking": thinking, "max_tokens": 2000}
    assert "an answer that has begun" in await refused(client, Api.MESSAGES, **fields)


# --- thinking


async def test_thinking_is_switched_in_the_template(connect: Connect) -> None:
    """By Anthropic's `thinking` and by OpenAI's efforts; the template's own variables go first."""
    client = await connect(engine(Script(says("hm</think>\n\nYes.")), template=SWITCHED))
    on: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    blocks = (await ask(client, Api.MESSAGES, **on))["content"]
    assert [(block["type"], block.get("thinking")) for block in blocks] == [("thinking", "hm"), ("text", None)]
    assert prompt_of(client).endswith("<think>\n1024")
    on["thinking"]["display"] = "omitted"
    blocks = (await ask(client, Api.MESSAGES, **on))["content"]
    assert [(block["type"], block.get("thinking")) for block in blocks] == [("thinking", ""), ("text", None)]
    for api, fields in (
        (Api.MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
        (Api.CHAT, {"reasoning_effort": "high"}),
        (Api.RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}),
    ):
        await ask(client, api, **fields)
        assert prompt_of(client).endswith("<think>\nhigh")
    await ask(client, verbosity="low")
    assert prompt_of(client).endswith("assistant\nlow")
    await ask(client, Api.RESPONSES, text={"verbosity": "low"})
    assert prompt_of(client).endswith("assistant\nlow")
    for api, fields in (
        (Api.MESSAGES, {"thinking": {"type": "disabled"}}),
        (Api.CHAT, {"reasoning_effort": "none"}),
        (Api.RESPONSES, {"reasoning": {"effort": "none"}}),
        (Api.CHAT, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}),
    ):
        await ask(client, api, **fields)
        assert "</think>" in prompt_of(client)


async def test_thinking_that_the_template_cannot_switch(connect: Connect) -> None:
    """It is refused where the template would do otherwise, and taken where it does so anyway."""
    enabled = {"type": "enabled", "budget_tokens": 1024}
    plain = await connect(engine())
    assert "knows no thinking" in await refused(plain, Api.MESSAGES, thinking=enabled, max_tokens=2000)
    await ask(plain, Api.MESSAGES, thinking={"type": "disabled"})
    await ask(plain, reasoning_effort="none")
    thinker = await connect(engine(template=THINKER))
    assert "always thinks" in await refused(thinker, Api.MESSAGES, thinking={"type": "disabled"})
    assert "reasoning_effort switches thinking off" in await refused(thinker, reasoning_effort="none")
    assert "must be below max_tokens, 64" in await refused(thinker, Api.MESSAGES, thinking=enabled)


# --- tools and documents


async def test_tools_are_said_to_a_template_that_teaches_none(connect: Connect) -> None:
    """The model reads them in the system message, what it calls is a call, and earlier calls are text."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    client = await connect(engine(Script(says(call))))
    tools = [{"type": "function", "function": ADD}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "d", "content": "3"},
    ]
    [choice] = (await ask(client, messages=messages, tools=tools))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    system, _, turns = prompt_of(client).partition("<|im_end|>\n<|im_start|>user\nhi")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '"name": "add"' in system
    assert turns == (
        f"<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    await ask(client, tools=tools, tool_choice="required")
    assert "add" in client.engine.cluster.session.opening["grammar"].text
    assert prompt_of(client).startswith("<|im_start|>system\n# Tools")
    _, count = await client.post("/tokenize", {"messages": HI, "tools": tools})
    assert count["count"] == client.engine.cluster.session.opening["prompt_length"]
    await ask(client, tools=tools, tool_choice="none")
    assert "# Tools" not in prompt_of(client)
    blocks = {"tools": [{"name": "add", "input_schema": ADD["parameters"]}], "messages": HI}
    message = await ask(client, Api.MESSAGES, **blocks)
    assert message["content"][0]["input"] == {"a": 1}
    _, count = await client.post("/v1/messages/count_tokens", blocks)
    assert count == {"input_tokens": message["usage"]["input_tokens"]}


async def test_documents_reach_a_template_that_reads_them(connect: Connect) -> None:
    """And are refused for another one."""
    reads = CHATML + "{%- for document in documents or [] %}{{- document.text }}{%- endfor %}"
    client = await connect(engine(template=reads))
    await ask(client, documents=[{"title": "t", "text": "It rains."}])
    assert prompt_of(client).endswith("It rains.")
    assert "reads none" in await refused(await connect(engine()), documents=[{"text": "x"}])


# --- prompts


async def test_prompts_are_truncated_from_the_left(connect: Connect) -> None:
    """The last tokens stay, echoed too; -1 leaves as much room as max_tokens needs."""
    client = await connect(engine(max_model_len=64))
    reply = await ask(client, Api.COMPLETIONS, prompt="abcdef", truncate_prompt_tokens=2, echo=True)
    assert reply["choices"][0]["text"] == "efhello"
    assert reply["usage"]["prompt_tokens"] == 2
    reply = await ask(client, Api.COMPLETIONS, prompt="x" * 100, truncate_prompt_tokens=-1, max_tokens=10)
    assert reply["usage"]["prompt_tokens"] == 54
    chat = await ask(client, messages=[{"role": "user", "content": "x" * 100}], truncate_prompt_tokens=20)
    assert chat["usage"]["prompt_tokens"] == 20


async def test_a_suffix_is_filled_in_by_a_model_that_can(connect: Connect) -> None:
    """The prompt has the model's own marks; another model refuses the field."""
    alphabet = {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwxyz")}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    coder = await connect(engine(files=replace(model_files(), tokenizer=Tokenizer(backend))))
    await ask(coder, Api.COMPLETIONS, prompt="ab", suffix="yz")
    assert coder.engine.cluster.session.forwards[0].token_ids == (26, 0, 1, 27, 24, 25, 28)
    assert "needs a prompt of text" in await refused(coder, Api.COMPLETIONS, prompt=[1, 2], suffix="yz")
    assert "prompt is an empty list" in await refused(coder, Api.COMPLETIONS, prompt=[], suffix="yz")
    assert "at most 1024 are taken" in await refused(coder, Api.COMPLETIONS, prompt=["a"] * 1025, suffix="yz")
    assert "has no such tokens" in await refused(await connect(engine()), Api.COMPLETIONS, suffix="yz")
