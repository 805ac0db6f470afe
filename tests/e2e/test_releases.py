"""Workers of the release before beside today's: they share a chain, and each may take the other's place.

`releases/` has that release's wheel, as `pip wheel --no-deps .` built it. Its workers are real processes that import
nothing else of flashsplit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import coordinator.cluster.cluster
from coordinator.answer import Request
from coordinator.cluster.supervisor import supervised
from coordinator.engine.engine import Engine
from coordinator.engine.handover import Handover
from coordinator.engine.step_times import StepTaken
from coordinator.text.model_files import read_model_files
from services.messages.description import PROTOCOL_MAJOR, PROTOCOL_MINOR
from services.rpc.peers import Peers
from tests import forking
from tests.e2e.conftest import ROOT, Pair, Worker, end, refusal, until
from tests.e2e.prefix_client import TOKENS, about_to_pause, client, tokens_of
from tests.services.fakes import until as until_async

[WHEEL] = (Path(__file__).parent / "releases").glob("*.whl")

StartAt = Callable[..., Worker]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the release before, as pip installs it."""
    folder = tmp_path_factory.mktemp("before")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture
def start_at(tmp_path: Path) -> Iterator[StartAt]:
    """Start a worker at a socket of this name, of the release in a directory or else of today's; all are ended after
    the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, release: Path | None = None) -> Worker:
        socket = tmp_path / name
        command = [sys.executable, "-m", "shard_worker", "--listen", f"unix:{socket}", "--device", "cpu"]
        command += ["--threads", "1", "--log-level", "warning", "--drain-timeout", "0"]
        with forking.without() if release is not None else contextlib.nullcontext():
            environment = {**os.environ, **({} if release is None else {"PYTHONPATH": str(release)})}
            process = subprocess.Popen(command, cwd=release or ROOT, env=environment)
        processes.append(process)
        until(socket.exists, 60)
        return Worker(process, f"unix:{socket}")

    yield start
    for process in processes:
        end(process)


async def protocol_of(address: str) -> tuple[int, int]:
    peers = Peers()
    try:
        described = await (await peers.worker(address)).describe()
    finally:
        await peers.close()
    return described.protocol_major, described.protocol_minor


@pytest.mark.slow
async def test_a_rolling_update(
    before: Path,
    start_at: StartAt,
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker by worker, while answers run: drained to one of today's release, and back; told to stop, where the older
    one ends and today's hands over. All tokens are the same; what is handed over is computed once, and what was kept is
    kept. Who was told to stop stands by in its turn once it is there again."""
    monkeypatch.setattr(coordinator.cluster.cluster, "LOST_PAUSE_S", 0.0)
    pair, (prompt, greedy) = pairs["qwen3_5"], prefix_cases["qwen3_5"]
    old, new = start_at("old", before), {name: start_at(name) for name in "abc"}
    assert await protocol_of(old.address) < await protocol_of(new["a"].address) == (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    devices, standbys = f"{old.address},{new['a'].address}", [new["b"].address, new["c"].address]
    async with client(pair, devices, standbys=standbys) as one:
        cluster, cache = one.cluster, one.cache
        engine = Engine(cluster, read_model_files(pair.target), cache, name="tiny", resume_timeout_s=30)
        handover = Handover(engine)
        kept, may_end = Counter[str](), about_to_pause(engine, monkeypatch)

        def count(step: StepTaken) -> None:
            kept[step.request_id] += step.kept

        engine.step_listeners.append(count)

        async def answer_while(change: Awaitable[object]) -> int:
            """How many tokens were computed of two answers in the middle of which a worker is exchanged."""
            cache.drop_all()
            await one.settle()
            kept.clear()
            may_end.clear()
            requests = [Request(name, prompt, TOKENS, speculate=name == "drafted") for name in ("drafted", "plain")]
            asked = [asyncio.create_task(tokens_of(engine, each, waits_for=may_end)) for each in requests]
            await until_async(lambda: len(kept) == 2, 30)
            await change
            may_end.set()
            assert await asyncio.gather(*asked) == [greedy, greedy]
            await one.settle()
            return kept.total()

        once = 2 * (len(prompt) + TOKENS - 1)
        await until_async(lambda: all(state.why is None for state in cluster.standbys), 30)
        for worker, to in (("stage 0", new["b"]), ("stage 1", old)):
            assert await answer_while(handover.drain(worker, to.address)) == once
            again = await one.ask(prompt)
            assert (again.token_ids, again.stats.cached_tokens) == (greedy, len(prompt))
        assert cluster.addresses == (new["b"].address, old.address)

        async with supervised(cluster, quiet=engine.quiet), handover.kept():

            async def stop(worker: Worker, by: Worker) -> None:
                places = [by.address if address == worker.address else address for address in cluster.addresses]
                worker.process.terminate()
                await until_async(lambda: [*cluster.addresses] == places, 30)

            assert await answer_while(stop(old, new["c"])) > once
            await asyncio.to_thread(old.process.wait, 10)
            updated = start_at("old")
            await until_async(lambda: [state.why for state in cluster.standbys] == [None], 30)
            assert await answer_while(stop(new["b"], updated)) == once
            assert cluster.addresses == (updated.address, new["c"].address)
            await until_async(lambda: [state.place for state in cluster.standbys] == [new["b"].address], 30)


@pytest.mark.slow
def test_another_protocol_is_refused(before: Path, start_at: StartAt, pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A worker of a release that speaks another one, in a chain with today's: by both versions, and with what to do."""
    other = tmp_path / "other"
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(other)
    description = other / "services" / "messages" / "description.py"
    text = description.read_text()
    assert text.count(f"PROTOCOL_MAJOR = {PROTOCOL_MAJOR}\n") == 1
    description.write_text(
        text.replace(f"PROTOCOL_MAJOR = {PROTOCOL_MAJOR}\n", f"PROTOCOL_MAJOR = {PROTOCOL_MAJOR - 1}\n")
    )
    older, today = start_at("older", other), start_at("today")

    devices = f"{today.address},{older.address}"
    err = refusal("--model", pairs["qwen3"].target, "--prompt-ids", "1", "--target-devices", devices)

    words = (
        "stage 1",
        older.address,
        f"{PROTOCOL_MAJOR - 1}.0",
        f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        "install the same",
    )
    assert all(word in err for word in words), err
