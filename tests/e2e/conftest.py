"""Real worker processes, real sockets, real checkpoints; everything a test starts is ended by its process id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from coordinator.cluster.cluster import Cluster
from services.messages.description import WorkerDescription
from tests import forking
from tests.reference import checkpoints, target

if TYPE_CHECKING:
    from tests.e2e.server import Server

ROOT = Path(__file__).resolve().parents[2]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Tests in a shell's background inherit that Ctrl-C is ignored, and so would what they start; a user's terminal
    # hands on no such thing.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def forked_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork all workers and coordinators of these tests, but for those of tests that ask for `own_processes`."""
    with forking.servers(tmp_path_factory.mktemp("forking")):
        yield


@dataclass(frozen=True)
class Pair:
    """A target, a draft for it, and the target's number of layers."""

    target: Path
    draft: Path
    layers: int


@dataclass(frozen=True)
class Worker:
    """A worker that a test started, as a user would on another terminal."""

    process: subprocess.Popen[bytes]
    address: str


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """A tiny random pair of each family."""
    root = tmp_path_factory.mktemp("pairs")
    dense = checkpoints.write_qwen3(root / "qwen3", layers=6, tied=True, max_shard_size="200KB")
    hybrid = checkpoints.write_qwen3_5(root / "qwen3_5", layers=8, nested=True, extras=True)
    return {
        "qwen3": Pair(dense, checkpoints.write_draft(root / "qwen3-draft", dense), 6),
        "qwen3_5": Pair(
            hybrid,
            checkpoints.write_draft(
                root / "qwen3_5-draft",
                hybrid,
                layer_types=("sliding_attention", "full_attention"),
                sliding_window=32,
                is_causal=False,
            ),
            8,
        ),
    }


@pytest.fixture(scope="session")
def prefix_cases(pairs: dict[str, Pair]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each family a prompt of 50 tokens with clear margins, and the 40 that transformers says to it."""
    found = {}
    for name, pair in pairs.items():
        prompt, tokens = target.clear_prompt(target.load(pair.target), 50, 40, seed=300)
        found[name] = tuple(prompt), tuple(tokens)
    return found


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo pair over two workers, as "demo"."""
    from tests.e2e.server import PAIR, serving

    arguments = ("--target-devices", "cpu,cpu", "--served-model-name", "demo")
    with serving(tmp_path_factory.mktemp("serve"), *PAIR, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def qwen_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo pair with Qwen's tokens and template, as "qwen"."""
    from tests.e2e.qwen import write_qwen
    from tests.e2e.server import DEMO, serving

    folder = tmp_path_factory.mktemp("serve")
    pair = ("--model", write_qwen(folder / "qwen"), "--draft", DEMO / "draft", "--dtype", "float32")
    with serving(folder, *pair, "--target-devices", "cpu", "--served-model-name", "qwen") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the module's own `server`."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of the module's own `server`."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Start `flashsplit-worker` with more arguments, stderr into `log` if given; all are ended after the test."""
    with tempfile.TemporaryDirectory(prefix="fs-") as folder, contextlib.ExitStack() as stack:

        def start(*arguments: str, log: Path | None = None) -> Worker:
            address = f"unix:{folder}/{len(os.listdir(folder))}.sock"
            command = [sys.executable, "-m", "shard_worker", "--listen", address, "--device", "cpu"]
            output = None if log is None else stack.enter_context(log.open("w"))
            process = subprocess.Popen(
                [*command, "--threads", "1", "--log-level", "warning", *arguments], cwd=ROOT, stderr=output
            )
            stack.callback(end, process)
            until(lambda: os.path.exists(address.removeprefix("unix:")), 60)
            return Worker(process, address)

        yield start


def end(process: subprocess.Popen[Any]) -> None:
    """Terminate one process that this test started, and wait for it."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)


def until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds; fails the test when it doesn't within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


async def when_idle(cluster: Cluster, address: str) -> WorkerDescription:
    """Wait until a worker has no session any more, and return what it says of itself.

    A session ends with its stream, which a worker notices a moment after the answer is there.
    """
    async with asyncio.timeout(10):
        while (worker := await (await cluster.worker(address)).describe()).open_sessions:
            await asyncio.sleep(0.01)
    return worker


def children(pid: int) -> list[int]:
    """Process ids of the direct children that run of a process, or of the one it stands in for; no fork servers."""
    found, pid = [], forking.forked(pid)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == pid and state != "Z" and not forking.is_server(int(entry)):
                    found.append(int(entry))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def flashsplit(*arguments: object) -> subprocess.Popen[str]:
    """`flashsplit …`, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "coordinator", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def generate(*arguments: object, timeout: float = 60) -> dict[str, Any]:
    """`flashsplit generate … --json`, its object; fails the test on a bad exit code."""
    process = flashsplit("generate", *arguments, "--json")
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def refusal(*arguments: object, timeout: float = 30) -> str:
    """stderr of a `flashsplit generate` that must fail, cleanly."""
    process = flashsplit("generate", *arguments)
    _, err = process.communicate(timeout=timeout)
    assert process.returncode in (1, 2), (process.returncode, err)
    assert "Traceback" not in err
    return err


def interrupt(process: subprocess.Popen[str], number: int = signal.SIGINT) -> float:
    """Send a signal, wait for the end; seconds it took."""
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=20)
    return time.monotonic() - began
