"""A damaged store, killed processes, a store that cannot be used: at worst a miss, never a wrong token."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.prefix.cache import PrefixCache
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.stores import open_store
from services.errors import Unavailable
from tests.e2e.conftest import ROOT, Pair, Worker, alive, children, flashsplit, generate, refusal, until
from tests.e2e.prefix_client import POLICY, Client, client

Cases = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
DEMO = ROOT / "deploy" / "demo"


def flip(path: Path, place: float) -> None:
    """Invert one bit, `place` of the way through a file."""
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * place), len(data) - 1)] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def rewrite(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def other_token(manifest: dict[str, object]) -> None:
    ids = manifest["token_ids"]
    assert isinstance(ids, list)
    ids[3] = (ids[3] + 1) % 256


PARTS = "*/*/*.safetensors"
MANIFESTS = "*/*/manifest.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "first byte": (PARTS, lambda path: flip(path, 0.0)),
    "header": (PARTS, lambda path: flip(path, 0.02)),
    "middle": (PARTS, lambda path: flip(path, 0.5)),
    "last byte": (PARTS, lambda path: flip(path, 1.0)),
    "truncated": (PARTS, truncate),
    "empty": (PARTS, lambda path: path.write_bytes(b"")),
    "foreign part": (PARTS, lambda path: path.write_bytes(os.urandom(4096))),
    "missing part": (PARTS, lambda path: path.unlink()),
    "manifest cut": (MANIFESTS, truncate),
    "manifest empty": (MANIFESTS, lambda path: path.write_bytes(b"")),
    "manifest gone": (MANIFESTS, lambda path: path.unlink()),
    "manifest of something else": (MANIFESTS, lambda path: path.write_text("[1, 2, 3]")),
    "another version": (MANIFESTS, lambda path: rewrite(path, lambda manifest: manifest.update(version=0))),
    "other tokens": (MANIFESTS, lambda path: rewrite(path, other_token)),
    "usage": ("*/*/usage.json", lambda path: path.write_bytes(b"\x00\xff")),
}


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param(("middle", "missing part", "manifest cut", "other tokens"), id="some"),
        pytest.param(tuple(DAMAGES), id="all", marks=pytest.mark.slow),
    ],
)
async def test_a_damaged_store(
    damages: tuple[str, ...],
    pairs: dict[str, Pair],
    prefix_cases: Cases,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """Each damage to all files of its kind: the answer is right, what is damaged isn't taken up, serving goes on."""
    prompt, greedy = prefix_cases["qwen3_5"]
    whole = tmp_path / "whole"
    devices = f"{start_worker().address},{start_worker().address}"

    async with client(pairs["qwen3_5"], devices, store=whole) as one:
        await one.ask(prompt)
        await one.settle()
        lineage = one.cache.lineage(with_draft=True)
        sequence = (*prompt, *greedy)
        names = [lineage.snapshot_id(sequence[:length]) for length in range(len(sequence), 0, -1)]
        assert len([*whole.glob(MANIFESTS)]) >= 2

        async def ask(store: Path) -> int:
            """From a coordinator that has just been started on this store, with nothing in the workers' memory."""
            for address in one.cluster.addresses:
                await (await one.cluster.snapshots(address)).free_snapshots(names)
            disk = DiskCache(open_store(str(store)), [lineage], 8, "tiny", budget_bytes=1 << 30, min_tokens=8)
            async with PrefixCache(one.cluster, "text", disk=disk, policy=POLICY) as cache:
                fresh = Client(one.cluster, cache)
                answer = await fresh.ask(prompt, tokens=16)
                assert answer.token_ids == greedy[:16]
                await fresh.settle()
                again = await fresh.ask(prompt, tokens=16)
                assert again.token_ids == greedy[:16]
                assert again.stats.cached_tokens == len(prompt)
            return answer.stats.cached_tokens

        assert await ask(whole) >= 24
        for name in damages:
            pattern, damage = DAMAGES[name]
            store = tmp_path / name
            shutil.copytree(whole, store)
            found = list(store.glob(pattern))
            assert found, name
            for path in found:
                damage(path)
            cached = await ask(store)
            assert cached == 0 or name == "usage", name
            # What is bad was replaced by what is good.
            assert await ask(store) >= 24, name


def ask_demo(store: Path) -> list[object]:
    return [
        *("--model", DEMO / "target", "--draft", DEMO / "draft", "--dtype", "float32", "--target-devices", "cpu,cpu"),
        *("--chat", "--system", "You do sums, and show how. " * 30, "--prompt", "Calculate 4729 + 3485."),
        *("--kv-cache-dir", store, "--kv-cache-min-tokens", 16),
    ]


@pytest.mark.slow
def test_killed_while_it_saves(tmp_path: Path) -> None:
    """kill -9 of `flashsplit generate` at any moment: no worker stays, the next run's answer is right, no litter."""
    draw = random.Random(6)
    cold = generate(*ask_demo(tmp_path / "cold"))
    store = tmp_path / "store"
    for _ in range(2):
        process = flashsplit("generate", *ask_demo(store))
        until(lambda: store.exists() or process.poll() is not None, 60)  # noqa: B023
        time.sleep(draw.random() * 0.7)
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
        until(lambda: not any(alive(pid) for pid in workers), 10)  # noqa: B023
    for _ in range(2):
        found = generate(*ask_demo(store))
        assert found["token_ids"] == cold["token_ids"]
    assert found["stats"]["cache_source"] == "disk"
    assert not list(store.glob("**/*tmp*"))


@pytest.mark.parametrize("moment", ["save", pytest.param("load", marks=pytest.mark.slow)])
async def test_a_worker_killed_meanwhile(
    moment: str, pairs: dict[str, Pair], prefix_cases: Cases, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """kill -9 of a worker while state goes to disk or comes from it: an error at most, and no wrong token after."""
    prompt, greedy = prefix_cases["qwen3_5"]
    pair, store = pairs["qwen3_5"], tmp_path / "store"
    if moment == "load":
        async with client(pair, "cpu,cpu", store=store) as one:
            await one.ask(prompt)
    first, second = start_worker(), start_worker()
    async with client(pair, f"{first.address},{second.address}", store=store) as one:
        asked = asyncio.ensure_future(one.ask(prompt))
        await asyncio.sleep(0.01 if moment == "load" else 0.25)
        second.process.kill()
        [outcome] = await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), 20)
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, Unavailable)
        else:
            assert outcome.token_ids == greedy
    async with client(pair, "cpu,cpu", "0.6,0.4", store=store) as one:
        for _ in range(2):
            assert (await one.ask(prompt)).token_ids == greedy


def test_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    """Refused at start, with the flag's name."""
    file = tmp_path / "file"
    file.write_text("not a directory")
    asked = ["--model", DEMO / "target", "--prompt", "Hi", "--max-tokens", 2, "--target-devices", "cpu"]

    assert "--kv-cache-dir" in refusal(*asked, "--kv-cache-dir", file / "below")
    assert "--kv-cache-url" in refusal(*asked, "--kv-cache-url", "nowhere://bucket/path")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-cache-dir", "x", "--kv-cache-url", "memory://x"], "--kv-cache-url"),
        (["--no-prefix-cache", "--kv-cache-dir", "x"], "--kv-cache-dir"),
        (["--no-prefix-cache", "--prefix-cache-bytes", "1GiB"], "--prefix-cache-bytes"),
        (["--prefix-cache-bytes", "much"], "--prefix-cache-bytes"),
        (["--kv-cache-dir", "x", "--kv-cache-budget", "-1"], "--kv-cache-budget"),
    ],
)
def test_options_that_contradict(options: list[str], named: str, tmp_path: Path) -> None:
    """Refused before a worker is started, naming one to change."""
    asked = ["--model", DEMO / "target", "--prompt", "Hi", *options]

    assert named in refusal(*asked)


def test_prompts_that_begin_alike() -> None:
    """Several prompts in one command: what they have in common is computed once."""
    asked = [
        *("--model", DEMO / "target", "--draft", DEMO / "draft", "--dtype", "float32", "--target-devices", "cpu,cpu"),
        *("--chat", "--system", "You do sums, and show how. " * 10, "--json"),
        *("--prompt", "Calculate 4729 + 3485.", "--prompt", "Calculate 56 + 31.", "--prompt", "Calculate 56 + 31."),
    ]
    process = flashsplit("generate", *asked)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    first, second, third = [json.loads(line) for line in out.splitlines()]
    assert first["stats"]["cached_tokens"] == 0
    assert 60 < second["stats"]["cached_tokens"] < second["stats"]["prompt_tokens"]
    assert third["stats"]["cached_tokens"] == third["stats"]["prompt_tokens"]
    assert third["token_ids"] == second["token_ids"]
    assert third["stats"]["acceptance_length"] == pytest.approx(second["stats"]["acceptance_length"], rel=0.02)
