"""/v1/completions over a scripted engine: echoes and log-probabilities of answer and prompt, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.http.logprobs import CompletionLogprobs, vllm_prompt_logprobs
from services.messages.inference_types import PromptToken
from services.messages.steps import TokenLogprobs
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import END, Script, byte_tokenizer, engine, model_files, says

PATH = "/v1/completions"


async def whole(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a reply."""
    status, reply = await client.post(PATH, {"prompt": "hi", **fields})
    assert status == 200, reply
    choices: list[dict[str, Any]] = reply["choices"]
    return choices


async def streamed(client: Client, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together from their parts. Only a choice's first part tells of the prompt."""
    events = await client.stream(PATH, {"prompt": "hi", **fields})
    assert events[-1][1] == "[DONE]"
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": None, "finish_reason": None} for _ in range(count)]
    for _, chunk in events[:-1]:
        [part] = chunk["choices"]
        choice = choices[part["index"]]
        assert "prompt_logprobs" not in part or "index" not in choice
        choice["text"] += part.pop("text")
        if (logprobs := part.pop("logprobs")) is not None:
            before = choice["logprobs"] or {name: [] for name in logprobs}
            choice["logprobs"] = {name: [*before[name], *logprobs[name]] for name in logprobs}
        choice.update(part)
    return choices


async def test_an_echo_has_the_prompt_s_log_probabilities(connect: Connect) -> None:
    """One entry for each token of prompt and answer in OpenAI's form, the first null. max_tokens may be 0."""
    client = await connect(engine(Script(says("ok"))))
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0}
    for max_tokens, answer, reason in ((1, ["o"], "length"), (0, [], "length"), (9, ["o", "k", "<|im_end|>"], "stop")):
        [choice] = await whole(client, **fields, max_tokens=max_tokens)
        tokens = ["h", "i", *answer]
        shown = "".join(tokens).removesuffix("<|im_end|>")
        assert (choice["text"], choice["finish_reason"]) == (shown, reason)
        assert "prompt_logprobs" not in choice
        others = len(tokens) - 1
        assert choice["logprobs"] == {
            "tokens": tokens,
            "token_logprobs": [None] + [-0.5] * others,
            "top_logprobs": [None, *({token: -0.5, "A": -0.5} for token in tokens[1:])],
            "text_offset": list(range(len(tokens))),
        }
        assert await streamed(client, **fields, max_tokens=max_tokens) == [choice]
    [choice] = await whole(client, max_tokens=1, logprobs=1)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("o", ["o"])
    [choice] = await whole(client, max_tokens=1, echo=True)
    assert (choice["text"], choice["logprobs"]) == ("hio", None)


async def test_prompt_logprobs_as_vllm_has_them(connect: Connect) -> None:
    """With each choice, by token id: the token itself with its rank, then the most probable; apart from the echo."""
    client = await connect(engine())
    [choice] = await whole(client, prompt_logprobs=2, max_tokens=1)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -0.5, "rank": 3, "decoded_token": "i"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -0.5, "rank": 2, "decoded_token": "B"},
        },
    ]
    assert (choice["text"], choice["logprobs"]) == ("h", None)
    assert await streamed(client, prompt_logprobs=2, max_tokens=1) == [choice]
    # Each of two wishes gets as many as it asked for.
    [choice] = await whole(client, prompt_logprobs=0, logprobs=2, echo=True, max_tokens=1)
    assert choice["prompt_logprobs"] == [None, {"105": {"logprob": -0.5, "rank": 3, "decoded_token": "i"}}]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 3, 3]


async def test_lists_of_prompts_and_several_choices(connect: Connect) -> None:
    """Each choice tells of its own prompt: texts and token ids, of different lengths."""
    client = await connect(engine())
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 1, "n": 2, "prompt_logprobs": 0}
    for prompts in (["a", "bcd"], [[97], [98, 99, 100]]):
        choices = await whole(client, prompt=prompts, **fields)
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"] for choice in choices] == ["ah", "ah", "bcdh", "bcdh"]
        assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "h"]] * 2 + [["b", "c", "d", "h"]] * 2
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [1, 1, 3, 3]
        assert await streamed(client, 4, prompt=prompts, **fields) == choices


async def test_special_tokens_of_a_prompt_are_echoed(connect: Connect) -> None:
    """The text is the prompt as it was sent, and every token stands where its offset says."""
    client = await connect(engine())
    prompt = "<|im_start|>user\nh€<|im_end|>"
    [choice] = await whole(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    assert choice["text"] == f"{prompt}h"
    logprobs = choice["logprobs"]
    # The three bytes of the character are three tokens, which begin where it does.
    assert logprobs["tokens"][7:10] == ["\N{REPLACEMENT CHARACTER}"] * 3
    assert logprobs["text_offset"] == [0, 12, 13, 14, 15, 16, 17, 18, 18, 18, 19, 29]
    [same] = await whole(client, prompt=[END + 1, *b"user\nh", *"€".encode(), END], echo=True, logprobs=0, max_tokens=1)
    assert (same["text"], same["logprobs"]) == (choice["text"], logprobs)


async def test_without_a_tokenizer_tokens_are_numbers(connect: Connect) -> None:
    """There is no text then, and every token still has its number."""
    client = await connect(engine(files=model_files(tokenizer=False)))
    [choice] = await whole(client, prompt=[5, 6], echo=True, logprobs=0, prompt_logprobs=0, max_tokens=0)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("", ["token_id:5", "token_id:6"])
    assert choice["prompt_logprobs"] == [None, {"6": {"logprob": -0.5, "rank": 3, "decoded_token": None}}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprobs": 21}, "logprobs", "given 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "given 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "given -1"),
        ({"max_tokens": -1}, "max_tokens", "given -1"),
        ({"best_of": 17}, "best_of", "given 17"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; it must be at least n, which is 2"),
        ({"best_of": 2, "stream": True}, "best_of", "leave out stream, or best_of"),
        ({"prompt_logprobs": 0, "prefill_compression": "always"}, "prefill_compression", "leave out one of them"),
        ({"echo": True, "logprobs": 0, "prefill_compression": "always"}, "prefill_compression", "the whole prompt"),
    ],
)
async def test_refusals(connect: Connect, fields: dict[str, Any], param: str, words: str) -> None:
    """The field, its value and what would be accepted."""
    client = await connect(engine())
    status, reply = await client.post(PATH, {"prompt": "hi", **fields})
    assert (status, reply["error"]["param"]) == (400, param)
    assert words in reply["error"]["message"]


async def test_a_prompt_that_fills_the_context_can_be_scored(connect: Connect) -> None:
    """With max_tokens 0 no place is left free for an answer."""
    client = await connect(engine(max_model_len=8))
    fields: dict[str, Any] = {"prompt": "12345678", "echo": True, "logprobs": 0}
    [choice] = await whole(client, **fields, max_tokens=0)
    assert len(choice["logprobs"]["tokens"]) == 8
    status, _ = await client.post(PATH, {**fields, "max_tokens": 1})
    assert status == 400


def test_tokens_that_look_alike_do_not_hide_the_most_probable() -> None:
    """Parts of characters have one text, which gets the greatest number: whoever compares sees a greedy token."""
    entry = TokenLogprobs(-3.0, (0xE2, 0xE3, 65), (-0.25, -2.0, -2.5), 4)
    part = CompletionLogprobs(byte_tokenizer(), 3).of_answer([0x82], [entry])
    assert part["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -0.25, "A": -2.5}]


def test_the_logarithm_of_0_can_be_written() -> None:
    """JSON has no infinity; the number is OpenAI's."""
    entry = TokenLogprobs(float("-inf"), (65, 66), (0.0, float("-inf")), 300)
    part = CompletionLogprobs(byte_tokenizer(), 2).of_prompt([PromptToken(67), PromptToken(67, entry)])
    assert part["token_logprobs"] == [None, -9999.0]
    assert part["top_logprobs"] == [None, {"C": -9999.0, "A": 0.0, "B": -9999.0}]
    [_, by_id] = vllm_prompt_logprobs(byte_tokenizer(), [PromptToken(67), PromptToken(67, entry)], 2)
    assert by_id is not None
    assert [by_id[token]["logprob"] for token in ("67", "65", "66")] == [-9999.0, 0.0, -9999.0]
