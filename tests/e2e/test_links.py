"""A server and its workers over TCP links that are slow or swallow everything, with and without certificates."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner

from coordinator.cli.commands.certs import certs
from tests.e2e.conftest import ROOT, end, until
from tests.e2e.server import PAIR, get, serving
from tests.links import GOOD, Fault, link

SLOW_BYTES_PER_S = 0.8e6
LONG_PROMPT = "alpha beta gamma delta " * 120
"""About 1000 tokens, whose activations take some 3 MB."""


@contextlib.contextmanager
def tcp_worker(log: Path, *flags: str) -> Iterator[int]:
    """A worker on a free TCP port."""
    command = [sys.executable, "-m", "shard_worker", "--listen", "localhost:0", "--device", "cpu", "--threads", "1"]
    # Memory is not shared across hosts.
    command += ["--payload-transport", "stream", *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stderr=output)
    try:
        until(lambda: "worker.ready" in log.read_text(), 60)
        found = re.search(r"localhost:(\d+)", log.read_text())
        assert found is not None
        yield int(found[1])
    finally:
        end(process)


def certificates(folder: Path) -> tuple[list[str], list[str]]:
    """The flags of workers, and of the server, that show and ask for certificates of one authority."""
    made = CliRunner().invoke(certs, ["--out", str(folder), "--host", "localhost"])
    assert made.exit_code == 0, made.output
    lines = [shlex.split(line) for line in made.stdout.splitlines()]

    def flags(program: str) -> list[str]:
        [words] = [words for words in lines if program in words]
        begin = words.index("--tls-cert")
        # The links have another address than the certificates.
        return [*words[begin : begin + 6], "--tls-server-name", "localhost"]

    return flags("flashsplit-worker"), flags("generate")


def answer(url: str, prompt: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        messages = [{"role": "user", "content": prompt}]
        reply = client.chat.completions.create(model="target", messages=messages, temperature=0, max_tokens=8)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content)


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "tls"])
def test_slow_and_silent_links(secure: bool, tmp_path: Path) -> None:
    """A prompt whose activations take longer than a worker may be silent is answered as over a fast link. Where nothing
    comes through any more a running answer ends with an error that names the worker, and the server is not ready until
    it does again."""
    worker_flags, server_flags = certificates(tmp_path / "certs") if secure else ([], [])
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(tcp_worker(tmp_path / f"{name}.log", *worker_flags)) for name in ("first", "second")
        ]
        first, second = (stack.enter_context(link(f"127.0.0.1:{port}")) for port in ports)
        options = ("--payload-transport", "stream", "--no-prefix-cache", "--no-resume", *server_flags)
        placed = ("--target-devices", f"{first.address},{second.address}", *options)
        server = stack.enter_context(serving(tmp_path, *PAIR, *placed))
        expected = answer(server.url, LONG_PROMPT)
        second.fault = Fault(bytes_per_s=SLOW_BYTES_PER_S)
        assert answer(server.url, LONG_PROMPT) == expected
        second.fault = GOOD

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            options = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
            messages = [{"role": "user", "content": "Count."}]
            stream = client.chat.completions.create(model="target", messages=messages, stream=True, **options)  # type: ignore[call-overload]
            for _ in range(3):
                next(stream)
            second.fault = Fault(silent=True)
            with pytest.raises(openai.APIError, match=f"{second.address} has been silent for"):
                for _ in stream:
                    pass
        until(lambda: get(f"{server.url}/ready")[0] == 503, 10)
        status = json.load(urllib.request.urlopen(f"{server.url}/v1/status", timeout=10))
        assert [worker["name"] for worker in status["workers"] if worker["error"]] == ["stage 1"]
        with pytest.raises(openai.APIStatusError, match="silent"):
            answer(server.url, "Hi")
        second.fault = GOOD
        until(lambda: get(f"{server.url}/ready")[0] == 200, 60)
        assert answer(server.url, LONG_PROMPT) == expected
