"""A worker belongs to who had it load something: others are refused by name, and what is gone is loaded again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from coordinator.answer import Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.cluster.supervisor import supervised
from coordinator.engine.generation import generate
from services.errors import FailedPrecondition, Unavailable
from services.layers import LayerRange
from services.messages.holder import Holder
from services.messages.loading import LoadTarget
from services.rpc import worker as rpc_worker
from services.rpc.peers import Peers
from services.telemetry.logs import configure_logs
from tests.e2e.conftest import Pair, Worker, flashsplit, generate as generated, refusal, until

REQUEST = Request("held", (1, 2, 3), 8)


def cluster_of(pair: Pair, *workers: Worker) -> Cluster:
    plan = make_plan(
        target_devices=",".join(worker.address for worker in workers),
        layer_split=None,
        draft_device=None,
        num_layers=pair.layers,
        has_draft=False,
    )
    return Cluster(plan, Checkpoints(pair.target, None, "float32"))


async def test_another_caller_leaves_a_held_worker_as_it_is(
    pairs: dict[str, Pair], start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loads and its sessions are refused with the holder's name, and the holder's requests go on."""
    pair, workers = pairs["qwen3"], [start_worker(), start_worker()]
    async with cluster_of(pair, *workers) as cluster:
        expected = await generate(cluster, REQUEST, None)
        arguments = ["--model", pair.target, "--prompt-ids", "1,2", "--target-devices", workers[1].address]
        err = await asyncio.to_thread(refusal, *arguments)
        assert all(word in err for word in ("held by process", "since", "use another worker")), err
        peers = Peers()
        try:
            with monkeypatch.context() as other:
                other.setattr(rpc_worker, "own_holder", lambda: Holder("other", "another process"))
                with pytest.raises(FailedPrecondition, match="held by process"):
                    await (await peers.worker(workers[0].address)).load(
                        LoadTarget(str(pair.target), LayerRange(0, pair.layers))
                    )
        finally:
            await peers.close()
        assert (await generate(cluster, REQUEST, None)).token_ids == expected.token_ids


async def test_a_stage_that_is_gone_is_loaded_again(
    pairs: dict[str, Pair], start_worker: Callable[..., Worker]
) -> None:
    """Here this process itself has the worker load something else. The next request is told that the stage is not there
    now; then it is loaded again without anybody's doing, and requests have the same tokens as before."""
    configure_logs("error")
    pair, workers = pairs["qwen3"], [start_worker(), start_worker()]
    async with cluster_of(pair, *workers) as cluster, supervised(cluster):
        expected = await generate(cluster, REQUEST, None)
        peers = Peers()
        try:
            await (await peers.worker(workers[1].address)).load(
                LoadTarget(str(pair.target), LayerRange(0, pair.layers), "float32")
            )
        finally:
            await peers.close()
        assert cluster.alive
        with pytest.raises(Unavailable, match="this worker holds layers"):
            await generate(cluster, REQUEST, None)
        assert not cluster.alive
        async with asyncio.timeout(60):
            while not cluster.alive:
                await asyncio.sleep(0.05)
        assert (await generate(cluster, REQUEST, None)).token_ids == expected.token_ids


def test_who_was_killed_holds_nothing_soon(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """A coordinator that is started again has its workers back, without anybody's doing."""
    pair, worker = pairs["qwen3"], start_worker()
    placed = ["--model", pair.target, "--prompt-ids", "1,2,3", "--target-devices", worker.address]
    process = flashsplit("generate", *placed, "--max-tokens", "4000", "--ignore-eos")
    assert process.stdout is not None
    until(lambda: bool(process.stdout and process.stdout.read(10)), 60)
    process.send_signal(signal.SIGKILL)
    answer = generated(*placed, "--max-tokens", "5")
    process.communicate(timeout=10)
    assert len(answer["token_ids"]) == 5
