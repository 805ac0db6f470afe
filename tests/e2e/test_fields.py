"""Fields that change an answer, by the SDKs of OpenAI and Anthropic over a real server."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx2
import openai
import pydantic
import pytest

from services.messages.inference_types import Conversation, Delta, GenerateRequest, Message, Stopping
from services.messages.sampling import SamplingParams
from services.net.channel import connect
from services.rpc.inference import RemoteInference
from tests.e2e.qwen import INTRODUCTION
from tests.e2e.server import Server
from tests.shard_worker.schemas import fits

ASK: Any = [{"role": "user", "content": "Calculate 4729 + 3485."}]
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["sum"],
    "additionalProperties": False,
}
GBNF = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "b/c"\n'
LARK = 'start: "SELECT " column " FROM t"\ncolumn: "a" | "b/c"\n'
WHOLE_SELECT = re.compile(r"SELECT (a|b/c) FROM t")


@pytest.fixture(scope="module")
def server(qwen_server: Server) -> Server:
    return qwen_server


# --- what the answer must be


def is_a_sum(text: str) -> bool:
    return fits(json.loads(text), SUM)


BOUNDS: list[tuple[dict[str, Any], Any]] = [
    ({"guided_json": SUM}, is_a_sum),
    ({"guided_json": json.dumps(SUM)}, is_a_sum),
    ({"guided_regex": r"a/b[0-9]{3}\.\n?c"}, re.compile(r"a/b[0-9]{3}\.\n?c").fullmatch),
    ({"guided_choice": ["four", 'grün / "five"']}, {"four", 'grün / "five"'}.__contains__),
    ({"guided_grammar": LARK}, WHOLE_SELECT.fullmatch),
    ({"structured_outputs": {"json": SUM}}, is_a_sum),
    ({"structured_outputs": {"regex": "(yes|no)!"}}, {"yes!", "no!"}.__contains__),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
    ({"structured_outputs": {"grammar": LARK}}, WHOLE_SELECT.fullmatch),
    ({"structured_outputs": {"json_object": True}}, lambda text: text.lstrip().startswith("{")),
]


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        # By one of the two names alone: what they mean is read in one place.
        pytest.param(
            fields,
            holds,
            id=json.dumps(fields)[:40],
            marks=pytest.mark.slow if place in {5, 6, 8, len(BOUNDS) - 1} else (),
        )
        for place, (fields, holds) in enumerate(BOUNDS)
    ],
)
def test_an_answer_is_what_it_must_be(client: openai.OpenAI, fields: dict[str, Any], holds: Any) -> None:
    """vLLM's fields bind chats and plain prompts alike; streamed the same text comes."""
    drawn: Any = {"model": "qwen", "max_tokens": 60, "temperature": 1, "seed": 4, "extra_body": fields}
    chat = client.chat.completions.create(messages=ASK, **drawn).choices[0]
    assert holds(chat.message.content), chat.message
    plain = client.completions.create(prompt="Calculate 4729 + 3485.", **drawn).choices[0]
    assert holds(plain.text), plain.text
    pieces = client.completions.create(prompt="Calculate 4729 + 3485.", stream=True, **drawn)
    assert "".join(piece.choices[0].text for piece in pieces) == plain.text


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        pytest.param(*BOUNDS[place], id=name, marks=() if name == "json" else pytest.mark.slow)
        for place, name in enumerate(("json", "regex", "choice", "grammar"), 1)
    ],
)
def test_thinking_comes_before_what_must_be(client: openai.OpenAI, fields: dict[str, Any], holds: Any) -> None:
    """Where the template lets the model think first, only what comes behind is bound."""
    chat = client.chat.completions.create(
        model="qwen",
        messages=[{"role": "user", "content": INTRODUCTION}],
        max_tokens=100,
        temperature=0,
        extra_body={**fields, "chat_template_kwargs": {"enable_thinking": True}},
    ).choices[0]
    assert chat.finish_reason == "stop"
    assert holds(chat.message.content), chat.message
    assert (chat.message.model_extra or {})["reasoning_content"]


def test_grammars_in_gbnf_and_the_format_of_completions(client: openai.OpenAI) -> None:
    """A grammar as vLLM's examples write it is taken, and response_format binds a completion."""
    gbnf = client.chat.completions.create(model="qwen", messages=ASK, extra_body={"guided_grammar": GBNF})
    assert WHOLE_SELECT.fullmatch(gbnf.choices[0].message.content or "")
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}
    plain = client.completions.create(
        model="qwen", prompt="Calculate.", max_tokens=60, extra_body={"response_format": schema}
    )
    assert is_a_sum(plain.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "("}, "guided_regex", "guided_regex cannot be used"),
        ({"guided_json": "{"}, "guided_json", "it must be a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "it must be a list of texts"),
        ({"guided_grammar": "no grammar"}, "guided_grammar", "guided_grammar cannot be used"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "give one of them"),
        ({"structured_outputs": {}}, "structured_outputs", "give it one of"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "it must be true"),
    ],
)
def test_bounds_that_cannot_be_held(client: openai.OpenAI, fields: Any, param: str, words: str) -> None:
    """The refusal names the client's own field, whatever API it came by."""
    for ask in (
        lambda: client.chat.completions.create(model="qwen", messages=ASK, extra_body=fields),
        lambda: client.completions.create(model="qwen", prompt="x", extra_body=fields),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.param == param
        assert words in str(caught.value)


# --- which tokens may come, and what of the end is text


def answer(client: openai.OpenAI, **fields: Any) -> tuple[str, int, str]:
    """The text of a greedy chat, its tokens and why it ended; with a draft it is the same as without."""
    answers = set()
    for speculate in (True, False):
        reply = client.chat.completions.create(
            model="qwen",
            messages=[{"role": "user", "content": "Calculate 2 + 3."}],
            temperature=0,
            max_tokens=50,
            extra_body={**fields, "speculate": speculate},
        )
        assert reply.usage is not None
        choice = reply.choices[0]
        answers.add((choice.message.content or "", reply.usage.completion_tokens, choice.finish_reason))
    [found] = answers
    return found


@pytest.mark.slow
def test_min_tokens(client: openai.OpenAI) -> None:
    """The answer begins as without, and no end comes before so many tokens, by a stop token or by a stop string."""
    text, tokens, reason = answer(client)
    assert reason == "stop"
    longer, more, _ = answer(client, min_tokens=tokens + 9)
    assert more >= tokens + 9
    assert longer.startswith(text)
    stop = text[:3]
    assert answer(client, stop=[stop])[0] == ""
    assert answer(client, stop=[stop], min_tokens=tokens - 1)[0].startswith(text[: len(text) - 8])
    with pytest.raises(openai.BadRequestError, match="min_tokens is 51; it must be at most max_tokens, 50"):
        answer(client, min_tokens=51)


@pytest.mark.slow
def test_bad_words_and_allowed_tokens(client: openai.OpenAI, server: Server) -> None:
    """A word of the answer no longer comes when it is bad; where tokens are allowed, no other ones do."""
    text, _, _ = answer(client)
    assert " = " in text
    assert " = " not in answer(client, bad_words=["="])[0]
    with pytest.raises(openai.BadRequestError, match="bad_words has ''"):
        answer(client, bad_words=[""])
    tokenize = {"prompt": "0 1 2 3 4 5 6 7 8 9"}
    digits = httpx2.post(f"{server.url}/tokenize", json=tokenize).json()["tokens"]
    numbers, _, reason = answer(client, allowed_token_ids=digits)
    assert (re.fullmatch(r"[0-9 ]+", numbers) is not None, reason) == (True, "length")
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids has -1; they must be from 0"):
        answer(client, allowed_token_ids=[-1])


@pytest.mark.slow
def test_the_end_as_text(client: openai.OpenAI) -> None:
    """The stop string and special tokens are text where a client wants them."""
    text, _, _ = answer(client)
    stop = text[4:7]
    assert answer(client, stop=[stop])[0] == text[: text.index(stop)]
    assert answer(client, stop=[stop], include_stop_str_in_output=True)[0] == text[: text.index(stop) + 3]
    assert answer(client, include_stop_str_in_output=True)[0] == text
    special = answer(client, include_stop_str_in_output=True, skip_special_tokens=False)[0]
    assert special.startswith(text)
    assert special.endswith("<|im_end|>")


async def test_the_same_over_grpc(client: openai.OpenAI, server: Server) -> None:
    """gRPC takes the same parameters, and the answers are those of HTTP."""
    fields: dict[str, Any] = {"min_tokens": 20, "bad_words": ["="], "stop": [" 5"], "include_stop_str_in_output": True}
    text, tokens, _ = answer(client, **fields)
    channel = await connect(server.grpc, timeout_s=5)
    request = GenerateRequest(
        Conversation((Message("user", "Calculate 2 + 3."),)),
        SamplingParams(temperature=0.0, min_tokens=20, bad_words=("=",)),
        Stopping(50, (" 5",), include_stop_str_in_output=True),
    )
    deltas = [event async for event in RemoteInference(channel, "the server").answer(request)]
    await channel.close()
    told = [event for event in deltas if isinstance(event, Delta)]
    assert "".join(delta.text for delta in told) == text
    assert sum(len(delta.token_ids) for delta in told) == tokens >= 20


# --- Anthropic's


class Sum(pydantic.BaseModel):
    """What a client of Anthropic's parses an answer into."""

    a: int
    carry: bool


def test_messages_parse(claude: anthropic.Anthropic) -> None:
    """The SDK gets an object of its class, and a bad schema names the client's field."""
    fields: Any = {"model": "qwen", "max_tokens": 100, "messages": ASK}
    parsed = claude.messages.parse(**fields, output_format=Sum)
    assert isinstance(parsed.parsed_output, Sum)
    with pytest.raises(anthropic.BadRequestError, match="output_config.format cannot be used"):
        claude.messages.create(**fields, output_config={"format": {"type": "json_schema", "schema": {"type": "no"}}})


@pytest.mark.slow
def test_thinking_blocks(claude: anthropic.Anthropic) -> None:
    """Enabled they come, streamed too; disabled they don't."""
    fields: Any = {"model": "qwen", "max_tokens": 1100, "messages": [{"role": "user", "content": INTRODUCTION}]}
    on: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**fields, **on)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    with claude.messages.stream(**fields, **on) as stream:
        assert [block.to_dict() for block in stream.get_final_message().content] == [
            block.to_dict() for block in whole.content
        ]
    short: Any = {**fields, "max_tokens": 40}
    off = claude.messages.create(**short, thinking={"type": "disabled"}, extra_body={"temperature": 0})
    assert "thinking" not in [block.type for block in off.content]


async def test_an_answer_that_has_begun_goes_on(
    client: openai.OpenAI, claude: anthropic.Anthropic, server: Server
) -> None:
    """Over every API the rest of the greedy answer comes behind its beginning."""
    whole, _, _ = answer(client)
    begun: Any = [
        {"role": "user", "content": "Calculate 2 + 3."},
        {"role": "assistant", "content": whole[: whole.index(" =")]},
    ]
    rest = whole[whole.index(" =") :]
    message = claude.messages.create(model="qwen", max_tokens=50, messages=begun, extra_body={"temperature": 0})
    assert message.content[0].to_dict()["text"] == rest
    chat = client.chat.completions.create(
        model="qwen", max_tokens=50, messages=begun, temperature=0, extra_body={"continue_final_message": True}
    )
    assert chat.choices[0].message.content == rest
    channel = await connect(server.grpc, timeout_s=5)
    talk = Conversation(tuple(Message(**turn) for turn in begun), continue_final_message=True)
    remote = RemoteInference(channel, "the server")
    deltas = remote.answer(GenerateRequest(talk, SamplingParams(temperature=0.0), Stopping(50)))
    assert "".join([event.text async for event in deltas if isinstance(event, Delta)]) == rest
    assert len(await remote.tokenize(talk)) == message.usage.input_tokens
    await channel.close()
