"""Queries, keys and values as a projection's kernel finishes them, against plain torch."""

from __future__ import annotations

import pytest
import torch

from services.model.cached_tensors import PAGE_ROWS
from services.model.rope import Rope, YarnScaling
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import Rotation, apply_rope, rope_table as plain_table
from tests.shard_worker.model.kernels.machine import DTYPE, device, places_of

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, DEPTH, BASE, ROWS, EPS = 2, 1, 32, 48, 5, 3, 1e-6
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
