"""How much of a device's memory a worker may use where others use it too, as people write it: "cuda:0@8GiB"."""

from __future__ import annotations

from services.errors import InvalidArgument
from services.sizes import format_size, parse_size

MEMORY_SHARE = 0.9
"""The share of each device's memory that a worker takes for weights, captured steps and pages by default."""

GPU_CONTEXT_BYTES = 640 << 20
"""What a process takes of a GPU beside what it asks for: the driver's context, and the code of kernels."""


def usable_bytes(limit_bytes: int, device: str) -> int:
    """Return how much of a limit is left for weights, sessions and activations. device: like "cuda:0" or "cpu"."""
    return limit_bytes if device == "cpu" else max(0, limit_bytes - GPU_CONTEXT_BYTES)


def parse_limit(text: str, device: str, field: str) -> int:
    """Return the bytes of a limit like "8GiB". device: what it is for, "best" among others. field: names the limit.

    Raises InvalidArgument for what is no size, and for one that leaves nothing to compute with.
    """
    limit = parse_size(text, field)
    if limit <= 0 or (not device.startswith("cpu") and device != "best" and limit <= GPU_CONTEXT_BYTES):
        raise InvalidArgument(
            f"{field} {text!r} is too little for {device}: a GPU's context and kernels take "
            f"{format_size(GPU_CONTEXT_BYTES)} of it; give more",
            field=field,
        )
    return limit
