"""From what a client asks for to the engine's request: defaults, limits, prompts, and refusals by field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator.api.engine_requests import (
    check_model,
    compressed_text,
    make_request,
    max_counted_tokens,
    naming,
    plain_prompt,
    render,
    template_chat,
    text_of,
    tool_call,
)
from coordinator.engine.context_overflow import ContextOverflow
from coordinator.text.generation_defaults import GenerationDefaults
from coordinator.text.prompt import Prompt
from services.errors import InvalidArgument, NotFound
from services.messages.inference_types import CompressionMode, CompressionParams, Conversation, Message, Stopping
from services.messages.sampling import SamplingParams
from services.telemetry.trace_context import calling
from tests.coordinator.fakes import END, engine, model_files

PROMPT = Prompt((1, 2, 3), boundaries=(2,))


def refused(error: type[Exception] = InvalidArgument) -> Any:
    return pytest.raises(error)


# --- requests


async def test_a_request_that_says_nothing() -> None:
    """It gets the context's room, a plain prompt 16 tokens, the model's own stop tokens, and the sampling defaults."""
    made = await make_request(engine(), PROMPT, SamplingParams(), Stopping(), chat=True)
    assert (made.prompt_ids, made.boundaries, made.max_tokens) == ((1, 2, 3), (2,), 4093)
    assert (await make_request(engine(), PROMPT, SamplingParams(), Stopping())).max_tokens == 16
    assert (made.stop_token_ids, made.stop_strings) == ({END}, ())
    assert replace(made.sampling, seed=None) == SamplingParams(temperature=1.0)
    assert made.speculate
    assert made.logprobs is None


async def test_the_room_of_a_small_context() -> None:
    """Without a limit an answer gets what the prompt leaves."""
    assert (await make_request(engine(max_model_len=10), PROMPT, SamplingParams(), Stopping())).max_tokens == 7


async def test_the_models_own_defaults() -> None:
    """They hold where the client says nothing, and nowhere else."""
    served = engine()
    defaults = GenerationDefaults(SamplingParams(temperature=0.6, top_k=20), 50)
    served.files = replace(served.files, defaults=defaults)
    made = await make_request(served, PROMPT, SamplingParams(top_k=0), Stopping(), chat=True)
    assert (made.max_tokens, made.sampling.temperature, made.sampling.top_k) == (50, 0.6, None)
    made = await make_request(served, PROMPT, SamplingParams(temperature=1), Stopping(60), chat=True)
    assert (made.max_tokens, made.sampling.temperature, made.sampling.top_k) == (60, 1, 20)
    assert (await make_request(served, PROMPT, SamplingParams(), Stopping())).max_tokens == 16


async def test_a_prompt_that_leaves_no_room() -> None:
    """It is refused by the client's name of it."""
    with refused() as error:
        await make_request(engine(max_model_len=3), PROMPT, SamplingParams(), Stopping(), prompt_field="messages")
    assert (error.value.where["field"], error.value.reason) == ("messages", "CONTEXT_OVERFLOW")


async def test_where_an_answer_ends() -> None:
    """Stop tokens come beside the model's own, or alone with ignore_eos; empty stop strings mean nothing."""
    stopping = Stopping(5, ("x", ""), (7,))
    made = await make_request(engine(), PROMPT, SamplingParams(), stopping)
    assert (made.max_tokens, made.stop_strings, made.stop_token_ids) == (5, ("x",), {7, END})
    made = await make_request(engine(), PROMPT, SamplingParams(), replace(stopping, ignore_eos=True))
    assert made.stop_token_ids == {7}


async def test_ids_come_from_the_call() -> None:
    """Within a call a request has its id and its trace, outside each gets a new one."""
    served = engine()
    with calling("mine", []) as call:
        made = await make_request(served, PROMPT, SamplingParams(), Stopping())
        assert (made.request_id, made.trace) == ("mine", call.trace)
    ids = {(await make_request(served, PROMPT, SamplingParams(), Stopping())).request_id for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("sampling", "stopping", "field"),
    [
        (SamplingParams(temperature=101), Stopping(), "temperature"),
        (SamplingParams({2**31: 1.0}), Stopping(), "logit_bias"),
        (SamplingParams(), Stopping(stop=("x",) * 65), "stop"),
        (SamplingParams(), Stopping(stop_token_ids=(258,)), "stop_token_ids"),
        (SamplingParams(), Stopping(stop_token_ids=(5,) * 20_000), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=(5,) * 20_000), Stopping(), "allowed_token_ids"),
        (SamplingParams(bad_words=("x",) * 257), Stopping(), "bad_words"),
    ],
)
async def test_requests_are_refused_by_field(sampling: SamplingParams, stopping: Stopping, field: str) -> None:
    """The refusal names what the client called it."""
    with refused() as error:
        await make_request(engine(), PROMPT, sampling, stopping)
    assert error.value.where["field"] == field


def test_models() -> None:
    """None and the served names pass."""
    served = engine(aliases=("other-name",))
    for name in (None, "demo", "other-name"):
        check_model(served, name)
    with refused(NotFound) as error:
        check_model(served, "gpt-9")
    assert (error.value.reason, error.value.where["field"]) == ("MODEL_NOT_FOUND", "model")


# --- prompts


async def test_plain_prompts() -> None:
    """Text is tokenised, ids are taken as they are."""
    served = engine()
    assert (await plain_prompt(served, "hé")).token_ids == tuple("hé".encode())
    assert (await plain_prompt(served, "a<|im_end|>", add_special_tokens=False)).token_ids == (97, END)
    assert (await plain_prompt(served, [5, 6])).token_ids == (5, 6)


async def test_a_model_without_a_tokenizer_reads_ids_only() -> None:
    """Text, chats and detokenising are refused; ids go through."""
    served = engine(files=model_files(None, tokenizer=False))
    assert (await plain_prompt(served, [5])).token_ids == (5,)
    with refused() as error:
        await plain_prompt(served, "x")
    assert error.value.where["field"] == "prompt"
    with refused() as error:
        await render(served, await template_chat(Conversation((Message("user", "hi"),))))
    assert error.value.where["field"] == "messages"
    with refused() as error:
        await text_of(served, [5], "tokens")
    assert error.value.where["field"] == "tokens"


async def test_prompts_beyond_the_context() -> None:
    """Whatever they are made of, they are refused with the numbers before they are rendered or tokenised as a whole."""
    served = engine(max_model_len=100)
    words = "word " * 200_000
    many = Conversation(tuple(Message("user", "") for _ in range(201)))
    for prompt, field, says in (
        (words, "prompt", "at least "),
        ("x" * 201, "prompt", "(201 in the prompt"),
        ([5] * 201, "prompt", "(201 in the prompt"),
        (Conversation((Message("user", words),)), "conversation", "at least "),
        (many, "conversation", "at least 201 in the messages"),
    ):
        chat = await template_chat(prompt) if isinstance(prompt, Conversation) else None
        made = plain_prompt(served, prompt) if chat is None else render(served, chat)  # type: ignore[arg-type]
        with pytest.raises(ContextOverflow) as error:
            await made
        assert error.value.where["field"] == field
        assert says in error.value.message
        assert "maximum context length is 100 tokens" in error.value.message


async def test_tokens_are_counted_beyond_the_context() -> None:
    """A prompt that is only counted may be longer than what is answered, up to a limit of its own."""
    served = engine(max_model_len=100)
    most = max_counted_tokens(served)
    assert len((await plain_prompt(served, "x" * 1000, most=most)).token_ids) == 1000
    with pytest.raises(ContextOverflow):
        await plain_prompt(served, "x" * (most + 1), most=most)
    with refused() as error:
        await text_of(served, [5] * (most + 1), "tokens")
    assert error.value.where["field"] == "tokens"


async def test_chats_are_rendered() -> None:
    """The prompt is the template's text, with boundaries where turns end."""
    chat = await template_chat(Conversation((Message("system", "s"), Message("user", "u"))))
    prompt = await render(engine(), chat)
    assert prompt.text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.boundaries
    assert list(prompt.boundaries) == sorted(prompt.boundaries)


async def test_a_chat_s_variables_must_not_be_the_request_s_own() -> None:
    """The names that the request fills in are refused."""
    with refused() as error:
        await render(engine(), await template_chat(Conversation((Message("user", "u"),), variables={"tools": []})))
    assert error.value.where["field"] == "chat_template_kwargs"


async def test_compression_needs_a_server_that_can() -> None:
    """Always is refused without a model for it; auto and off change nothing."""
    served, prompt = engine(), Prompt((1, 2), text="ab")
    for mode in (None, CompressionMode.OFF, CompressionMode.AUTO):
        assert await compressed_text(served, prompt, CompressionParams(mode)) == prompt
    with refused() as error:
        await compressed_text(served, prompt, CompressionParams(CompressionMode.ALWAYS))
    assert error.value.where["field"] == "prefill_compression"


# --- tools


async def test_tool_calls_of_a_conversation() -> None:
    """Their arguments become objects, as templates write them themselves."""
    calls = json.dumps([{"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}, {"function": {"name": "g"}}])
    [message] = (await template_chat(Conversation((Message("assistant", tool_calls=calls),)))).messages
    assert message["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}},
        {"type": "function", "id": None, "function": {"name": "g", "arguments": {}}},
    ]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("{}", "must be the JSON text of an array of objects"),
        ("[1]", "must be the JSON text of an array of objects"),
        ("[" * 5000, "must be the JSON text of an array of objects"),
        ('[{"id": "c"}]', 'each needs "function" with a "name"'),
        ('[{"function": {"name": "f", "arguments": "[]"}}]', "they must be a JSON object"),
    ],
)
async def test_tool_calls_of_another_form_are_refused(calls: str, text: str) -> None:
    """The refusal names the message."""
    with pytest.raises(InvalidArgument, match=text.replace("[", r"\[")) as error:
        await template_chat(Conversation((Message("user", "u"), Message("assistant", tool_calls=calls))))
    assert error.value.where["field"] == "messages.1.tool_calls"


async def test_tools_must_be_objects() -> None:
    """The refusal names the conversation's field."""
    with refused() as error:
        await template_chat(Conversation((Message("user", "u"),), tools='["f"]'))
    assert error.value.where["field"] == "conversation.tools"


def test_arguments_may_be_an_object_already() -> None:
    """APIs that send objects need not write them as text first."""
    assert tool_call("c", "f", {"x": 1}, 0) == {
        "type": "function",
        "id": "c",
        "function": {"name": "f", "arguments": {"x": 1}},
    }


def test_refusals_without_a_field_get_one() -> None:
    """One that names a field keeps it."""
    with refused() as error, naming("prompt"):
        raise InvalidArgument("no")
    assert error.value.where["field"] == "prompt"
    with refused() as error, naming("prompt"):
        raise InvalidArgument("no", field="stop")
    assert error.value.where["field"] == "stop"
