"""A server outlives its workers: one that is lost is called again until it is back, and loads what it must hold."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, end, until
from tests.e2e.server import DEMO, Server, get, serving

pytestmark = pytest.mark.usefixtures("own_processes")

CLUSTER = """
model: {demo}/target
draft: {demo}/draft
dtype: float32
workers:
  - {{at: "unix:{here}/first.sock", layers: 0:5}}
  - {{at: "unix:{here}/second.sock", layers: 5:12}}
  - {{at: "unix:{here}/draft.sock", roles: [draft]}}
"""


def worker(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A worker of another supervisor's, say a pod: its address stays, whoever runs there."""
    socket = folder / f"{name}.sock"
    socket.unlink(missing_ok=True)
    command = [sys.executable, "-m", "shard_worker", "--listen", f"unix:{socket}", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen([*command, "--log-level", "error"], cwd=ROOT)
    until(socket.exists, 60)
    return process


def ask(server: Server) -> tuple[str, int]:
    """An answer, and how many draft tokens were accepted for it."""
    body = {"messages": [{"role": "user", "content": "Calculate 4729 + 3485."}], "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    return answer["choices"][0]["message"]["content"], accepted


def ready(server: Server) -> bool:
    return get(f"{server.url}/ready")[0] == 200


def test_workers_that_come_back(tmp_path: Path) -> None:
    """A stage and the draft's worker are killed while nobody asks: not ready without the stage, plain decode without
    the draft, and as before with new ones."""
    names = ("first", "second", "draft")
    workers = {name: worker(tmp_path, name) for name in names}
    config = tmp_path / "cluster.yaml"
    config.write_text(CLUSTER.format(demo=DEMO, here=tmp_path))
    try:
        with serving(tmp_path, "--config", config) as server:
            before = ask(server)
            assert before[1] > 0
            for backs, lost in enumerate(("second", "draft")):
                workers[lost].send_signal(signal.SIGKILL)
                workers[lost].wait()
                until(lambda: f"{lost}.sock broke" in server.log.read_text(), 10)  # noqa: B023
                assert get(f"{server.url}/health")[0] == 200
                if lost == "draft":
                    assert ask(server) == (before[0], 0)
                else:
                    assert not ready(server)
                workers[lost] = worker(tmp_path, lost)
                until(lambda: server.log.read_text().count("cluster.restored") == backs + 1, 40)  # noqa: B023
                assert ready(server)
                assert ask(server) == before
    finally:
        for process in workers.values():
            end(process)
