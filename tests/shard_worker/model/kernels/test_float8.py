"""Kernels that keep keys and values in eight bits against those that don't, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.model.cached_tensors import PAGE_ROWS
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.ops.float8 import FLOAT8, narrowed, widened
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import Rotation, apply_rope
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, places_of, seldom

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, ROTARY, WIDTH, LAYERS, SLOT = 4, 2, 32, 16, 64, 2, 1
CAPACITY, BASE, ROWS = 600, 250, 12


@pytest.fixture
def kept() -> dict[torch.dtype, AttentionCache]:
    """A cache that keeps what is computed in, and one of eight bits, over two pages' ends."""
    like = torch.empty(0, dtype=DTYPE, device=device().torch_device)
    caches = {
        dtype: AttentionCache(LAYERS, KV_HEADS, CAPACITY, DIM, like, PAGE_ROWS, dtype=dtype)
        for dtype in (DTYPE, FLOAT8)
    }
    for cache in caches.values():
        cache.reserve(CAPACITY)
        for page in cache.pages:
            page.view(torch.uint8).zero_()
    return caches


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(device().torch_device, DTYPE)


def test_rows_are_stored_as_plain_torch_stores_them(kept: dict[torch.dtype, AttentionCache]) -> None:
    """What a kernel keeps in eight bits is what it keeps otherwise, rounded as `narrowed` rounds: also beyond 448 and
    among the smallest numbers; and nothing else is touched."""
    if not ON_GPU:
        pytest.skip("the interpreter rounds ties away from zero and loses what is carried")
    from shard_worker.model.kernels.attention import rope_table
    from shard_worker.model.kernels.heads import Heads, HeadShape
    from shard_worker.model.kernels.matmul import linear

    on = device().torch_device
    shape = HeadShape(HEADS, KV_HEADS, DIM, ROTARY, PAGE_ROWS)
    x, weight = random(ROWS, WIDTH, seed=1), random((HEADS + 2 * KV_HEADS) * DIM, WIDTH, seed=2)
    # Keys from 0.001 to beyond 448, values alike.
    factors = torch.logspace(-3, 3, DIM, device=on)
    norms = factors.expand(HEADS + KV_HEADS, DIM).contiguous()
    weight[(HEADS + KV_HEADS) * DIM :] *= factors.repeat(KV_HEADS)[:, None].to(DTYPE) / 4
    rotation = Rotation(torch.logspace(0, -3, ROTARY // 2, device=on))
    queries = {}
    for dtype, cache in kept.items():
        parameters = places_of(cache, BASE, ROWS - 1)
        rope = rope_table(parameters, ROWS, rotation, DTYPE)
        heads = Heads(replace(shape, float8=dtype is FLOAT8), norms, *rope, parameters, SLOT)
        queries[dtype], _ = linear(x, weight, heads=heads, eps=1e-6)

    assert torch.equal(queries[FLOAT8], queries[DTYPE])
    wide, narrow = ([cache.read(slice(None), which, 0, CAPACITY) for which in (0, 1)] for cache in kept.values())
    for one, other in zip(narrow, wide, strict=True):
        assert other.abs().max() > 448
        assert torch.equal(one.view(torch.uint8), narrowed(other).view(torch.uint8))
        assert (other[SLOT, :, BASE : BASE + ROWS - 1] != 0).all()
        assert not one[:SLOT].view(torch.uint8).any()
        assert not one[SLOT, :, BASE + ROWS - 1 :].view(torch.uint8).any()


@pytest.mark.parametrize(("window", "gated"), [seldom(0, False), (100, True), seldom(0, True), seldom(100, False)])
def test_rows_attend_to_what_is_kept(kept: dict[torch.dtype, AttentionCache], window: int, gated: bool) -> None:
    """Attention over pages of eight bits is that over the same numbers in pages of sixteen."""
    from shard_worker.model.kernels.attention import attend
    from shard_worker.model.kernels.heads import HeadShape

    keys, values = (random(BASE + ROWS, KV_HEADS, DIM, seed=seed, scale=3.0) for seed in (3, 4))
    kept[FLOAT8].store(SLOT, 0, keys, values)
    kept[DTYPE].store(SLOT, 0, widened(narrowed(keys), DTYPE), widened(narrowed(values), DTYPE))
    shape = HeadShape(HEADS, KV_HEADS, DIM, ROTARY, PAGE_ROWS, window=window, gated=gated)
    projected = random(ROWS, shape.stride, seed=5)
    found = [
        attend(replace(shape, float8=dtype is FLOAT8), projected, places_of(cache, BASE, ROWS), SLOT, CAPACITY)
        for dtype, cache in kept.items()
    ]

    assert found[0].abs().max() > 0.1
    assert torch.equal(*found)


def test_plain_torch_fills_a_cache_likewise(kept: dict[torch.dtype, AttentionCache]) -> None:
    """A kernel and plain torch leave the same bits where their products do: here those of a matrix with one entry a
    row, which no order of summing changes."""
    if not ON_GPU:
        pytest.skip("the interpreter rounds ties away from zero and loses what is carried")
    from shard_worker.model.kernels.attention import rope_table
    from shard_worker.model.kernels.heads import Heads, HeadShape
    from shard_worker.model.kernels.matmul import linear

    on, width = device().torch_device, (HEADS + 2 * KV_HEADS) * DIM
    x = random(ROWS, width, seed=6, scale=100.0)
    weight = torch.eye(width, device=on, dtype=DTYPE)
    norms = torch.ones(HEADS + KV_HEADS, DIM, device=on)
    parameters = places_of(kept[FLOAT8], BASE, ROWS)
    rope = rope_table(parameters, ROWS, Rotation(torch.logspace(0, -3, ROTARY // 2, device=on)), DTYPE)
    shape = HeadShape(HEADS, KV_HEADS, DIM, ROTARY, PAGE_ROWS, float8=True)
    linear(x, weight, heads=Heads(shape, norms, *rope, parameters, SLOT), eps=1e-6)

    other = AttentionCache(LAYERS, KV_HEADS, CAPACITY, DIM, x, PAGE_ROWS, dtype=FLOAT8)
    heads = x.view(ROWS, -1, DIM)
    turned = apply_rope(rms_norm(heads[:, : HEADS + KV_HEADS], norms, 1e-6), (rope[0][:, None], rope[1][:, None]))
    other.store(SLOT, BASE, turned[:, HEADS:], heads[:, HEADS + KV_HEADS :])
    own = [kept[FLOAT8].read(slice(SLOT, SLOT + 1), which, BASE, BASE + ROWS) for which in (0, 1)]
    expected = [other.read(slice(SLOT, SLOT + 1), which, BASE, BASE + ROWS) for which in (0, 1)]
    assert torch.equal(own[1].view(torch.uint8), expected[1].view(torch.uint8))
    # A norm's sum may round otherwise.
    assert (own[0].view(torch.uint8) == expected[0].view(torch.uint8)).float().mean() > 0.99
