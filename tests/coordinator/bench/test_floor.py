"""What a step must read, on the devices and in the host's memory beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.bench.floor import Floor
from coordinator.planning.model_size import read_model_size
from services.layers import LayerRange
from services.messages.loading import LoadTarget
from services.messages.measure import DeviceSpeed, HostSpeed
from services.model.checkpoint_files import read_config
from services.model.families import read_model_config
from shard_worker.device.executor import DeviceThread
from shard_worker.roles.target.role import TargetRole
from tests.reference import checkpoints
from tests.shard_worker.chain import resources
from tests.shard_worker.tiny import AS_GPU, ignore_progress


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_experts_are_read_where_they_are(tmp_path: Path, share: float) -> None:
    """A row's experts in the host's memory at its rate and the rest at the device's: together they are what a step of
    a whole model on one device reads."""
    path = checkpoints.write_qwen3_moe(tmp_path, dense=(1,))
    config, size = read_model_config(read_config(path)), read_model_size(path, None)
    thread = DeviceThread(1)
    try:
        role = TargetRole(resources(thread, (AS_GPU,)))
        role.load(LoadTarget(str(path), LayerRange(0, 4), host_experts=share), ignore_progress)
        target = role.describe()
    finally:
        thread.shutdown()
    assert target is not None
    device, host = Floor.weights_read(config, target, size.embedding_bytes, size.head_bytes)

    vectors = 0.01 * size.weight_bytes
    whole = sum(layer.read_bytes for layer in size.layers) + size.head_bytes
    assert device + host == pytest.approx(whole, abs=vectors)
    assert host == pytest.approx(share * sum(layer.expert_read for layer in size.layers))
    beside = HostSpeed(0, 0, 1.0, {}, copy_bytes_per_s=1e3)
    speed = DeviceSpeed("cuda:0", 0, 0, 1.0, 1.0, {}, 0.0, 0.0, copy_bytes_per_s=1e6, host=beside)
    floor = Floor((speed,), (device,), (host,), {}, 0, 0, 0)
    assert floor.ms("decode", 0) == pytest.approx(device / 1e3 + host)
