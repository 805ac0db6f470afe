"""Workers outlive their coordinator: the next one reads no weights again, and finds the prefixes that they keep."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Pair, Worker, until, when_idle
from tests.e2e.prefix_client import client
from tests.e2e.server import PAIR, Server, serving


@pytest.mark.parametrize("draft_apart", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_another_cluster_of_the_same_workers(
    draft_apart: bool,
    pairs: dict[str, Pair],
    prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """Prompts that begin with what was kept take it up, with the draft's part and without, and have the same tokens.
    What one worker keeps no more none does, once there is another cluster."""
    family, logs = "qwen3_5", [tmp_path / f"{number}.log" for number in range(3 if draft_apart else 2)]
    prompt, greedy = prefix_cases[family]
    workers = [start_worker("--log-level", "info", log=log).address for log in logs]
    devices, draft_device = ",".join(workers[:2]), workers[2] if draft_apart else None
    async with client(pairs[family], devices, draft_device=draft_device) as one:
        for speculate in (True, False):
            assert (await one.ask(prompt, speculate=speculate)).token_ids == greedy
        await one.settle()
    async with client(pairs[family], devices, draft_device=draft_device) as one:
        for speculate in (True, False):
            answer = await one.ask(prompt, speculate=speculate)
            assert (answer.token_ids, answer.stats.cached_tokens) == (greedy, len(prompt))
        continued = await one.ask((*prompt, *greedy[:-1], 9))
        assert continued.stats.cached_tokens == len(prompt) + len(greedy) - 1
        await one.settle()
        last = await one.cluster.snapshots(workers[1])
        kept = await last.list_snapshots()
        assert await last.free_snapshots([one.snapshot_id for one in kept][::-1]) > 0
    async with client(pairs[family], devices, draft_device=draft_device) as one:
        assert (await one.ask(prompt, cached=False)).token_ids == greedy
        await one.settle()
        for address in workers:
            assert (await when_idle(one.cluster, address)).snapshot_bytes == 0
    loads = [log.read_text().count("load.started") for log in logs]
    assert loads == ([1, 1, 1] if draft_apart else [1, 2])


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again(start_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """By SIGKILL while it answers: its session ends at once, the next one finds the prefix of the same prompt. When
    that one is killed too and nobody comes, the workers hold nothing soon."""
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    workers = [start_worker("--log-level", "info", "--orphan-timeout", "4", log=log).address for log in logs]
    answers = []
    for number in range(2):
        (folder := tmp_path / f"server {number}").mkdir()
        with serving(folder, *PAIR, "--target-devices", ",".join(workers)) as server:
            answers.append(_ask(server))
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    first, second = answers
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"]
    assert [log.read_text().count("load.started") for log in logs] == [1, 2]
    until(lambda: all("worker.orphaned" in log.read_text() for log in logs), 20)


def _ask(server: Server) -> dict[str, Any]:
    """The answer to a chat, once its prefix is kept."""
    messages = [
        {"role": "user", "content": "Calculate 4729 + 3485. Then calculate 17 + 4, and say which one is larger."}
    ]
    body = json.dumps({"messages": messages, "temperature": 0}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer
