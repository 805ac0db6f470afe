"""/v1/status, /v1/events and `flashsplit status`: what a server tells of its workers, also of dead and frozen ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pexpect
import pytest
from click.testing import CliRunner

from coordinator.cli.commands.drain import drain
from coordinator.cli.commands.status import status as command
from coordinator.status.worker_poll import ANSWER_S, FRESH_S
from tests.e2e.conftest import ROOT, alive, flashsplit, until
from tests.e2e.server import PAIR, Server, get, serving

SUM = {"role": "user", "content": "Calculate 4729 + 3485."}
# Long enough to be kept.
ASK = [{"role": "system", "content": "You do sums, and show how. " * 20}, SUM]
LONG = {"messages": ASK, "temperature": 0, "max_tokens": 2000, "ignore_eos": True}
KEY = "a-key-for-the-status"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("serve"), *PAIR, *("--target-devices", "cpu,cpu", "--served-model-name", "demo")
    ) as running:
        yield running


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"messages": ASK, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        reply: dict[str, Any] = json.load(answer)
    return reply


def status(server: Server) -> dict[str, Any]:
    code, body = get(f"{server.url}/v1/status")
    assert code == 200, body
    said: dict[str, Any] = json.loads(body)
    return said


@contextlib.contextmanager
def answering(server: Server) -> Iterator[None]:
    """While a long answer is on its way."""
    body = json.dumps({**LONG, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.readline()
        yield


def test_the_chain_as_it_was_placed(server: Server) -> None:
    """Names, layers, memory, versions; nothing runs yet."""
    said = status(server)
    first, second = said["workers"]

    assert (said["model"], said["num_layers"], said["ready"]) == ("demo", 12, True)
    assert said["dtype"] == said["kv_dtype"] == "float32"
    assert (first["name"], first["layers"], first["draft"]) == ("stage 0", {"first": 0, "last": 6}, False)
    assert (second["name"], second["layers"], second["draft"]) == ("stage 1", {"first": 6, "last": 12}, True)
    assert [edge["source"] + ">" + edge["to"] for edge in said["edges"]] == ["coordinator>stage 0", "stage 0>stage 1"]
    assert first["error"] is second["error"] is None
    assert second["memory"]["weight_bytes"] > first["memory"]["weight_bytes"] > 1 << 20
    assert first["versions"]["flashsplit"] == said["version"]
    assert all(alive(worker["process_id"]) for worker in said["workers"])
    assert said["acceptance"]["block_rows"] == 16


def test_figures_follow_the_requests(server: Server) -> None:
    """An answer's figures are those that it is told with; while one runs its memory and its session are seen."""
    before = status(server)
    timings = chat(server)["timings"]
    again = chat(server)["timings"]
    # What the workers said serves all who ask within half a second.
    until(lambda: all(worker["batches"] for worker in status(server)["workers"]), 5)
    after = status(server)

    def grown(*path: str) -> Any:
        old, new = before, after
        for part in path:
            old, new = old[part], new[part]
        return new - old

    assert grown("acceptance", "accepted_tokens") == timings["draft_n_accepted"] + again["draft_n_accepted"]
    assert grown("acceptance", "verifies") == sum(after["acceptance"]["kept"]) - sum(before["acceptance"]["kept"])
    assert grown("tokens", "completion") == 2 * timings["predicted_n"]
    assert after["acceptance"]["tokens_per_verify"] > 4
    assert after["cache"]["hits"]["memory"]["tokens"] >= again["cache_n"] > 0
    assert after["tokens"]["completion_per_s"] > 0
    prompt = timings["prompt_n"]
    # The prompt once, four bytes a token, and 16 rows a verify; the second stage gets activations with the features.
    sent = [new["total_bytes"] - old["total_bytes"] for old, new in zip(before["edges"], after["edges"], strict=True)]
    assert 4 * prompt < sent[0] <= 4 * (prompt + 16 * (timings["steps"] + again["steps"]))
    assert sent[1] > 384 * 4 * sent[0] / 4
    for worker in after["workers"]:
        shares = worker["shares"]
        assert 0 < worker["load"] <= 1
        assert shares["busy"] > 0
        assert shares["busy"] + shares["wire"] + shares["wait"] == pytest.approx(1, abs=0.01)
        assert worker["batches"]["rows"] >= worker["batches"]["sessions"] == 1
        assert 0 <= worker["memory"]["pool_used_bytes"] < worker["memory"]["pool_bytes"]
    assert after["workers"][1]["shares"]["drafting"] > 0
    assert after["workers"][0]["shares"]["drafting"] == 0

    with answering(server):
        until(lambda: [worker["sessions"] for worker in status(server)["workers"]] == [1, 1], 5)
        running = status(server)
        assert running["requests"]["running"] == 1
        assert all(worker["memory"]["session_bytes"] > 1 << 20 for worker in running["workers"])
    until(lambda: status(server)["requests"]["running"] == 0, 10)
    until(lambda: all(not worker["memory"]["session_bytes"] for worker in status(server)["workers"]), 15)
    assert all(worker["memory"]["snapshot_bytes"] > 0 for worker in status(server)["workers"])


def test_blocks_come_as_events(server: Server) -> None:
    """The rows kept of all blocks, plus the first token, are the answer's tokens; the request is named."""
    blocks: list[dict[str, Any]] = []
    connected = threading.Event()

    def listen() -> None:
        with contextlib.suppress(TimeoutError), urllib.request.urlopen(f"{server.url}/v1/events", timeout=3) as events:
            for line in events:
                if line.startswith(b"data:"):
                    blocks.extend(json.loads(line[5:])["blocks"])
                    connected.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert connected.wait(10)
    reply = chat(server, messages=[{"role": "user", "content": "What is 31 * 5?"}])
    listener.join(30)

    assert {block["request_id"] for block in blocks} == {reply["id"].removeprefix("chatcmpl-")}
    assert max(block["rows"] for block in blocks) == 16
    assert 1 + sum(block["kept"] for block in blocks) == reply["timings"]["predicted_n"]
    assert all(block["elapsed_ms"] > 0 for block in blocks)


def test_the_command_prints_a_table_and_json(server: Server) -> None:
    process = flashsplit("status", "--url", f"{server.url}/v1/")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    for part in (
        "stage 0",
        "stage 1 + draft",
        "cpu on ",
        "6:12",
        "rows kept a verify",
        "from memory",
        "torch 2",
        "rows a step",
    ):
        assert part in out, part

    process = flashsplit("status", "--url", server.url, "--json")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert set(json.loads(out)) == set(status(server))


# A terminal needs a fork, which Python 3.12 calls risky where threads run.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_watching(server: Server) -> None:
    """On a terminal the picture follows what happens; Ctrl-C ends it at once and leaves the terminal as it was."""
    command = ["-m", "coordinator", "status", "--url", server.url, "--watch", "--interval", "0.3"]
    watch = pexpect.spawn(sys.executable, command, cwd=ROOT, timeout=30, encoding="utf-8", dimensions=(40, 150))
    try:
        watch.expect("stage 1 \\+ draft")
        with answering(server):
            watch.expect("1 of 16 running")
        watch.expect("0 of 16 running")
        watch.sendintr()
        watch.expect(pexpect.EOF)
    finally:
        watch.close()
    assert watch.exitstatus == 130
    assert "Traceback" not in str(watch.before)


def test_a_worker_is_drained(server: Server) -> None:
    """`flashsplit drain` has another worker take its place; a worker that there is not is refused with those that there
    are."""
    at = ("--url", server.url)
    before = status(server)["workers"]
    result = CliRunner().invoke(drain, ["stage 1", "--to", "cpu", *at])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("cpu has the place of stage 1: answers paused for ")
    first, second = status(server)["workers"]
    assert first["process_id"] == before[0]["process_id"]
    assert second["layers"] == before[1]["layers"]
    assert not alive(before[1]["process_id"])
    chat(server, max_tokens=4)
    result = CliRunner().invoke(drain, ["stage 7", "--to", "cpu", *at])
    assert result.exit_code == 2
    assert "name one of stage 0 (cpu), stage 1 (cpu), or its address" in result.stderr


def test_what_cannot_be_asked(server: Server) -> None:
    """No server, no URL, no flashsplit server: one sentence each."""
    for arguments, code, says in (
        (["--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9: start one"),
        (["--url", "127.0.0.1:8000"], 2, "--url '127.0.0.1:8000' must be like http://127.0.0.1:8000"),
        (["--url", f"{server.url}/docs"], 2, "Not Found"),
    ):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == code, result.output
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.usefixtures("own_processes")
def test_with_a_key_and_workers_that_fail(tmp_path: Any) -> None:
    """The page is open, what it asks for wants the key. A frozen worker is told as such within seconds, as is a dead
    one, while the other still tells how it is; a server that stops is not held up by those who watch."""
    # A worker that is frozen for as long as this test needs is not started anew.
    options = ("--target-devices", "cpu,cpu", "--api-key", KEY, "--lost-after", 30)
    with serving(tmp_path, *PAIR, *options) as server:
        assert get(f"{server.url}/")[0] == get(f"{server.url}/page/app.js")[0] == 200
        for path in ("/v1/status", "/v1/events", "/pages", "/page", "//page/app.js", "/v1/status?/page/"):
            assert get(server.url + path)[0] == 401, path

        def asked() -> tuple[dict[str, Any], float]:
            began = time.monotonic()
            request = urllib.request.Request(f"{server.url}/v1/status", headers={"authorization": f"Bearer {KEY}"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer), time.monotonic() - began

        first, second = (worker["process_id"] for worker in asked()[0]["workers"])
        os.kill(second, signal.SIGSTOP)
        try:
            time.sleep(FRESH_S)
            said, seconds = asked()
        finally:
            os.kill(second, signal.SIGCONT)
        assert seconds < ANSWER_S + 1
        assert said["workers"][0]["error"] is None
        assert "did not answer within 2 s" in said["workers"][1]["error"]
        assert said["workers"][1]["layers"] == {"first": 6, "last": 12}
        until(lambda: asked()[0]["workers"][1]["error"] is None, 5)

        os.kill(first, signal.SIGKILL)
        until(lambda: asked()[0]["workers"][0]["error"] is not None, 5)
        said, seconds = asked()
        assert seconds < 1
        assert not said["ready"]
        assert said["workers"][0]["error"].endswith(f"(process {first}) was killed by SIGKILL")
        assert said["workers"][1]["error"] is None
        result = CliRunner().invoke(command, ["--url", server.url], env={"FLASHSPLIT_API_KEY": KEY})
        assert result.exit_code == 1
        assert f"stage 0: the worker for cpu (process {first}) was killed by SIGKILL" in result.stdout

        request = urllib.request.Request(f"{server.url}/v1/events", headers={"x-api-key": KEY})
        with urllib.request.urlopen(request, timeout=20) as events:
            assert events.readline().startswith(b"event: blocks")
            server.process.terminate()
            server.process.wait(20)
            # What uvicorn says of replies that it had to cut.
            assert "timeout graceful shutdown exceeded" not in server.log.read_text()
