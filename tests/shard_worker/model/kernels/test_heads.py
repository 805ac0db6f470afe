"""Queries, keys and values as a projection's kernel finishes them, against plain torch."""

from __future__ import annotations

import pytest
import torch

from services.model.rope import Rope, YarnScaling
from shard_worker.cache.attention_cache import PAGE_ROWS, AttentionCache
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import Rotation, apply_rope, rope_table as plain_table
from tests.shard_worker.model.kernels.machine import device, places_of

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
