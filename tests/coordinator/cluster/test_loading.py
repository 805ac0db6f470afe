"""Having workers load: what they keep keys and values in is what was asked for, and the same in all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cluster.agreement import check_same_model
from coordinator.cluster.loading import Checkpoints, Loader, LoadReporter
from coordinator.cluster.placement import StagePlan, WorkerPlace
from services.errors import FailedPrecondition, Unavailable
from services.layers import LayerRange
from services.messages.description import WorkerDescription
from services.messages.loading import LoadTarget
from services.model.quantization import Quantization, QuantizedTo
from services.rpc.peers import Peers
from tests.coordinator.cluster.toy_worker import ToyHost
from tests.coordinator.conftest import Hosts
from tests.services.fakes import WORKER

FLOAT8 = "float8_e4m3fn"


async def load(
    host: ToyHost,
    kv_dtype: str | None = None,
    quantization: Quantization | None = None,
    rope_scaling: str | None = None,
    host_experts: float = 0.0,
) -> WorkerDescription:
    peers = Peers()
    checkpoints = Checkpoints(
        Path("/models/t"),
        None,
        "bfloat16",
        kv_dtype=kv_dtype,
        quantization=quantization,
        rope_scaling=rope_scaling,
    )
    try:
        plan = StagePlan(WorkerPlace(None, host.address), LayerRange(0, 3), host_experts)
        return await Loader(peers, checkpoints, LoadReporter()).load_stage("stage 0", plan, host.address)
    finally:
        await peers.close()


@pytest.mark.parametrize("kv_dtype", [None, FLOAT8])
async def test_the_type_of_keys_and_values_reaches_the_worker(hosts: Hosts, kv_dtype: str | None) -> None:
    """What was asked for is loaded, and stands in the worker's description."""
    [host] = await hosts(1)
    loaded = await load(host, kv_dtype)
    assert host.worker.loaded == [LoadTarget("/models/t", LayerRange(0, 3), "bfloat16", None, kv_dtype)]
    assert loaded.target is not None
    assert loaded.target.kv_dtype == kv_dtype


async def test_a_worker_that_ignores_the_type_is_refused(hosts: Hosts) -> None:
    """One of an older release keeps keys and values as ever: it is named, with what it keeps and its release."""
    [host] = await hosts(1)
    host.worker.knows_kv_dtype = False
    with pytest.raises(FailedPrecondition) as caught:
        await load(host, FLOAT8)
    assert f"keeps keys and values in bfloat16, not in {FLOAT8}" in caught.value.message
    assert WORKER.flashsplit_version in caught.value.message
    assert caught.value.where["field"] == "kv_dtype"
    await load(host, None)


async def test_a_worker_that_packs_nothing_is_refused(hosts: Hosts) -> None:
    """One of an older release holds the target, or the draft, as the checkpoint has it: it is named, with its
    release."""
    [host] = await hosts(1)
    packed = Quantization(QuantizedTo.INT4, ends=True)
    loaded = await load(host, quantization=packed)
    assert loaded.target is not None
    assert loaded.target.quantization == packed
    host.worker.knows_quantization = False
    with pytest.raises(FailedPrecondition) as caught:
        await load(host, quantization=packed)
    assert "holds matrices as the checkpoint has them, not packed to int4, head too" in caught.value.message
    assert WORKER.flashsplit_version in caught.value.message
    assert caught.value.where["field"] == "--quantize"
    peers = Peers()
    checkpoints = Checkpoints(Path("/models/t"), Path("/models/d"), None, draft_quantization=packed)
    try:
        with pytest.raises(FailedPrecondition, match=r"draft .* not packed to int4.* leave out --quantize-draft"):
            await Loader(peers, checkpoints, LoadReporter()).load_draft(host.address, beside=False)
    finally:
        await peers.close()


async def test_a_worker_that_knows_no_scaling_of_rope_is_refused(hosts: Hosts) -> None:
    """One of an older release turns positions as the checkpoint says: it is named, with its release."""
    [host] = await hosts(1)
    scaling = '{"factor": 2, "rope_type": "linear"}'
    loaded = await load(host, rope_scaling=scaling)
    assert loaded.target is not None
    assert loaded.target.rope_scaling == scaling
    host.worker.knows_rope_scaling = False
    with pytest.raises(FailedPrecondition, match="scales RoPE as the checkpoint says, not as") as caught:
        await load(host, rope_scaling=scaling)
    assert WORKER.flashsplit_version in caught.value.message
    assert caught.value.where["field"] == "--rope-scaling"


async def test_a_worker_that_has_experts_elsewhere_is_refused(hosts: Hosts) -> None:
    """One of an older release has all of them on its device: it is named, with its release."""
    [host] = await hosts(1)
    loaded = await load(host, host_experts=0.6)
    assert loaded.target is not None
    assert loaded.target.host_experts == 0.6
    host.worker.knows_host_experts = False
    with pytest.raises(FailedPrecondition, match="has 0 of the experts in the host's memory, not 0.6") as caught:
        await load(host, host_experts=0.6)
    assert WORKER.flashsplit_version in caught.value.message
    assert caught.value.where["field"] == "--expert-devices"


async def test_a_worker_that_does_not_answer_is_named(hosts: Hosts) -> None:
    """Stage and address stand in the error of the call."""
    [host] = await hosts(1)
    host.worker.fault = Unavailable("draining")
    with pytest.raises(Unavailable, match=rf"^stage 0 .*{host.address}.*: draining$"):
        await load(host, None)


def test_stages_of_two_types_do_not_go_together() -> None:
    """Both sides are named."""
    assert WORKER.target is not None
    other = replace(WORKER, target=replace(WORKER.target, kv_dtype=FLOAT8))

    check_same_model([other, other])
    with pytest.raises(FailedPrecondition, match=f"stage 1 .* holds kv_dtype {FLOAT8}, stage 0 .* auto") as caught:
        check_same_model([WORKER, other])
    assert caught.value.reason == "DTYPE_MISMATCH"


def test_stages_of_two_packings_do_not_go_together() -> None:
    """Both are named, before fingerprints that say less."""
    assert WORKER.target is not None
    packed = replace(WORKER.target, quantization=Quantization(QuantizedTo.INT8), fingerprint="f0")
    with pytest.raises(FailedPrecondition, match="stage 1 .* holds quantization int8, stage 0 .* none") as caught:
        check_same_model([WORKER, replace(WORKER, target=packed)])
    assert caught.value.reason == "PACKING_MISMATCH"
