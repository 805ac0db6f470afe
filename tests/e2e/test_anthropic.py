"""Anthropic's own SDK against `flashsplit serve` over the demo pair on two workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.server import PAIR, Server, serving

ASK: Any = [{"role": "user", "content": "Calculate 4729 + 3485."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), *PAIR, "--target-devices", "cpu,cpu", "--api-key", "k") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0, timeout=60) as made:
        yield made


def test_messages_whole_and_streamed(client: anthropic.Anthropic) -> None:
    """The same text both ways, events in Anthropic's order, usage that adds up."""
    whole = client.messages.create(model="target", messages=ASK, max_tokens=200, extra_body={"temperature": 0})
    with client.messages.stream(model="target", messages=ASK, max_tokens=200, extra_body={"temperature": 0}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events]
    [delta] = [event for event in events if event.type == "message_delta"]

    [block] = whole.content
    assert block.type == "text"
    assert "8214" in block.text
    assert whole.stop_reason == "end_turn"
    assert final.content[0].text == block.text  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.cache_read_input_tokens is not None
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    for told in (whole.model_extra, delta.model_extra):
        assert told is not None
        assert told["timings"]["acceptance_length"] > 4
        assert told["timings"]["predicted_n"] == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.index("content_block_start") < kinds.index("content_block_stop") < kinds.index("message_delta")


def test_system_blocks_and_stops(client: anthropic.Anthropic) -> None:
    """System prompts and content as blocks; stop sequences and limits tell which ended the answer."""
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "Calculate 4729 + 3485."}]}]
    stopped = client.messages.create(
        model="target",
        system=[{"type": "text", "text": "You do sums."}],
        messages=blocks,
        max_tokens=200,
        extra_body={"temperature": 0},
        stop_sequences=["carry"],
        metadata={"user_id": "u"},
    )
    cut = client.messages.create(model="target", messages=ASK, max_tokens=3, extra_body={"temperature": 0})

    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == "carry"
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 3


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="target", messages=ASK, system="You do sums.")
    answered = client.messages.create(model="target", messages=ASK, system="You do sums.", max_tokens=1)

    assert counted.input_tokens == answered.usage.input_tokens + (answered.usage.cache_read_input_tokens or 0)


def test_what_is_beyond_the_context_is_refused_in_anthropics_words(client: anthropic.Anthropic) -> None:
    """A prompt that is too long by itself, and one with which the answer asked for is."""
    prompt = client.messages.count_tokens(model="target", messages=ASK).input_tokens
    long: Any = [{"role": "user", "content": "word " * 5000}]
    counted = client.messages.count_tokens(model="target", messages=long).input_tokens
    for messages, most, words in (
        (long, 1, f"prompt is too long: {counted} tokens > 4096 maximum"),
        (
            ASK,
            4096,
            f"input length and `max_tokens` exceed context limit: {prompt} + 4096 > 4096, decrease input length or "
            "`max_tokens` and try again",
        ),
    ):
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.messages.create(model="target", messages=messages, max_tokens=most, stream=stream)
            assert refused.value.body["error"] == {"type": "invalid_request_error", "message": words}  # type: ignore[index]


def test_refusals(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=ASK, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model="target", messages=[{"role": "user", "content": [{"type": "image"}]}], max_tokens=1
        )  # type: ignore[list-item]
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="target", messages=ASK, max_tokens=0)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(
            model="target", messages=ASK, max_tokens=1
        )


def test_models_and_request_ids(client: anthropic.Anthropic) -> None:
    """The names of the model in the published form, in pages too; each reply, errors as well, has its id."""
    [model] = list(client.models.list(limit=1))
    assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", "target", "target", "active")
    assert model.max_input_tokens
    assert model.created_at.year > 2020
    assert client.models.retrieve("target") == model
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.request_id
    assert client.messages.create(model="target", messages=ASK, max_tokens=1)._request_id


def test_thinking_of_a_model_that_knows_none(client: anthropic.Anthropic) -> None:
    """It is refused where it is asked for, with what would be taken: what leaves it to the model."""
    fields: Any = {"model": "target", "messages": ASK, "max_tokens": 1100}
    with pytest.raises(anthropic.BadRequestError, match="thinking switches thinking on.*give the type adaptive"):
        client.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
    for kind in ("adaptive", "disabled"):
        message = client.messages.create(**fields, thinking={"type": kind}, extra_body={"temperature": 0})
        assert [block.type for block in message.content] == ["text"]
