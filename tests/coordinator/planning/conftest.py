"""Tiny checkpoints of a few families, and workers with made-up figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cluster.placement import WorkerPlace
from coordinator.planning.step_time import WorkerSpeed
from services.messages.measure import DeviceSpeed, HostSpeed, LinkSpeed
from tests.reference import checkpoints

KINDS = {"full_attention": 1e-4, "linear_attention": 2e-4}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Target and draft by family; bfloat16, so that --dtype changes something."""
    root = tmp_path_factory.mktemp("planned")
    dense = checkpoints.write_qwen3(root / "qwen3", layers=6, tied=True, dtype="bfloat16", max_shard_size="60KB")
    experts = checkpoints.write_qwen3_moe(root / "qwen3_moe", dense=(1,), dtype="bfloat16")
    hybrid = checkpoints.write_qwen3_5(root / "qwen3_5", layers=8, nested=True, extras=True, dtype="bfloat16")
    return {
        "qwen3": (dense, checkpoints.write_draft(root / "qwen3-draft", dense)),
        "qwen3_moe": (experts, checkpoints.write_draft(root / "qwen3_moe-draft", experts)),
        "qwen3_5": (
            hybrid,
            checkpoints.write_draft(
                root / "qwen3_5-draft",
                hybrid,
                layer_types=("sliding_attention", "full_attention"),
                sliding_window=32,
                is_causal=False,
            ),
        ),
    }


def speed(name: str, *, free: int = 1 << 40, read: float = 1e9) -> DeviceSpeed:
    """A device of which all is free but for the part that a plan leaves alone."""
    return DeviceSpeed(name, 0, free, read, 1e12, KINDS, 1e-5, 2e-5)


def mixture_worker(name: str = "cuda:0", *, free: int = 1 << 40, host: int = 1 << 40, read: float = 1e9) -> WorkerSpeed:
    """One worker with a GPU, whose host has so much memory, reads a tenth as fast, and takes thrice as long a layer."""
    beside = HostSpeed(0, host, read / 10, {kind: 3 * seconds for kind, seconds in KINDS.items()})
    [device] = worker(name, free=free, read=read).devices
    return replace(worker(name), devices=(replace(device, host=beside),))


def worker(name: str = "cpu", *, host: str = "a", hop: float = 1e-3, held: int = 0, **figures: float) -> WorkerSpeed:
    """One worker with the devices that its name joins by +."""
    devices = tuple(speed(device, **figures) for device in name.split("+"))  # type: ignore[arg-type]
    return WorkerSpeed(WorkerPlace(name, None), host, devices, LinkSpeed(hop, 1e9), held)
