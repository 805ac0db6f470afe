"""`flashsplit serve` as a child process, ready to be asked."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import ROOT, end, until

DEMO = ROOT / "deploy" / "demo"
PAIR = ("--model", DEMO / "target", "--draft", DEMO / "draft", "--dtype", "float32")


@dataclass(frozen=True)
class Server:
    """A server that listens at `url`, and for gRPC at `grpc`."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def grpc(self) -> str:
        line = next(line for line in self.log.read_text().splitlines() if line.startswith("gRPC at "))
        return line.removeprefix("gRPC at ")


@contextlib.contextmanager
def serving(folder: Path, *arguments: object, log_level: str | None = "info") -> Iterator[Server]:
    """Start on a free port and wait until it is ready; ended at the end. log_level: None for the server's own."""
    log = folder / "serve.log"
    ports = ["--port", "0", "--grpc-port", "0"]
    level = [] if log_level is None else ["--log-level", log_level]
    command = [sys.executable, "-m", "coordinator", *level, "serve", *ports, *map(str, arguments)]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True)
    try:
        until(lambda: "curl http" in log.read_text() or process.poll() is not None, 90)
        assert process.poll() is None, log.read_text()
        line = next(line for line in log.read_text().splitlines() if line.startswith("curl http"))
        yield Server(process, line.split()[1].removesuffix("/v1/chat/completions"), log)
    finally:
        end(process)


def get(url: str) -> tuple[int, str]:
    """Status and body of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
