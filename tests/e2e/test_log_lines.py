"""What `flashsplit serve` writes to its log unless it is told otherwise: a line a request, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import children, until
from tests.e2e.server import PAIR, Server, get, serving

ASK: Any = [{"role": "user", "content": "Calculate 4729 + 3485."}]


def lines(server: Server, event: str | None = None) -> list[dict[str, Any]]:
    """The log lines of a kind, all of them without one, so far."""
    found = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if event is None or line["event"] == event]


async def test_a_line_for_each_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By method, path, status, tokens of prompt and answer, and time; none for probes, and no other lines."""
    with serving(tmp_path_factory.mktemp("log"), *PAIR, "--target-devices", "cpu", log_level=None) as server:
        for path in ("/health", "/health?ready=true", "/ready", "/metrics", "/v1/status"):
            assert get(f"{server.url}{path}")[0] == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="target", messages=ASK, max_tokens=6, n=2, temperature=0)
            for _ in client.chat.completions.create(model="target", messages=ASK, max_tokens=5, stream=True):
                pass
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="other", messages=ASK)
            gone = client.chat.completions.create(
                model="target", messages=ASK, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(4):
                next(gone)
            gone.close()
            until(lambda: len(lines(server, "http.request")) == 4, 30)
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
            message = other.messages.create(model="target", messages=ASK, max_tokens=7)
        until(lambda: len(lines(server, "http.request")) == 5, 30)
        assert whole.usage is not None
        prompt = whole.usage.prompt_tokens
        told = lines(server, "http.request")
        # Each stands there when its request has ended, which may be a moment after the client has heard of it.
        expected = [
            ("POST", "/v1/chat/completions", 200, 2 * prompt, whole.usage.completion_tokens),
            ("POST", "/v1/chat/completions", 200, prompt, 5),
            ("POST", "/v1/chat/completions", 404, 0, 0),
            ("POST", "/v1/messages", 200, prompt, message.usage.output_tokens),
        ]
        found = {
            (line["method"], line["path"], line["status"], line["prompt_tokens"], line["completion_tokens"])
            for line in told
        }
        assert found >= set(expected)
        # What was computed for a client that went counts too.
        [cut] = found - set(expected)
        assert cut[:4] == ("POST", "/v1/chat/completions", 200, prompt)
        assert 3 <= cut[4] < 3000
        assert all(line["ms"] > 0 for line in lines(server))
        assert {line["event"] for line in lines(server)} == {"http.request"}


def test_no_access_log(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Then requests leave no trace."""
    words = (*PAIR, "--target-devices", "cpu", "--no-access-log")
    with serving(tmp_path_factory.mktemp("log"), *words, log_level=None) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        client.completions.create(model="target", prompt="a", max_tokens=2)
        client.close()
    assert lines(server) == []


@pytest.mark.usefixtures("own_processes")
def test_a_dead_workers_last_lines_stand_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each as the line that the worker wrote, with its fields; nothing is JSON within JSON."""
    with serving(tmp_path_factory.mktemp("log"), *PAIR, "--target-devices", "cpu,cpu", log_level=None) as server:
        worker = children(server.process.pid)[-1]
        os.kill(worker, signal.SIGKILL)
        until(lambda: bool(lines(server, "cluster.lost")), 20)
        text = server.log.read_text()
    [lost] = lines(server, "cluster.lost")
    assert f"(process {worker}) was killed by SIGKILL" in lost["why"]
    assert '\\"' not in text
    for line in lost.get("last_lines", []):
        assert isinstance(line, dict), line
    assert text.count("worker.ready") <= 1
