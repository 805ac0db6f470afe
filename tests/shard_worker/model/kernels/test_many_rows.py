"""Kernels for many rows against plain torch: norms, SwiGLU, GeGLU, and recurrent layers in chunks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from services.model.config import LinearAttentionConfig
from services.model.rope import Rope
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.layer_weights import LinearAttentionWeights
from shard_worker.model.layers import linear_attention
from shard_worker.model.rows import PLAIN, RowOperations, Rows, SessionRows
from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, seldom
from tests.shard_worker.tiny import BY_KERNELS, Tiny, ids, load_stage

pytestmark = pytest.mark.gpu

WHERE = device().torch_device


@pytest.mark.parametrize("width", [64, 200, 5120])
def test_norm_and_gates_are_those_of_plain_torch(width: int) -> None:
    """In 16 bits, within a rounding; widths that are no power of two too."""
    from shard_worker.model.kernels import elementwise

    x = torch.randn(9, width, device=WHERE).to(DTYPE)
    weight = torch.rand(width, device=WHERE) + 0.5
    gate, up = x.chunk(2, -1)

    close = {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), **close)
    torch.testing.assert_close(elementwise.swiglu(x), F.silu(gate) * up, **close)
    torch.testing.assert_close(elementwise.geglu(x), F.gelu(gate, approximate="tanh") * up, **close)


def by_kernels() -> RowOperations:
    """What kernels do of a recurrent layer."""
    from shard_worker.model.kernels import delta_prefill

    return RowOperations(recurrent_prefill=delta_prefill.run_layer)


def layer(shape: LinearAttentionConfig, hidden: int) -> LinearAttentionWeights:
    """Random weights in float32, so that nothing but the kernels' own rounding shows."""
    generator = torch.Generator().manual_seed(1)

    def made(*extents: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(extents, generator=generator) * spread).to(WHERE)

    width = shape.conv_channels + shape.value_dim + 2 * shape.value_heads
    scale = torch.full((2 * shape.key_heads, 1), shape.key_head_dim**-0.5)
    scale[: shape.key_heads] *= shape.key_head_dim**-0.5
    return LinearAttentionWeights(
        projection=DenseWeight(made(width, hidden, spread=hidden**-0.5)),
        taps=made(shape.conv_taps, shape.conv_channels),
        qk_scale=scale.to(WHERE),
        decay_rate=-made(shape.value_heads).abs(),
        dt_bias=made(shape.value_heads),
        norm=made(shape.value_head_dim).abs() + 0.5,
        out=DenseWeight(made(hidden, shape.value_dim, spread=shape.value_dim**-0.5)),
    )


SHAPES = [LinearAttentionConfig(2, 4, 16, 16, 4), LinearAttentionConfig(1, 3, 32, 64, 4)]
ONE_HEAD = LinearAttentionConfig(1, 1, 16, 32, 4)
if ON_GPU:
    SHAPES.append(LinearAttentionConfig(4, 12, 128, 128, 4))


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        # By default one shape alone goes on from one chunk to the next.
        (seldom if rows >= 64 and (rows, shape) != (65, ONE_HEAD) else pytest.param)(rows, shape)
        for rows in (1, 3, 64, 65, 130)
        for shape in (*SHAPES, *([ONE_HEAD] if rows == 65 else []))
    ],
    ids=lambda value: (
        f"{value.key_head_dim}x{value.value_head_dim}" if isinstance(value, LinearAttentionConfig) else None
    ),
)
@torch.inference_mode()
def test_recurrent_layers_in_chunks(shape: LinearAttentionConfig, rows: int) -> None:
    """From a state that is not zero: the same rows, the same state behind them, the same inputs kept."""
    hidden = 96
    weights, like = layer(shape, hidden), torch.empty(0, device=WHERE)
    caches = [RecurrentCache(2, shape, 4, like) for _ in range(2)]
    for own, first in zip(vars(caches[1]).values(), vars(caches[0]).values(), strict=True):
        if isinstance(first, torch.Tensor):
            own.copy_(first.normal_())
    config: Any = SimpleNamespace(linear=shape, norm_eps=1e-6)
    x = torch.randn(rows, hidden, device=WHERE)
    results = []
    for cache, operations in zip(caches, (PLAIN, by_kernels()), strict=True):
        step = Rows(
            [SessionRows(0, rows, SegmentCaches(None, cache), False)], {Rope(16, 1e4): (like, like)}, operations
        )
        results.append(linear_attention.run(config, weights, 1, x, step))

    expected, found = results
    assert ((found - expected).norm() / expected.norm()) < 1e-3
    states = [cache.state for cache in caches]
    assert ((states[1] - states[0]).norm() / states[0].norm()) < 1e-4
    assert torch.equal(caches[0].conv[:, :3], caches[1].conv[:, :3])


@pytest.mark.skipif(not ON_GPU, reason="number by number this takes minutes")
@pytest.mark.parametrize("name", BY_KERNELS)
@torch.inference_mode()
def test_a_prefill_by_kernels_is_that_of_plain_torch(tiny: Tiny, name: str) -> None:
    """Through all layers of a model, in chunks of any size: as near to the logits of float32 as plain torch comes in 16
    bits, and in float32 the same but for the last bits."""
    tokens = tuple(ids(150))

    def logits(dtype: torch.dtype, pieces: tuple[int, ...], *, by_kernels: bool) -> torch.Tensor:
        stage = load_stage(tiny.path(name), devices=[device()], dtype=str(dtype).removeprefix("torch."))
        plain = stage.without_kernels()
        one = replace(plain, segments=stage.segments) if by_kernels else plain
        head, state, rows, at = plain.head, one.allocate(200, 1), [], 0
        assert head is not None
        for count in pieces:
            own = tokens[at : at + count]
            rows.append(head.logits(one.run(state, one.embed(own), None, uncommitted=False, token_ids=own)))
            at += count
        return torch.cat(rows).float()

    exact = logits(torch.float32, (150,), by_kernels=False)
    usual = (logits(DTYPE, (150,), by_kernels=False) - exact).norm()
    for pieces in ((150,), (64, 1, 85)):
        assert (logits(DTYPE, pieces, by_kernels=True) - exact).norm() < 1.5 * usual
        assert (logits(torch.float32, pieces, by_kernels=True) - exact).norm() < 1e-5 * exact.norm()
