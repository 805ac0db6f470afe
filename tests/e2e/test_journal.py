"""A coordinator that is killed in the middle of answers: the next one with the same journal goes on with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import forking
from tests.e2e.conftest import alive, children, until
from tests.e2e.server import PAIR, Server, serving

ASK = "Calculate 4729 + 3485. Then say in one short sentence what you did, and how sure you are of it."
CHAT: dict[str, Any] = {
    "model": "target",
    "messages": [{"role": "user", "content": ASK}],
    "seed": 5,
    "temperature": 1,
    "presence_penalty": 0.5,
    "logprobs": True,
    "max_tokens": 45,
    "extra_body": {"ignore_eos": True},
}
RESPONSE: dict[str, Any] = {
    "model": "target",
    "input": ASK,
    "temperature": 0,
    "max_output_tokens": 50,
    "extra_body": {"guided_regex": "[A-Za-z0-9 .,]{2000}"},
}


@contextlib.contextmanager
def journaled(folder: Path, name: str, devices: str = "cpu") -> Iterator[tuple[Server, openai.OpenAI]]:
    """A server with the test's journal and log lines of its own, and a client of it."""
    (folder / name).mkdir()
    options = ("--target-devices", devices, "--threads", 1, "--journal", folder / "journal")
    with (
        serving(folder / name, *PAIR, *options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield server, client


def stop_computing(server: Server) -> list[int]:
    """Stop the workers of a coordinator where they are, and return them."""
    workers = children(server.process.pid)
    assert workers
    for worker in workers:
        os.kill(forking.forked(worker), signal.SIGSTOP)
    return workers


def kill(server: Server, workers: list[int]) -> None:
    """Kill a coordinator in a way that no process can heed. Its workers end after it."""
    os.kill(forking.forked(server.process.pid), signal.SIGKILL)
    for worker in workers:
        os.kill(forking.forked(worker), signal.SIGCONT)
    until(lambda: not any(map(alive, workers)), 20)


def lines(client: openai.OpenAI, most: int | None = None, **headers: str) -> list[tuple[str, dict[str, Any]]]:
    """Id and object of each event of the chat's stream, of all or so many."""
    found: list[tuple[str, dict[str, Any]]] = []
    api = client.chat.completions.with_streaming_response
    with api.create(**CHAT, stream=True, extra_headers=headers) as reply:
        name = ""
        for line in reply.iter_lines():
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if len(found) == most:
                    break
    return found


def said(events: list[tuple[str, dict[str, Any]]]) -> tuple[str, list[tuple[str, float]]]:
    """The text of a chat's stream, and its tokens with their log-probabilities."""
    choices = [choice for _, event in events for choice in event["choices"]]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    return (
        "".join(choice["delta"].get("content", "") for choice in choices),
        [(entry["token"], round(entry["logprob"], 4)) for entry in entries],
    )


def finished(client: openai.OpenAI, name: str) -> Any:
    """A response in the background once it has ended."""
    deadline = time.monotonic() + 60
    while (response := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return response


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cpu,cpu", marks=pytest.mark.slow)])
def test_answers_go_on_in_the_next_process(devices: str, tmp_path: Path) -> None:
    """A seeded chat that is streamed, with penalties, and a greedy response in the background with a grammar: the
    tokens, the text and the numbers of events are those of a server that was never killed, and nothing comes twice."""
    with journaled(tmp_path, "first") as (server, client):
        undisturbed = lines(client)
        whole = client.responses.create(**RESPONSE)
        background = client.responses.create(**RESPONSE, background=True)
        begun = lines(client, 5, **{"Idempotency-Key": "a"})
        # What comes next comes from the next process, however fast this one is.
        workers = stop_computing(server)
        assert client.responses.retrieve(background.id).status == "in_progress"
        kill(server, workers)
    with journaled(tmp_path, "second", devices) as (server, client):
        assert server.log.read_text().count("request.taken_up") == 2
        again = {"Idempotency-Key": "a", "Last-Event-ID": begun[-1][0]}
        rest = lines(client, **again)
        assert said([*begun, *rest]) == said(undisturbed)
        assert said(lines(client, **{"Idempotency-Key": "a"})) == said(undisturbed)
        assert rest[-1][1]["timings"]["resumed"] == 1
        assert rest[-1][1]["id"] == begun[0][1]["id"]
        response = finished(client, background.id)
        assert (response.status, response.output_text) == (whole.status, whole.output_text)
        assert response.usage.output_tokens == whole.usage.output_tokens == 50
        with client.responses.retrieve(background.id, stream=True, starting_after=3) as events:
            numbers = [event.sequence_number for event in events]
        assert numbers == list(range(4, 4 + len(numbers)))
        assert client.responses.cancel(background.id).status == "incomplete"
        running = client.responses.create(**RESPONSE, background=True)
        assert client.responses.cancel(running.id).status == "cancelled"
