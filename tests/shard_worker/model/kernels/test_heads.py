"""Queries, keys and values as a projection's kernel finishes them, against plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.model.cached_tensors import PAGE_ROWS
from services.model.config import AttentionShape
from services.model.rope import Rope, YarnScaling
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.device.devices import float8_lack
from shard_worker.model.layer_weights import AttentionWeights
from shard_worker.model.layers import attention
from shard_worker.model.rows import PLAIN, RowOperations, SessionRows, make_rows
from shard_worker.ops.float8 import FLOAT8
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import Rotation, apply_rope, rope_table as plain_table
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, places_of

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, DEPTH, BASE, ROWS, EPS = 2, 1, 32, 48, 5, 3, 1e-6
KEEPS_FLOAT8 = ON_GPU and float8_lack(device(), kernels=True) is None
"""The interpreter rounds otherwise."""
YARN = YarnScaling(4.0, 32, 32.0, 1.0, True, 1.25)


@pytest.mark.parametrize("normed", [False, True])
@torch.inference_mode()
def test_heads_with_scaled_rope(normed: bool) -> None:
    """With norms of queries and keys, and without; cos and sin are multiplied by YaRN's factor."""
    from shard_worker.model.kernels.attention import rope_table
    from shard_worker.model.kernels.heads import Heads, HeadShape
    from shard_worker.model.kernels.matmul import linear

    on, generator = device().torch_device, torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, DEPTH, generator=generator).to(on)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * DIM, DEPTH, generator=generator).to(on) / 7
    norms = torch.rand(HEADS + KV_HEADS, DIM, generator=generator).to(on) + 0.5 if normed else None
    rotation = Rotation.of(Rope(DIM, 1e4, YARN), on)
    cache = AttentionCache(1, KV_HEADS, PAGE_ROWS, DIM, x, PAGE_ROWS)
    cache.reserve(BASE + ROWS)
    places = places_of(cache, BASE, ROWS)

    table = rope_table(places, ROWS, rotation, x.dtype)
    heads = Heads(HeadShape(HEADS, KV_HEADS, DIM, DIM, PAGE_ROWS), norms, *table, places, 0)
    queries, _ = linear(x, weight, heads=heads, eps=EPS)

    projected = (x @ weight.T).view(ROWS, -1, DIM)
    qk = projected[:, : HEADS + KV_HEADS]
    qk = rms_norm(qk, norms, EPS) if norms is not None else qk
    qk = apply_rope(qk, plain_table(torch.arange(BASE, BASE + ROWS, device=on), rotation, x.dtype))
    keys, values = (cache.read(slice(None), which, BASE, BASE + ROWS).reshape(ROWS, KV_HEADS, DIM) for which in (0, 1))
    torch.testing.assert_close(queries.view(ROWS, HEADS, DIM), qk[:, :HEADS], rtol=0, atol=2e-5)
    torch.testing.assert_close(keys, qk[:, HEADS:], rtol=0, atol=2e-5)
    torch.testing.assert_close(values, projected[:, HEADS + KV_HEADS :], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "kind", ["usual", "gated", *(["float8"] if KEEPS_FLOAT8 else []), "keys as values", "values", "shares"]
)
@torch.inference_mode()
def test_rows_of_a_prompt(kind: str) -> None:
    """Over a page's end, as a layer of attention finishes them in plain torch: what it makes of them, and what is kept,
    in pages that a prefix holds too."""
    from shard_worker.model.kernels import heads

    on, generator = device().torch_device, torch.Generator().manual_seed(5)
    base, rows = PAGE_ROWS - 4, 9
    both, alone = kind == "keys as values", kind == "shares"
    kv_dtype = FLOAT8 if kind == "float8" else None
    rope = Rope(DIM // 2, 1e4)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, rope, keys_as_values=both, value_norm=both or kind == "values")
    parts = HEADS * (2 if kind == "gated" else 1) + (0 if alone else KV_HEADS if both else 2 * KV_HEADS)

    def random(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=generator).to(on, DTYPE)

    weights = AttentionWeights(
        shape=shape,
        qkv=DenseWeight(random(parts * DIM, DEPTH) / 7),
        qkv_bias=None,
        qk_norm=torch.rand(HEADS + (0 if alone else KV_HEADS), DIM, generator=generator).to(on) + 0.5,
        out=DenseWeight(random(DEPTH, HEADS * DIM)),
        out_bias=None,
        gated=kind == "gated",
        value_norm=torch.ones(DIM, device=on) if both or kind == "values" else None,
        shares=alone,
    )
    config: Any = SimpleNamespace(norm_eps=EPS)
    x, before = random(rows, DEPTH), random(2, KV_HEADS, base + (rows if alone else 0), DIM)
    by_kernels = RowOperations(session_pages=heads.session_pages, finished_heads=heads.finish_rows)
    made, kept = [], []
    for operations in (PLAIN, by_kernels):
        cache = AttentionCache(2, KV_HEADS, 2 * PAGE_ROWS, DIM, x, PAGE_ROWS, dtype=kv_dtype)
        for which in (0, 1):
            cache.write(slice(1, 2), which, 0, before[which][None].to(cache.dtype))
        held = cache.keep(0, base)
        session = SessionRows(base, rows, SegmentCaches(cache, None), False)
        step = make_rows([shape], {rope: Rotation.of(rope, on)}, x, [session], operations=operations)
        made.append(attention.run(config, weights, 1, x, step))
        kept.append(torch.cat([cache.read(slice(1, 2), which, base, base + rows) for which in (0, 1)]).float())
        del held

    assert bool(step.pages)
    torch.testing.assert_close(made[1], made[0], rtol=2e-2, atol=2e-2 if kv_dtype is None else 0.2)
    torch.testing.assert_close(kept[1], kept[0], rtol=2e-2 if kv_dtype is None else 0.13, atol=4e-3)


@pytest.mark.parametrize("kind", ["keys as values", "values", "shares"])
@torch.inference_mode()
def test_heads_with_normed_values(kind: str) -> None:
    """Values with a norm, of their own projection or of what is projected for keys, in a cache behind another one's
    pages; and queries alone. Heads that are finished apart have the same bits."""
    from shard_worker.model.kernels.attention import rope_table
    from shard_worker.model.kernels.heads import Heads, HeadShape, finish_apart
    from shard_worker.model.kernels.matmul import linear
    from shard_worker.model.kernels.step_parameters import StepParameters

    on, generator = device().torch_device, torch.Generator().manual_seed(3)
    alone, both = kind == "shares", kind == "keys as values"
    parts = HEADS + (0 if alone else KV_HEADS if both else 2 * KV_HEADS)
    x = torch.randn(ROWS, DEPTH, generator=generator).to(on, DTYPE)
    weight = torch.randn(parts * DIM, DEPTH, generator=generator).to(on, DTYPE) / 7
    norms = torch.rand(HEADS + (0 if alone else KV_HEADS), DIM, generator=generator).to(on) + 0.5
    rotation = Rotation.of(Rope(DIM, 1e4), on)
    shape = HeadShape(HEADS, KV_HEADS, DIM, DIM, PAGE_ROWS, pages=2, value_norm=True, keys_as_values=both, shares=alone)
    found = []
    for apart in (False, True):
        first, cache = (AttentionCache(1, KV_HEADS, PAGE_ROWS, size, x, PAGE_ROWS) for size in (2 * DIM, DIM))
        for one in (first, cache):
            one.reserve(BASE + ROWS)
            for which in (0, 1):
                one.read(slice(None), which, 0, BASE + ROWS).zero_()
        parameters = StepParameters(on, 2, rows=ROWS, caches=2)
        parameters.fill(BASE, ROWS, attention=first, others=(cache,))
        parameters.send()
        parameters.record_launch()
        places = parameters.places(ROWS)
        heads = Heads(shape, norms, *rope_table(places, ROWS, rotation, x.dtype), places, 0)
        projected, _ = linear(x, weight)
        queries = finish_apart(heads, projected, EPS) if apart else linear(x, weight, heads=heads, eps=EPS)[0]
        kept = [cache.read(slice(None), which, BASE, BASE + ROWS).reshape(ROWS, KV_HEADS, DIM) for which in (0, 1)]
        assert not any(first.read(slice(None), which, 0, BASE + ROWS).any() for which in (0, 1))
        found.append([queries.view(ROWS, HEADS, DIM), *(one.clone() for one in kept)])

    made = projected.view(ROWS, -1, DIM)
    qk = rms_norm(made[:, : len(norms)], norms, EPS)
    qk = apply_rope(qk, plain_table(torch.arange(BASE, BASE + ROWS, device=on), rotation, x.dtype))
    values = rms_norm(made[:, HEADS if both else HEADS + KV_HEADS :], torch.ones(DIM, device=on), EPS)
    nothing = torch.zeros_like(found[0][1])
    expected = [qk[:, :HEADS], *((nothing, nothing) if alone else (qk[:, HEADS:], values))]
    for one, other, right in zip(*found, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=2e-2, atol=2e-3)
        assert torch.equal(one, other)
