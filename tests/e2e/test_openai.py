"""OpenAI's own SDK against `flashsplit serve` over the demo pair on two workers."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import generate
from tests.e2e.server import PAIR, Server, get, serving

ASK = [{"role": "user", "content": "Calculate 4729 + 3485."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("serve"),
        *PAIR,
        *("--target-devices", "cpu,cpu", "--served-model-name", "demo", "--served-model-name", "gpt-4o-mini"),
        *("--max-concurrent-requests", 4, "--max-waiting-requests", 40, "--metrics-compat", "vllm"),
    ) as running:
        yield running


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "gpt-4o-mini"]
    assert client.models.retrieve("demo").owned_by == "flashsplit"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("other")


def test_chat_whole_and_streamed_are_the_command_lines(client: openai.OpenAI) -> None:
    """One question through `generate`, a whole reply and a streamed one: the same text, the same count of tokens."""
    said = generate(*PAIR, "--target-devices", "cpu", "--chat", "--prompt", ASK[0]["content"])

    whole = client.chat.completions.create(model="demo", messages=ASK, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )

    assert whole.choices[0].message.content == said["text"]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(said["token_ids"])
    assert whole.usage.prompt_tokens == said["stats"]["prompt_tokens"]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == said["text"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.model_extra is not None
    assert whole.model_extra["timings"]["acceptance_length"] > 4


def test_a_repeated_prompt_is_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You do sums, and show how. " * 20}, *ASK]
    first = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    again = client.chat.completions.create(model="demo", messages=messages, temperature=0)

    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens


def test_seeds_and_choices(client: openai.OpenAI) -> None:
    """A seed repeats all choices, which differ from each other; another seed gives others."""

    def ask(seed: int) -> list[str | None]:
        made = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=seed,
            temperature=2,
            max_tokens=20,
        )
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        assert made.usage is not None
        assert made.usage.completion_tokens <= 60
        return [choice.message.content for choice in made.choices]

    assert ask(7) == ask(7)
    assert len(set(ask(7))) == 3
    assert ask(8) != ask(7)


def test_stop_length_and_bias(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(model="demo", messages=ASK, temperature=0, stop=["carry", "never"])
    cut = client.chat.completions.create(model="demo", messages=ASK, temperature=0, max_completion_tokens=5)
    biased = client.chat.completions.create(
        model="demo", messages=ASK, temperature=0, max_tokens=4, logit_bias={"65": 100}
    )

    assert stopped.choices[0].message.content is not None
    assert "carry" not in stopped.choices[0].message.content
    assert stopped.choices[0].finish_reason == "stop"
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 5
    assert biased.choices[0].message.content != cut.choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    """Text, several texts, token ids, echo, streamed."""
    one = client.completions.create(model="demo", prompt="def add(a, b):", temperature=0, max_tokens=12)
    many = client.completions.create(model="demo", prompt=["def add(a, b):", "import "], temperature=0, max_tokens=12)
    echoed = client.completions.create(model="demo", prompt="def add(a, b):", temperature=0, max_tokens=12, echo=True)
    streamed = client.completions.create(
        model="demo", prompt="def add(a, b):", temperature=0, max_tokens=12, stream=True
    )
    ids = client.completions.create(model="demo", prompt=[5, 6, 7], temperature=0, max_tokens=3)

    assert many.choices[0].text == one.choices[0].text
    assert len(many.choices) == 2
    assert echoed.choices[0].text == "def add(a, b):" + one.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client: openai.OpenAI, fields: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            **{"model": "demo", "messages": ASK, **{k: v for k, v in fields.items() if k == "messages"}},
            extra_body={k: v for k, v in fields.items() if k != "messages"},
        )
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param == param


def test_unknown_model_and_unknown_fields(client: openai.OpenAI) -> None:
    """Another model is 404; fields that real clients send and that mean nothing here are taken."""
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="other", messages=ASK)
    assert refused.value.code == "model_not_found"
    taken = client.chat.completions.create(
        model="demo",
        messages=ASK,
        max_tokens=2,
        user="me",
        store=False,
        service_tier="auto",
        parallel_tool_calls=False,
        metadata={"a": "b"},
        extra_body={"prompt_cache_key": "k", "include": []},
    )
    assert taken.choices


@pytest.mark.slow
def test_many_clients_get_what_they_get_alone(client: openai.OpenAI) -> None:
    """24 at once over 4 turns, long and short: the tokens of each alone."""
    asked = [f"Calculate {113 * number} + {977 - number}." for number in range(8)]

    def ask(question: str) -> str | None:
        made = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=60
        )
        return made.choices[0].message.content

    alone = [ask(question) for question in asked]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, asked * 3))

    assert together == alone * 3


def test_a_client_that_goes_frees_its_turn(server: Server, client: openai.OpenAI) -> None:
    """Dropped streams end their work: nothing runs shortly after, though thousands of tokens were asked for."""
    for _ in range(4):
        stream = client.chat.completions.create(
            model="demo",
            messages=ASK,
            max_tokens=3000,
            temperature=1.5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 5
    while '"running":0' not in get(f"{server.url}/ready")[1].replace(" ", ""):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_lines_are_in_the_servers_log(server: Server, client: openai.OpenAI) -> None:
    """By the request's id, for each stage and the draft beside the last one."""
    client.chat.completions.create(model="demo", messages=ASK, max_tokens=2, extra_headers={"x-request-id": "find-me"})

    def closed() -> list[str]:
        return [line for line in server.log.read_text().splitlines() if "session.closed" in line and "find-me" in line]

    deadline = time.monotonic() + 5
    while len(closed()) < 3:
        assert time.monotonic() < deadline, closed()
        time.sleep(0.05)
    assert len({line.partition('"worker": ')[2].partition(",")[0] for line in closed()}) == 2


def test_operators_see(server: Server, client: openai.OpenAI) -> None:
    long = [{"role": "system", "content": "You calculate. " * 60}, *ASK]
    for _ in range(2):
        client.chat.completions.create(model="demo", messages=long, max_tokens=40)  # type: ignore[arg-type]
    client.chat.completions.create(model="demo", messages=ASK, max_tokens=40)  # type: ignore[arg-type]
    assert get(f"{server.url}/health")[0] == 200
    assert get(f"{server.url}/ready")[0] == 200
    assert "version" in get(f"{server.url}/version")[1]
    assert "/v1/chat/completions" in get(f"{server.url}/openapi.json")[1]
    status, metrics = get(f"{server.url}/metrics")
    assert status == 200
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values['flashsplit_generation_tokens_total{model_name="demo"}']) > 0
    assert float(values['flashsplit_accepted_tokens_total{model_name="demo"}']) > 0
    assert float(values['flashsplit_cached_tokens_total{model_name="demo",source="memory"}']) > 0
    assert values['vllm:num_requests_running{engine="0",model_name="demo"}'] == "0.0"
    assert 0 <= float(values['vllm:kv_cache_usage_perc{engine="0",model_name="demo"}']) < 1
    assert float(values['vllm:request_success_total{engine="0",finished_reason="stop",model_name="demo"}']) > 0


def test_gaps_between_tokens_add_up_to_the_decode(server: Server, client: openai.OpenAI) -> None:
    """Their count is that of the tokens behind the first, their sum no more than the time that those took."""

    def gaps() -> tuple[float, float]:
        lines = [line.rsplit(" ", 1) for line in get(f"{server.url}/metrics")[1].splitlines()]
        kinds = ("count", "sum")
        values = {name: float(value) for name, value in lines if name.startswith("vllm:inter_token_latency_seconds")}
        count, seconds = (
            values[f'vllm:inter_token_latency_seconds_{kind}{{engine="0",model_name="demo"}}'] for kind in kinds
        )
        return count, seconds

    count, seconds = gaps()
    extra = {"ignore_eos": True, "speculate": False}
    made = client.chat.completions.create(model="demo", messages=ASK, max_tokens=20, extra_body=extra)  # type: ignore[arg-type]
    more, longer = gaps()
    assert more - count == 19
    assert made.model_extra is not None
    assert 0 < longer - seconds < 1.2 * made.model_extra["timings"]["predicted_ms"] / 1e3


def test_sigterm_drains(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A running answer finishes after SIGTERM, a new request is refused, the exit code is 0."""
    with serving(tmp_path_factory.mktemp("drain"), *PAIR, "--target-devices", "cpu") as one:
        client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0, timeout=60)
        stream = client.chat.completions.create(
            model="target",
            messages=ASK,
            max_tokens=100,
            temperature=0.5,
            stream=True,
            extra_body={"ignore_eos": True, "speculate": False},
        )
        chunks = iter(stream)
        next(chunks)
        one.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while get(f"{one.url}/ready")[0] != 503:
            assert time.monotonic() < deadline
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.chat.completions.create(model="target", messages=ASK)
        finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]

        assert finish == "length"
        assert one.process.wait(20) == 0


def test_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every path wants one of the keys, but what probes ask, and the page."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("# ours\nsecret-one\nsecret-two\n")
    with serving(folder, *PAIR, "--target-devices", "cpu", "--api-key-file", folder / "keys") as one:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/version", "/ready"):
            assert get(f"{one.url}{path}")[0] == 401, path
        for path in ("/health", "/health?ready=true", "/"):
            assert get(f"{one.url}{path}")[0] == 200, path
        for key in ("secret-one", "secret-two"):
            assert openai.OpenAI(base_url=f"{one.url}/v1", api_key=key).models.list().data
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{one.url}/v1", api_key="secret", max_retries=0).models.list()
        assert "secret" not in one.log.read_text()
