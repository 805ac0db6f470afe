"""`flashsplit plan` through the real command: what it says is what a cluster then does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from services.messages.description import FeatureTransport
from services.messages.sampling import SamplingParams
from services.processes.launch import Launch
from tests.e2e.conftest import Pair, Worker, alive, children, flashsplit, generate, interrupt, refusal, until
from tests.e2e.exact_runs import DEMO


def plan(*arguments: object, code: int = 0) -> str:
    """Its stdout, or its stderr where it must fail, cleanly."""
    process = flashsplit("plan", *arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out if code == 0 else err


def planned(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(*arguments, "--json"))
    return found


def test_a_placement_is_shown_without_a_start(pairs: dict[str, Pair]) -> None:
    """Devices that this machine lacks and workers that do not run are no matter: nothing is started or asked."""
    pair = pairs["qwen3_5"]
    began = time.monotonic()
    text = plan(
        *("--model", pair.target, "--draft", pair.draft, "--target-devices", "cpu,cuda:0,nowhere:7001"),
        *("--target-layers", "0:1,1:6,6:8", "--max-model-len", "64,1024", "--sessions", 2),
    )

    assert time.monotonic() - began < 20
    for words in ("caches at 64", "caches at 1024", "2 sessions", "nowhere:7001", "1:6", "The draft is beside stage 2"):
        assert words in text
    assert "█" in text
    assert "predicted" not in text


async def test_auto_asks_local_and_running_workers(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """The layers that it names are for the other commands, and what it says of weights is what their workers hold.

    The worker that ran before runs on; while it has a session it is not measured, and says so.
    """
    pair, running = pairs["qwen3_5"], start_worker()
    devices = f"cpu,{running.address}"
    found = await asyncio.to_thread(
        planned,
        *("--model", pair.target, "--draft", pair.draft, "--target-devices", devices, "--auto", "--threads", 1),
        *("--features", "slices", "--dtype", "float32"),
    )

    assert [measured["worker"] for measured in found["measured"]] == ["cpu", running.address]
    assert found["predicted"]["decode_tokens_per_s"]["256"] > 0
    assert "would help" in found["predicted"]["bottleneck"]
    assert running.process.poll() is None

    drawn = make_plan(
        target_devices=devices,
        layer_split=None,
        target_layers=found["target_layers"],
        draft_device=None,
        num_layers=pair.layers,
        has_draft=True,
    )
    checkpoints = Checkpoints(pair.target, pair.draft, "float32", transport=FeatureTransport.SLICES)
    async with Cluster(drawn, checkpoints, launch=Launch(threads=1)) as cluster:
        held = [worker.target.weight_bytes for worker in cluster.workers if worker.target is not None]
        assert cluster.draft is not None
        held[-1] += cluster.draft.weight_bytes
        session = await cluster.open(
            request_id="busy",
            max_length=16,
            max_rows=8,
            block_rows=1,
            prompt_length=2,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
            speculate=False,
        )
        arguments = ("--model", pair.target, "--target-devices", running.address, "--measure")
        refusal = await asyncio.to_thread(plan, *arguments, code=1)
        await session.close()

    assert [device["weight_bytes"] for device in found["devices"]] == held
    assert f"measuring {running.address}: this worker is held by process {os.getpid()} on " in refusal


@pytest.mark.slow
def test_every_command_can_choose_the_layers(
    pairs: dict[str, Pair], prefix_cases: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """--target-layer-split auto measures, splits and gives the tokens of the unsplit model."""
    pair, (prompt, tokens) = pairs["qwen3"], prefix_cases["qwen3"]
    answer = generate(
        *("--model", pair.target, "--target-devices", "cpu,cpu", "--target-layer-split", "auto", "--threads", 1),
        *("--prompt-ids", ",".join(map(str, prompt)), "--max-tokens", len(tokens), "--ignore-eos"),
    )

    assert tuple(answer["token_ids"]) == tokens
    bounds = [(stage["first_layer"], stage["last_layer"]) for stage in answer["stats"]["stages"]]
    assert [bounds[0][0], bounds[-1][1]] == [0, pair.layers]
    assert bounds[0][1] == bounds[1][0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--target-devices", "cpu,cpu", "--target-layers", "0:3,4:6"), 2, ["4:6 leaves out layers 3:4"]),
        (("--measure", "--target-devices", "127.0.0.1:1"), 1, ["127.0.0.1:1"]),
        (("--auto", "--target-devices", "cpu,cpu", "--sessions", "100000000"), 1, ["no split fits", "--sessions"]),
    ],
)
def test_refusals(pairs: dict[str, Pair], arguments: tuple[str, ...], code: int, words: list[str]) -> None:
    """Each names the flag and the value, with the exit code of its kind."""
    text = plan("--model", pairs["qwen3"].target, *arguments, code=code)

    assert all(word in text for word in words), text


def test_an_interrupted_probe_leaves_nothing_behind(pairs: dict[str, Pair]) -> None:
    """Ctrl-C while local workers start or are measured: they end with the command."""
    process = flashsplit("plan", "--model", pairs["qwen3"].target, "--target-devices", "cpu", "--measure")
    until(lambda: bool(children(process.pid)), 20)
    workers = children(process.pid)
    interrupt(process, signal.SIGINT)

    assert process.returncode == 130
    until(lambda: not any(alive(pid) for pid in workers), 5)


def test_workers_keep_to_a_part_of_the_memory() -> None:
    """An answer comes from two parts of one memory; one that is too small for its layers is refused with numbers."""
    asked = ("--model", DEMO / "target", "--prompt", "Once upon a time", "--max-tokens", "3")
    assert len(generate(*asked, "--target-devices", "cpu@4GiB,cpu@4GiB")["token_ids"]) == 3
    err = refusal(*asked, "--target-devices", "cpu@50MiB")
    assert "the weights of layers [0, 12) take 43.0 MiB on cpu" in err
    assert "of the 50.0 MiB that --device-memory leaves this worker 0 B are free" in err
