"""The demo pair over two hosts and a cable of 1 Gb/s and a millisecond each way, behind certificates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.two_hosts import DEMO, TwoHosts, why_not
from tests.e2e.conftest import generate, until

DELAY_S = 1e-3
QUESTION = ("--chat", "--prompt", "Calculate 4729 + 3485.", "--max-tokens", "120")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    with TwoHosts(tmp_path, delay_s=DELAY_S) as found:
        found.start_workers()
        yield found


def test_the_same_tokens_over_a_network(hosts: TwoHosts) -> None:
    """Plain and speculated, as one worker says them; the cable's delay shows in the way, and speculation hides it."""
    alone = generate("--model", DEMO / "target", "--dtype", "float32", "--target-devices", "cpu", *QUESTION)
    plain = json.loads(hosts.run("a", *hosts.flashsplit("generate", *QUESTION, "--no-speculation", "--json")))
    dflash = json.loads(hosts.run("a", *hosts.flashsplit("generate", *QUESTION, "--json")))

    assert plain["token_ids"] == dflash["token_ids"] == alone["token_ids"]
    assert "8214" in plain["text"]
    # From the coordinator to the first stage is no network; to the second there is one, there and back.
    steps = plain["stats"]["completion_tokens"] - 1
    assert plain["stats"]["stages"][1]["wire_ms"] / steps > 2e3 * DELAY_S
    assert dflash["stats"]["acceptance_length"] > 2
    assert dflash["stats"]["decode_tokens_per_s"] > plain["stats"]["decode_tokens_per_s"]


def test_serve_over_a_network_and_a_cable_that_is_pulled(hosts: TwoHosts, tmp_path: Path) -> None:
    """A request is answered; when the cable goes, one that runs ends with an error within seconds, and so does a new
    one; with the cable back, the next is answered."""
    serve = hosts.flashsplit("serve", "--port", "8000", "--no-grpc")
    process = hosts.start("a", *serve[:3], "--log-level", "info", *serve[3:], log="serve.log")
    log = tmp_path / "serve.log"
    until(lambda: "serve.ready" in log.read_text() or process.poll() is not None, 60)
    assert process.poll() is None, log.read_text()

    def ask(tokens: int) -> subprocess.Popen[str]:
        code = "import json, sys, urllib.request as u, urllib.error\n"
        code += (
            "body = json.dumps({'prompt': 'Once upon a time', 'max_tokens': int(sys.argv[1]), 'ignore_eos': True})\n"
        )
        code += "try: print(u.urlopen(u.Request('http://127.0.0.1:8000/v1/completions', body.encode(), "
        code += "{'content-type': 'application/json'}), timeout=60).read().decode())\n"
        code += "except urllib.error.HTTPError as error: print(error.code, error.read().decode())"
        command = hosts.on("a", sys.executable, "-c", code, str(tokens))
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    assert '"finish_reason":"length"' in ask(20).communicate(timeout=60)[0].replace(" ", "")
    running = ask(4000)
    time.sleep(2)
    assert running.poll() is None
    hosts.wire.cut = True
    began = time.monotonic()
    assert running.communicate(timeout=30)[0].startswith("503 ")
    assert ask(20).communicate(timeout=30)[0].startswith("503 ")
    assert time.monotonic() - began < 40
    hosts.wire.cut = False
    deadline = time.monotonic() + 30
    while '"finish_reason":"length"' not in (said := ask(20).communicate(timeout=60)[0].replace(" ", "")):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
