"""How much of a device's memory a worker may use, as people write it."""

from __future__ import annotations

import pytest

from services.errors import InvalidArgument
from services.processes.device_memory import GPU_CONTEXT_BYTES, parse_limit, usable_bytes


def test_a_gpus_context_is_part_of_its_limit() -> None:
    """What is left is for weights, sessions and activations; a CPU's limit has no such part."""
    assert parse_limit("8GiB", "cuda:0", "--x") == 8 << 30
    assert usable_bytes(8 << 30, "cuda:0") == (8 << 30) - GPU_CONTEXT_BYTES
    assert usable_bytes(8 << 30, "cpu") == 8 << 30
    assert parse_limit("1MiB", "cpu", "--x") == 1 << 20


@pytest.mark.parametrize(("text", "device"), [("640MiB", "hip:1"), ("0", "cpu"), ("0GiB", "best")])
def test_limits_that_leave_nothing_are_refused(text: str, device: str) -> None:
    """By the size, the device and what its context takes."""
    with pytest.raises(InvalidArgument, match=f"--x '{text}' is too little for {device}: .* 640.0 MiB"):
        parse_limit(text, device, "--x")
