"""How fast a device is at what decoding asks of it: reading weights at one row, and what a layer costs beside that.

The first is measured with products of the model's own width over as many bytes as the device would hold, the second
with real layers of the model's family, cut down to a width at which reading weights costs nothing. Bounded in time and
memory; keeps nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from services.layers import LayerRange
from services.measure import DeviceSpeed, MeasureFor
from services.steps import Sampling
from shard_worker.device import Device, describe
from shard_worker.dtypes import dtype_from_name
from shard_worker.families import Family, family_of
from shard_worker.head import Head
from shard_worker.model_config import LayerKind, ModelConfig
from shard_worker.ops.linear import linear, packed
from shard_worker.ops.rope import inverse_frequencies
from shard_worker.sampler import Sampler
from shard_worker.segment import Segment

READ_S, LAYER_S, MATMUL_S = 0.3, 0.12, 0.1
"""How long each figure is measured: LAYER_S once a kind of layer and number of layers."""

REST_S = 0.003
"""Before each run, as a stage rests while the others compute: a core that has just slept is slower, and finds other
programs' data in its caches."""

NARROW = 64
"""Hidden and MLP width of the layers whose weights cost nothing to read."""

FEW, MANY, POSITION = 1, 5, 100
PREFILL_ROWS = 512
MATMUL_ELEMENTS = {"cpu": 4 << 20, "gpu": 1 << 30}
"""Most weights of the product of many rows, which takes 2 * PREFILL_ROWS operations for each."""

MOST_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
"""Most weights that are read in turns: above that no cache helps any more."""


def measure(device: Device, config: Mapping[str, Any], wanted: MeasureFor) -> DeviceSpeed:
    """Runs on the device's thread. Errors as in `family_of`, ResourceExhausted when not even this fits."""
    _, family, shape = family_of(config)
    dtype = dtype_from_name(wanted.dtype)
    described = describe(device)
    layer_s, step_s = _layer_costs(device, family, shape, dtype)
    read_bytes_per_s, flops_per_s = _product_rates(device, shape, dtype, wanted.resident_bytes, described.free_bytes)
    choose_s = _choose_s(device, shape, dtype)
    if device.is_gpu:
        # What torch keeps for later would look taken to whoever asks next.
        torch.cuda.empty_cache()
    return DeviceSpeed(
        name=device.name,
        total_bytes=described.total_bytes,
        free_bytes=described.free_bytes,
        read_bytes_per_s=read_bytes_per_s,
        matmul_flops_per_s=flops_per_s,
        layer_s=layer_s,
        step_s=step_s,
        choose_s=choose_s,
        copy_bytes_per_s=_copy_rate(device, described.free_bytes),
    )


def _product_rates(
    device: Device, shape: ModelConfig, dtype: torch.dtype, resident_bytes: int, free_bytes: int
) -> tuple[float, float]:
    """Bytes a second at one row, operations a second at PREFILL_ROWS."""
    kind = "gpu" if device.is_gpu else "cpu"
    extents = (2 * shape.mlp_size, shape.hidden_size)
    size = extents[0] * extents[1] * dtype.itemsize
    most = min(MOST_BYTES[kind], max(resident_bytes, size))
    if free_bytes:
        most = min(most, max(size, free_bytes // 4))
    made = {"dtype": dtype, "device": device.torch_device}
    # Zeros would be read as fast, but a CPU maps them all to one page.
    matrices = [packed(torch.full(extents, 0.01, **made)) for _ in range(max(1, most // size))]  # type: ignore[call-overload]
    row, rows = (torch.full((count, extents[1]), 0.01, **made) for count in (1, PREFILL_ROWS))  # type: ignore[call-overload]
    tiny, tiny_row = packed(torch.zeros((NARROW, NARROW), **made)), torch.zeros((1, NARROW), **made)  # type: ignore[call-overload]

    def products(x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                linear(x, weight)

        return run

    # What a product costs without weights is in the layers' own figure.
    bare_s = _seconds(device, products(tiny_row, [tiny] * 32), READ_S / 6) / 32
    read_s = _seconds(device, products(row, matrices), READ_S) / len(matrices)
    part = packed(torch.full((min(extents[0], max(1, MATMUL_ELEMENTS[kind] // extents[1])), extents[1]), 0.01, **made))  # type: ignore[call-overload]
    full_s = _seconds(device, products(rows, [part]), MATMUL_S)
    return size / max(read_s - bare_s, read_s / 10), 2 * part.numel() * PREFILL_ROWS / full_s


def _copy_rate(device: Device, free_bytes: int) -> float:
    """Bytes read and written a second."""
    size = MOST_BYTES["gpu" if device.is_gpu else "cpu"]
    if free_bytes:
        size = min(size, free_bytes // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(device, lambda: target.copy_(source), MATMUL_S)


def _layer_costs(
    device: Device, family: Family, shape: ModelConfig, dtype: torch.dtype
) -> tuple[dict[str, float], float]:
    """Seconds of one layer of each kind, and of a step apart from its layers."""
    costs, steps = {}, []
    for kind in dict.fromkeys(shape.layer_kinds):
        few_s = _seconds(device, _narrow_step(device, family, shape, kind, FEW, dtype), LAYER_S)
        many_s = _seconds(device, _narrow_step(device, family, shape, kind, MANY, dtype), LAYER_S)
        costs[kind.value] = max((many_s - few_s) / (MANY - FEW), 0.0)
        steps.append(max(few_s - FEW * costs[kind.value], 0.0))
    return costs, statistics.mean(steps)


def _narrow_step(
    device: Device, family: Family, shape: ModelConfig, kind: LayerKind, layers: int, dtype: torch.dtype
) -> Callable[[], None]:
    """A step of one row through `layers` narrow layers of a kind; heads and state are those of the model."""
    narrow = replace(shape, hidden_size=NARROW, mlp_size=NARROW, vocab_size=NARROW, layer_kinds=(kind,) * layers)
    target = device.torch_device
    weights = []
    for layer in range(layers):
        tensors = {
            name: torch.full(extents, 0.01, dtype=dtype, device=target)
            for name, extents in family.layer_shapes(narrow, layer).items()
        }
        weights.append(family.pack_layer(narrow, layer, tensors))
    segment = Segment(
        family=family,
        config=narrow,
        layers=LayerRange(0, layers),
        device=device,
        weights=tuple(weights),
        frequencies=inverse_frequencies(narrow.rotary_dim, narrow.rope_theta, target),
        capture=None,
        dtype=dtype,
    )
    caches = segment.allocate(POSITION + 1, 1)
    hidden = torch.full((1, NARROW), 0.01, dtype=dtype, device=target)

    def step() -> None:
        segment.run(hidden, POSITION, False, caches, None)

    return step


def _choose_s(device: Device, shape: ModelConfig, dtype: torch.dtype) -> float:
    """Seconds of the last stage's norm and of choosing a token, apart from reading lm_head."""
    made = {"dtype": dtype, "device": device.torch_device}
    norm = torch.ones(NARROW, device=device.torch_device)
    head = Head(norm, packed(torch.zeros((NARROW, NARROW), **made)), 1e-6)  # type: ignore[call-overload]
    hidden = torch.full((1, NARROW), 0.01, **made)  # type: ignore[call-overload]
    logits = torch.zeros((1, shape.vocab_size), **made)  # type: ignore[call-overload]
    sampler = Sampler(Sampling(), 1, shape.vocab_size, device.torch_device)

    def choose() -> None:
        head.logits(hidden)
        sampler.choose(logits, (0,), POSITION)

    return _seconds(device, choose, LAYER_S / 2)


def _seconds(device: Device, job: Callable[[], object], budget_s: float) -> float:
    """Median time of one run, each after a rest, within the budget; at least three, after two that do not count."""
    for _ in range(2):
        job()
    device.synchronize()
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < deadline:
        time.sleep(REST_S)
        began = time.perf_counter()
        job()
        device.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
