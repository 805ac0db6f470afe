"""Where kernels run, and what the log says where they do not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import structlog
import torch

from services.errors import FailedPrecondition
from services.model.config import LinearAttentionConfig
from services.model.families import read_model_config
from shard_worker.device import devices
from shard_worker.device.devices import Device, KernelTarget, cuda_target, hip_target
from shard_worker.model.kernel_support import can_prefill, can_run, can_run_model, check_float8, have_layers
from tests.reference import storage
from tests.shard_worker.tiny import Tiny, load_stage

Pretend = Callable[[KernelTarget], Device]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Pretend:
    """A device that is a GPU with what a target says; each test has a device of its own."""

    def make(target: KernelTarget) -> Device:
        monkeypatch.setattr(devices, "kernel_target", lambda device: target)
        monkeypatch.setattr(devices, "build_vendor", lambda: "cuda" if target.architecture.startswith("sm_") else "hip")
        return Device(f"{request.node.name} {target.architecture}", torch.device("cuda", 0))

    return make


def nvidia(major: int, minor: int, shared_kib: int = 99) -> KernelTarget:
    return cuda_target(
        SimpleNamespace(
            major=major, minor=minor, multi_processor_count=132, shared_memory_per_block_optin=shared_kib << 10
        )
    )


def amd(architecture: str) -> KernelTarget:
    return hip_target(
        SimpleNamespace(gcnArchName=architecture, multi_processor_count=104, shared_memory_per_block=65536)
    )


@pytest.mark.parametrize("target", [nvidia(8, 0), nvidia(9, 0), nvidia(12, 0), amd("gfx90a"), amd("gfx1201")])
def test_kernels_run_where_there_are_matrix_instructions(pretend: Pretend, target: KernelTarget) -> None:
    """Nothing is logged then."""
    with structlog.testing.capture_logs() as logs:
        assert can_run(pretend(target), [64, 128])
    assert logs == []


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (nvidia(6, 1), "its compute capability is 6.1, and 8.0 is needed"),
        (nvidia(7, 5), "its compute capability is 7.5, and 8.0 is needed"),
        (amd("gfx906"), "Triton has no matrix instructions for gfx906"),
    ],
)
def test_a_gpu_that_cannot_run_kernels_is_named_once(pretend: Pretend, target: KernelTarget, why: str) -> None:
    """However often it is asked for: the log names the device, its architecture and what is missing."""
    device = pretend(target)
    with structlog.testing.capture_logs() as logs:
        assert not can_run(device, [128])
        assert not can_run(device, [128])
    [event] = logs
    assert (event["event"], event["log_level"]) == ("kernels.unavailable", "warning")
    assert (event["device"], event["architecture"], event["why"]) == (device.name, target.architecture, why)


@pytest.mark.parametrize("sizes", [[80], [64, 8], [512]])
def test_heads_of_other_sizes_are_named(pretend: Pretend, sizes: list[int]) -> None:
    """Kernels are for heads of 16 to 256 numbers, powers of two."""
    with structlog.testing.capture_logs() as logs:
        assert not can_run(pretend(nvidia(9, 0)), sizes)
    assert [event["why"] for event in logs] == [
        f"heads have {sizes[-1]} numbers, and 16, 32, 64, 128 or 256 are needed"
    ]


def test_attention_may_have_wider_heads_than_others(pretend: Pretend, tiny: Tiny) -> None:
    """Those of a target's full layers have up to 512 numbers; kernels for recurrent ones have no room for so many."""
    gemma, hybrid = (read_model_config(storage.read_config(tiny.path(name))) for name in ("gemma4", "qwen3_5"))
    assert gemma.full_attention is not None
    assert hybrid.linear is not None
    device = pretend(nvidia(9, 0))
    with structlog.testing.capture_logs() as logs:
        assert can_run_model(device, hybrid)
        for size, able in ((512, True), (1024, False)):
            wide = replace(gemma, full_attention=replace(gemma.full_attention, head_dim=size))
            assert can_run_model(device, wide) is able
        widest = replace(gemma, full_attention=replace(gemma.full_attention, head_dim=512))
        assert not can_run_model(pretend(amd("gfx1100")), widest)
        device = pretend(nvidia(9, 0))
        assert not can_run_model(device, replace(hybrid, linear=replace(hybrid.linear, key_head_dim=512)))
    assert [event["why"] for event in logs] == [
        "heads have 1024 numbers, and 16, 32, 64, 128, 256 or 512 are needed",
        "heads have 512 numbers, and 16, 32, 64, 128 or 256 are needed",
        "heads have 512 numbers, and 16, 32, 64, 128 or 256 are needed",
    ]


def test_layers_without_kernels_are_named_once(pretend: Pretend, tiny: Tiny) -> None:
    """Experts that are not dense, as those in a CPU's blocks, and biases: plain torch computes them."""
    names = ("llama", "llama-biases", "qwen3_moe", "qwen3_moe", "gpt_oss", "laguna", "gemma4-experts", "gemma4-inputs")
    layers = [load_stage(tiny.path(name), (0, 2)).segments[0].weights for name in names]
    for name in ("qwen3_moe", "glm4_moe", "laguna", "gemma3", "gemma4-experts"):
        layers.append(load_stage(tiny.path(name), (0, 2), dtype="float16").segments[0].weights)
    device = pretend(nvidia(9, 0))
    with structlog.testing.capture_logs() as logs:
        found = [have_layers(device, one) for one in layers]
    assert found == [True, *[False] * 6, *[True] * 6]
    assert [event["why"] for event in logs] == [
        f"there are none for {what}; plain torch serves, slower"
        for what in (
            "biases in SwiGLU",
            "experts that are in memory in unlike forms",
        )
    ]


def test_a_missing_triton_is_named(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a GPU computes by plain torch."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with structlog.testing.capture_logs() as logs:
        assert not can_run(pretend(nvidia(9, 0)), [128])
    assert [event["why"] for event in logs] == ["Triton is not installed"]


def test_a_cpu_computes_by_plain_torch() -> None:
    """Which needs no word in the log."""
    with structlog.testing.capture_logs() as logs:
        assert not can_run(Device("cpu", torch.device("cpu")), [128])
    assert logs == []


@pytest.mark.parametrize(
    ("target", "able"),
    [(nvidia(9, 0, 227), True), (nvidia(8, 0, 163), False), (amd("gfx942"), True), (amd("gfx1100"), False)],
)
def test_prefill_by_kernels(pretend: Pretend, target: KernelTarget, able: bool) -> None:
    """Recurrent layers take prompts by kernels where a chunk fits; a model without such layers needs none."""
    device = pretend(target)
    config = SimpleNamespace(
        attention_shapes={0: SimpleNamespace(head_dim=64)}, linear=LinearAttentionConfig(2, 4, 64, 64, 4)
    )

    assert can_prefill(device, config) == able  # type: ignore[arg-type]
    assert not can_prefill(device, SimpleNamespace(attention_shapes={0: SimpleNamespace(head_dim=64)}, linear=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "kernels", "why"),
    [
        (nvidia(8, 6), True, "its compute capability is 8.6, and 8.9 is needed"),
        (nvidia(8, 6), False, None),
        (nvidia(8, 9), True, None),
        (amd("gfx942"), True, "gfx942 has another 8-bit type, or none"),
        (amd("gfx1201"), True, None),
        (amd("gfx1201"), False, None),
    ],
)
def test_keys_of_eight_bits(pretend: Pretend, target: KernelTarget, kernels: bool, why: str | None) -> None:
    """They are kept where the GPU converts them, and by plain torch on NVIDIA's anywhere; else the refusal says why."""
    device = pretend(target)
    if why is None:
        check_float8(device, kernels=kernels)
        return
    with pytest.raises(FailedPrecondition, match="--kv-dtype fp8: .* cannot keep keys and values") as caught:
        check_float8(device, kernels=kernels)
    assert why in str(caught.value)
    assert caught.value.reason == "KV_DTYPE_UNSUPPORTED"
