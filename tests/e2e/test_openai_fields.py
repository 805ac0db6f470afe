"""Every field of OpenAI's chat completions and completions that means something here, over speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.messages.inference_types import Conversation, Delta, GenerateRequest, Message, Stopping
from services.messages.sampling import SamplingParams
from services.net.channel import connect
from services.rpc.inference import RemoteInference
from tests.e2e.conftest import generate
from tests.e2e.server import PAIR, Server, serving
from tests.shard_worker.schemas import fits

ASK: Any = [{"role": "user", "content": "Calculate 4729 + 3485."}]
STORY: Any = [{"role": "user", "content": "Tell me a story."}]
CODE = "def add(a, b):"
CARRY = 1171  # " carry", which the answer to ASK says
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


def ask(client: openai.OpenAI, messages: Any = ASK, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **fields)


def tokens_of(reply: Any) -> list[str]:
    """The tokens of a chat's first choice, as text."""
    return [entry.token for entry in reply.choices[0].logprobs.content]


# --- the same tokens


async def test_one_seed_through_every_door(client: openai.OpenAI, server: Server) -> None:
    """HTTP, gRPC and the command line draw the same tokens at temperature 1."""
    sampling: Any = {"temperature": 1.0, "top_p": 0.95, "seed": 17}
    said = generate(
        *PAIR, "--target-devices", "cpu", "--threads", 1, "--chat", "--prompt", STORY[0]["content"],
        *("--max-tokens", 24, "--temperature", 1.0, "--top-p", 0.95, "--seed", 17),
    )  # fmt: skip
    reply = ask(client, STORY, max_tokens=24, logprobs=True, **sampling)
    channel = await connect(server.grpc, timeout_s=5)
    talk = Conversation((Message("user", STORY[0]["content"]),))
    grpc_client = RemoteInference(channel, "the server")
    events = [
        event async for event in grpc_client.answer(GenerateRequest(talk, SamplingParams(**sampling), Stopping(24)))
    ]
    ids = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    texts = [await grpc_client.detokenize((token,)) for token in ids]
    await channel.close()

    assert ids == said["token_ids"]
    assert tokens_of(reply) == texts
    assert reply.choices[0].message.content == said["text"]


@pytest.fixture
def first_client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """A client of a server that has answered nothing yet, and so drafts, whatever it will find its drafts to be
    worth."""
    arguments = ("--target-devices", "cpu,cpu", "--served-model-name", "demo")
    with (
        serving(tmp_path, *PAIR, *arguments) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


OBJECT: Any = {"type": "json_object"}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
HOT: Any = {"temperature": 1.0, "seed": 4}


@pytest.mark.parametrize(
    ("bound", "sampling"),
    [
        pytest.param(OBJECT, HOT, id="object-drawn"),
        pytest.param(SCHEMA, {"temperature": 0}, id="schema-greedy"),
        pytest.param(OBJECT, {"temperature": 0}, id="object-greedy", marks=pytest.mark.slow),
        pytest.param(SCHEMA, HOT, id="schema-drawn", marks=pytest.mark.slow),
    ],
)
def test_bound_answers_over_speculation(first_client: openai.OpenAI, bound: Any, sampling: Any) -> None:
    """JSON with the draft is the JSON without it, token by token, and streams as itself."""
    fields: Any = {
        "messages": [{"role": "user", "content": "Describe a cat in JSON, please."}],
        "response_format": bound,
        "max_tokens": 120,
        "logprobs": True,
        **sampling,
    }
    fast = ask(first_client, **fields)
    plain = ask(first_client, **fields, extra_body={"speculate": False})
    chunks = [chunk for chunk in ask(first_client, **fields, stream=True) if chunk.choices]

    assert tokens_of(fast) == tokens_of(plain)
    assert fast.choices[0].message.content == plain.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == fast.choices[0].message.content
    assert fast.timings["draft_n"] > 0
    assert plain.timings["draft_n"] == 0
    if fast.choices[0].finish_reason == "stop":
        value = json.loads(fast.choices[0].message.content)
        assert isinstance(value, dict)
        assert bound["type"] == "json_object" or fits(value, PERSON)
    else:
        assert bound["type"] == "json_object"


# --- what is told of tokens


def test_logprobs_streamed_are_the_whole_ones(client: openai.OpenAI) -> None:
    """Each token once, in order, also those whose text is held back for a stop string; the most probable beside it."""
    fields: Any = {"temperature": 0, "logprobs": True, "top_logprobs": 4, "stop": ["carry 1.\nAdd the ones"]}
    whole = ask(client, **fields).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in ask(client, **fields, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]

    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-3)
    for entry in whole:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob <= 0
    assert ask(client, temperature=0, max_tokens=2).choices[0].logprobs is None
    assert all(not entry.top_logprobs for entry in ask(client, logprobs=True, max_tokens=2).choices[0].logprobs.content)


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_completions(client: openai.OpenAI, echo: bool) -> None:
    """Streamed pieces put together are the whole, offsets into the text included; an echo has the prompt's before."""
    fields: Any = {
        "model": "demo", "prompt": CODE, "temperature": 0, "max_tokens": 14, "logprobs": 3, "echo": echo,
        "stop": ["never said"],
    }  # fmt: skip
    reply = client.completions.create(**fields)
    whole = reply.choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]

    assert whole.logprobs is not None
    assert [token for part in parts for token in part.tokens or []] == whole.logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == whole.logprobs.text_offset
    assert "".join(chunk.text for chunk in chunks) == whole.text
    for token, offset in zip(whole.logprobs.tokens or [], whole.logprobs.text_offset or [], strict=True):
        assert whole.text[offset : offset + len(token)] == token
    prompt_tokens = reply.usage.prompt_tokens if echo and reply.usage else 0
    assert len(whole.logprobs.tokens or []) == prompt_tokens + 14
    top_logprobs: Any = whole.logprobs.top_logprobs
    # A token of the prompt stands beside the most probable ones where it is none of them.
    assert [len(top or ()) for top in top_logprobs[:prompt_tokens]] == ([0, 4, 3, 3, 3, 3, 3] if echo else [])
    assert all(len(top) == 3 for top in top_logprobs[prompt_tokens:])
    assert [number is None for number in whole.logprobs.token_logprobs or []].count(True) == echo


def test_offsets_of_special_tokens(client: openai.OpenAI) -> None:
    """Where special tokens have text, the offsets of those behind them count it."""
    tokenized: Any = client.post("/../tokenize", body={"prompt": "<|im_end|>"}, cast_to=object)
    extra: Any = {"allowed_token_ids": [*tokenized["tokens"], CARRY], "ignore_eos": True}
    for shown in (True, False):
        choice = client.completions.create(
            model="demo", prompt=CODE, max_tokens=12, logprobs=0, seed=1, temperature=100,
            extra_body={**extra, "skip_special_tokens": not shown},
        ).choices[0]  # fmt: skip
        assert choice.logprobs is not None
        assert set(choice.logprobs.tokens or []) == {"<|im_end|>", " carry"}
        for token, offset in zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True):
            if shown or token != "<|im_end|>":
                assert choice.text[offset : offset + len(token)] == token


@pytest.mark.slow
def test_a_large_reply(client: openai.OpenAI) -> None:
    """Megabytes of log-probabilities, which are sent bit by bit, are the same whole and streamed."""
    fields: Any = {
        "model": "demo", "prompt": list(range(100, 900)), "echo": True, "logprobs": 20, "max_tokens": 0,
        "extra_body": {"prompt_logprobs": 20},
    }  # fmt: skip
    whole = client.completions.create(**fields).choices[0]
    [chunk, *_] = client.completions.create(**fields, stream=True)
    assert whole.logprobs is not None
    assert len(whole.logprobs.tokens or []) == 800
    assert chunk.choices[0].logprobs == whole.logprobs
    assert chunk.choices[0].model_extra == whole.model_extra
    assert len(whole.to_json()) > 1 << 20


async def test_a_prompt_is_scored_alike_by_every_api(client: openai.OpenAI, server: Server) -> None:
    """Its echo, vLLM's form of a completion and of a chat, and gRPC's: the same numbers, and no answer unless asked."""
    chat: Any = client.post("/../tokenize", body={"messages": ASK}, cast_to=object)["tokens"]  # type: ignore[index]
    fields: Any = {"model": "demo", "max_tokens": 0, "echo": True, "logprobs": 2, "extra_body": {"prompt_logprobs": 2}}
    reply = client.completions.create(prompt=chat, **fields)
    [choice] = reply.choices
    with ask(client, max_tokens=1, stream=True, extra_body={"prompt_logprobs": 2}) as stream:
        told = next(iter(stream))
    channel = await connect(server.grpc, timeout_s=5)
    asked = GenerateRequest(tuple(chat), stopping=Stopping(0), prompt_logprobs=2)
    events = [event async for event in RemoteInference(channel, "the server").answer(asked)]
    await channel.close()

    prompt = [token for event in events if isinstance(event, Delta) for token in event.prompt]
    assert [token.token_id for token in prompt] == chat
    numbers = [None if token.logprobs is None else token.logprobs.logprob for token in prompt]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == numbers
    assert (choice.finish_reason, reply.usage and reply.usage.completion_tokens) == ("length", 0)
    by_id: Any = choice.model_extra["prompt_logprobs"] if choice.model_extra else None
    assert by_id == told.model_extra["prompt_logprobs"]
    assert [entry and entry[str(token)]["logprob"] for token, entry in zip(chat, by_id, strict=True)] == numbers
    assert client.completions.create(prompt=chat, **fields).usage == reply.usage


@pytest.mark.slow
def test_the_best_of_several_completions(client: openai.OpenAI) -> None:
    """Those of the highest mean log-probability of a token, best first; usage counts all of them."""
    fields: Any = {"model": "demo", "prompt": ["Once upon", CODE], "max_tokens": 8, "temperature": 1.5, "seed": 3}
    candidates = client.completions.create(**fields, n=4, logprobs=0)
    best = client.completions.create(**fields, n=2, best_of=4, echo=True)

    def mean(choice: Any) -> float:
        numbers: list[float] = choice.logprobs.token_logprobs
        return sum(numbers) / len(numbers)

    expected = []
    for first, prompt in ((0, fields["prompt"][0]), (4, fields["prompt"][1])):
        ranked = sorted(candidates.choices[first : first + 4], key=mean, reverse=True)
        expected += [prompt + choice.text for choice in ranked[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [(choice.index, choice.logprobs) for choice in best.choices] == [(index, None) for index in range(4)]
    assert best.usage is not None
    assert candidates.usage is not None
    assert best.usage.completion_tokens == candidates.usage.completion_tokens
    with_numbers = client.completions.create(**fields, n=1, best_of=4, logprobs=1)
    assert [choice.text for choice in with_numbers.choices] == [expected[0][9:], expected[2][len(CODE) :]]
    assert all(choice.logprobs for choice in with_numbers.choices)


def test_usage_and_timings(client: openai.OpenAI) -> None:
    """Usage comes last if it is asked for, and every other chunk says that it will; speculation's figures add up."""
    options: Any = {"include_usage": True}
    long: Any = [{"role": "system", "content": "You do sums, and show how. " * 20}, *ASK]
    greedy: Any = {"temperature": 0, "max_tokens": 40}
    ask(client, long, max_tokens=1)
    first, *middle, last = list(ask(client, long, **greedy, stream=True, stream_options=options))
    without = list(ask(client, **greedy, stream=True))
    whole = ask(client, long, **greedy)
    text = list(client.completions.create(model="demo", prompt=CODE, max_tokens=4, stream=True, stream_options=options))

    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in [first, *middle])
    assert all("usage" not in chunk.model_fields_set for chunk in without)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
        whole.usage.total_tokens,
    )
    assert text[-1].usage is not None
    assert text[-1].usage.completion_tokens == 4
    assert middle[-1].timings["draft_n_accepted"] == last.usage.completion_tokens_details.accepted_prediction_tokens
    told = whole.timings
    assert told["prompt_n"] + told["cache_n"] == whole.usage.prompt_tokens
    assert told["cache_n"] == whole.usage.prompt_tokens_details.cached_tokens > 0
    assert told["predicted_n"] == whole.usage.completion_tokens
    assert 0 < told["draft_n_accepted"] <= told["draft_n"]
    assert 1 < told["acceptance_length"] <= 16
    rejected = whole.usage.completion_tokens_details.rejected_prediction_tokens
    assert told["draft_n"] == told["draft_n_accepted"] + rejected
    # Kinds and lengths of the blocks that were used.
    assert sum(int(count) * steps for count, steps in told["draft_steps"].items()) == told["draft_n"]
    assert told["lookup_steps"] == {}
    assert sum(told["draft_steps"].values()) + told["plain_steps"] == told["steps"]


@pytest.mark.slow
def test_usage_counts_every_prompt_once_and_every_choice(client: openai.OpenAI) -> None:
    """Streamed and whole, for prompts of different lengths, each with choices of different lengths."""
    options: Any = {"include_usage": True}
    prompts = [CODE, "import os\nimport sys\nfrom pathlib", "x"]
    alone = [client.completions.create(model="demo", prompt=text, max_tokens=1).usage for text in prompts]
    fields: Any = {
        "model": "demo",
        "prompt": prompts,
        "n": 2,
        "max_tokens": 9,
        "temperature": 1,
        "seed": 3,
        "stop": "\n",
    }
    whole = client.completions.create(**fields)
    streamed = list(client.completions.create(**fields, stream=True, stream_options=options))[-1]
    chat = ask(client, STORY, n=3, max_tokens=7)
    chat_streamed = list(ask(client, STORY, n=3, max_tokens=7, stream=True, stream_options=options))[-1]

    expected = sum(usage.prompt_tokens for usage in alone if usage is not None)
    assert len({usage.prompt_tokens for usage in alone if usage is not None}) == 3
    for usage in (whole.usage, streamed.usage):
        assert usage is not None
        assert usage.prompt_tokens == expected
        assert usage.total_tokens == expected + usage.completion_tokens
    assert whole.usage is not None
    assert streamed.usage is not None
    assert 6 <= whole.usage.completion_tokens == streamed.usage.completion_tokens <= 6 * 9
    assert (
        chat.usage.prompt_tokens
        == chat_streamed.usage.prompt_tokens
        == ask(client, STORY, max_tokens=1).usage.prompt_tokens
    )
    assert chat.usage.completion_tokens == chat_streamed.usage.completion_tokens == 3 * 7


@pytest.mark.parametrize("fields", [{"stop": [" "]}, {"stop": ["4"]}, {"max_tokens": 2}, {"max_tokens": 5}], ids=str)
def test_no_more_draft_tokens_are_accepted_than_the_answer_has(client: openai.OpenAI, fields: Any) -> None:
    """Whatever cuts a block that the model agreed with."""
    reply = ask(client, temperature=0, **fields)
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens < reply.usage.completion_tokens <= 13
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == reply.timings["draft_n"]
    assert reply.timings["draft_n_accepted"] == details.accepted_prediction_tokens


# --- what changes the answer


@pytest.mark.slow
def test_choices_streamed(client: openai.OpenAI) -> None:
    """`n` choices interleave in a stream; put together they are the whole reply's, each with its own end."""
    fields: Any = {"n": 3, "temperature": 1.5, "seed": 2, "max_tokens": 12}
    whole = ask(client, STORY, **fields)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in ask(client, STORY, **fields, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    prompts = client.completions.create(model="demo", prompt=[CODE, "import "], n=2, temperature=0, max_tokens=3)

    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert [choice.index for choice in prompts.choices] == [0, 1, 2, 3]
    assert prompts.choices[0].text == prompts.choices[1].text != prompts.choices[2].text == prompts.choices[3].text


@pytest.mark.slow
def test_more_prompts_than_run_and_wait_at_once(client: openai.OpenAI) -> None:
    """One request is never its own crowd."""
    made = client.completions.create(model="demo", prompt=[CODE] * 90, temperature=0, max_tokens=1)
    assert len({choice.text for choice in made.choices}) == 1
    assert len(made.choices) == 90


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 40},
        *(
            # Steps with numbers for tokens go one way, whatever the numbers come of.
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                {"frequency_penalty": 2.0},
                {"extra_body": {"repetition_penalty": 1.8}},
                {"logit_bias": {str(CARRY): -100}},
            )
        ),
        {"extra_body": {"stop_token_ids": [CARRY]}},
        {"max_completion_tokens": 20},
        {"stop": "write"},
    ],
    ids=lambda fields: next(iter(fields.get("extra_body", fields))),
)
def test_a_field_changes_the_answer_in_the_same_way_speculated_or_not(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    base: Any = {"temperature": 0, "logprobs": True, "max_tokens": 40}
    base |= {"max_tokens": None} if "max_completion_tokens" in fields else {}
    plain = ask(client, **base, **{**fields, "extra_body": {**fields.get("extra_body", {}), "speculate": False}})
    fast = ask(client, **base, **fields)

    assert tokens_of(fast) == tokens_of(plain)
    assert fast.choices[0].message.content == plain.choices[0].message.content
    assert tokens_of(fast) != tokens_of(ask(client, temperature=0, logprobs=True, max_tokens=40))


def test_narrow_sampling_is_greedy(client: openai.OpenAI) -> None:
    """top_k 1, a tiny top_p and min_p 1 leave one token each, however hot."""
    greedy = ask(client, temperature=0, max_tokens=16).choices[0].message.content
    for fields in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        hot = ask(client, temperature=1.5, seed=1, max_tokens=16, **fields)
        assert hot.choices[0].message.content == greedy
    off = [
        ask(client, STORY, temperature=1, seed=1, max_tokens=12, extra_body=extra).choices[0].message.content
        for extra in ({}, {"top_k": -1}, {"top_k": 0, "min_p": 0})
    ]
    assert off[0] == off[1] == off[2]


def test_what_real_clients_send_besides(client: openai.OpenAI) -> None:
    """Fields of other servers and of other features are taken; nulls are as good as nothing; parts are text."""
    plain = ask(client, temperature=0, max_tokens=5)
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Calculate ", "4729 + 3485.")]}]
    taken = ask(
        client,
        parts,
        temperature=0,
        max_tokens=5,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
        stop=None,
        seed=None,
        tools=[],
        response_format={"type": "text"},
        extra_body={
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "include": [],
            "tool_choice": None,
            "stream_options": None,
            "logit_bias": None,
            "best_of": 1,
            "add_generation_prompt": True,
            "skip_special_tokens": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        extra_headers={"OpenAI-Organization": "o", "x-stainless-lang": "python", "x-request-id": "mine"},
    )
    assert taken.choices[0].message.content == plain.choices[0].message.content
    assert taken.usage.prompt_tokens == plain.usage.prompt_tokens


LONG_CHAT: Any = [{"role": "user", "content": "word " * 5000}]


def test_what_is_beyond_the_context_is_refused_in_openais_words(client: openai.OpenAI) -> None:
    """Clients find out by these words, or by the code, that they should shorten a conversation."""
    prompt = ask(client, max_tokens=1).usage.prompt_tokens
    for limit in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **{limit: 4096})
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.body["message"] == (  # type: ignore[index]
            f"This model's maximum context length is 4096 tokens. However, you requested {prompt + 4096} tokens "
            f"({prompt} in the messages, 4096 in the completion). "
            "Please reduce the length of the messages or completion."
        )
    words = r"This model's maximum context length is 4096 tokens\. However, you requested (\d+) tokens "
    refusals: list[tuple[str, str, Any]] = [
        ("messages", r"\((\d+) in the messages, 1 in", lambda: ask(client, LONG_CHAT, stream=True)),
        ("messages", r"\((\d+) in the messages, 7 in", lambda: ask(client, LONG_CHAT, max_tokens=7)),
        ("input", r"\((\d+) in the input, 1 in", lambda: client.responses.create(model="demo", input=LONG_CHAT)),
        (
            "prompt",
            r"\((\d+) in the prompt, 1 in",
            lambda: client.completions.create(model="demo", prompt=[5] * 5000, max_tokens=1),
        ),
    ]
    for param, detail, send in refusals:
        with pytest.raises(openai.BadRequestError, match=words + detail) as refused:
            send()
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)


@pytest.mark.slow
async def test_the_async_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole = await client.chat.completions.create(model="demo", messages=ASK, temperature=0)
        stream = await client.chat.completions.create(model="demo", messages=ASK, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        raw = await client.chat.completions.with_raw_response.create(
            model="demo", messages=ASK, max_tokens=1, extra_headers={"x-request-id": "mine"}
        )
        assert [model.id async for model in client.models.list()] == ["demo"]

    assert text == whole.choices[0].message.content
    assert raw.headers["x-request-id"] == "mine"


def test_tokens(client: openai.OpenAI) -> None:
    """/tokenize counts what a chat is charged for; /detokenize gives the prompt back."""
    chat: Any = client.post("/../tokenize", body={"messages": ASK}, cast_to=object)
    text: Any = client.post("/../tokenize", body={"model": "demo", "prompt": "naïve 😀"}, cast_to=object)
    again: Any = client.post("/../detokenize", body={"tokens": text["tokens"]}, cast_to=object)

    assert chat["count"] == len(chat["tokens"]) == ask(client, max_tokens=1).usage.prompt_tokens
    assert again == {"prompt": "naïve 😀"}
    ids = client.completions.create(model="demo", prompt=chat["tokens"], temperature=0, max_tokens=5)
    assert ids.choices[0].text == ask(client, temperature=0, max_tokens=5).choices[0].message.content
