"""Where flashsplit's own kernels can run. Without a GPU or without Triton nothing of them is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import structlog
import torch

from services.errors import FailedPrecondition
from services.model.config import ModelConfig
from shard_worker.device.devices import Device, float8_lack

log = structlog.get_logger()


def can_run(device: Device, sizes: Sequence[int]) -> bool:
    """On a GPU with Triton, for heads whose size is a power of two."""
    if device.torch_device.type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        log.warning("kernels.unavailable", device=device.name, why="Triton is not installed")
        return False
    return all(16 <= size <= 256 and size & (size - 1) == 0 for size in sizes)


def can_prefill(device: Device, config: ModelConfig) -> bool:
    """Whether recurrent layers take many rows by kernels, which want much shared memory."""
    if config.linear is None or not can_run(device, head_sizes(config)):
        return False
    from shard_worker.model.kernels.delta_prefill import SHARED_BYTES

    properties = torch.cuda.get_device_properties(device.torch_device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_BYTES


def check_float8(device: Device, *, kernels: bool) -> None:
    """Raises FailedPrecondition where keys and values cannot be kept in 8-bit floats. kernels: as of `can_run`."""
    lack = float8_lack(device, kernels=kernels)
    if lack is not None:
        raise FailedPrecondition(
            f"--kv-dtype fp8: {device.name} cannot keep keys and values as float8_e4m3fn: {lack}; leave it out, or "
            "give these layers to another device",
            reason="KV_DTYPE_UNSUPPORTED",
            field="kv_dtype",
        )


def head_sizes(config: ModelConfig) -> list[int]:
    """Of all kinds of heads that a model has."""
    linear = config.linear
    return [config.head_dim, *([] if linear is None else [linear.key_head_dim, linear.value_head_dim])]
