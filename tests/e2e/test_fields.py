"""Fields that change an answer, by the SDKs of OpenAI and Anthropic over a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.qwen import INTRODUCTION, write_qwen
from tests.e2e.server import DEMO, Server, serving
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    model = write_qwen(folder / "qwen")
    pair = ("--model", model, "--draft", DEMO / "draft", "--dtype", "float32")
    with serving(folder, *pair, "--target-devices", "cpu", "--served-model-name", "qwen") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


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


@pytest.mark.parametrize(("fields", "holds"), BOUNDS, ids=[json.dumps(fields)[:40] for fields, _ in BOUNDS])
def test_an_answer_is_what_it_must_be(client: openai.OpenAI, fields: dict[str, Any], holds: Any) -> None:
    """vLLM's fields bind chats and plain prompts alike; streamed the same text comes."""
    drawn: Any = {"model": "qwen", "max_tokens": 60, "temperature": 1, "seed": 4, "extra_body": fields}
    chat = client.chat.completions.create(messages=ASK, **drawn).choices[0]
    assert holds(chat.message.content), chat.message
    plain = client.completions.create(prompt="Calculate 4729 + 3485.", **drawn).choices[0]
    assert holds(plain.text), plain.text
    pieces = client.completions.create(prompt="Calculate 4729 + 3485.", stream=True, **drawn)
    assert "".join(piece.choices[0].text for piece in pieces) == plain.text


@pytest.mark.parametrize(("fields", "holds"), [*BOUNDS[1:5]], ids=["json", "regex", "choice", "grammar"])
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
