"""Attention of a few rows over pages against a dense one, and of a row alone against the same row in a block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.model.cached_tensors import PAGE_ROWS
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.device.devices import has_flash_attention
from shard_worker.ops.attention import attend_with_sinks, flash_with_sinks
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, places_of, seldom

pytestmark = pytest.mark.gpu

KV_HEADS, GROUP, LAYERS, SLOT = 2, 4, 2, 1
CAPACITY, BASE, ROWS = 400, 250, 16 if ON_GPU else 7


def dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """The last rows' attention in float64. queries: [n, heads, dim]; keys, values: [length, kv_heads, dim]; sinks:
    [heads], a column of scores more, which is dropped behind the softmax. window: positions that a row sees, 0 for
    all."""
    n, length = len(queries), len(keys)
    keys, values = (x.double().repeat_interleave(GROUP, 1) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", queries.double(), keys) * queries.shape[-1] ** -0.5
    distance = torch.arange(length - n, length, device=keys.device)[:, None] - torch.arange(length, device=keys.device)
    seen = (distance >= 0) & (distance < (window or length))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights, values).flatten(1)


SIZES = [*((dim, False) for dim in (16, 32, 64, 128, 256)), (64, True)]


@pytest.mark.parametrize(
    ("dim", "has_sinks", "dtype"),
    [
        (pytest.param if case in ((16, False, DTYPE), (64, True, torch.float32)) else seldom)(*case)
        for case in ((*size, dtype) for size in SIZES for dtype in (DTYPE, torch.float32))
    ],
)
@torch.inference_mode()
def test_a_row_attends_alone_as_in_a_block(dim: int, has_sinks: bool, dtype: torch.dtype) -> None:
    """For heads of every size, over a page's end, without sinks and with small and large ones: near the dense one, and
    to the same bits; with the sums of its columns where they are wanted."""
    from shard_worker.model.kernels.attention import attend
    from shard_worker.model.kernels.codes import group_sums
    from shard_worker.model.kernels.heads import HeadShape
    from shard_worker.model.kernels.matmul import SQUARES_WIDTH

    on, generator = device().torch_device, torch.Generator().manual_seed(dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(on, dtype)

    cache = AttentionCache(LAYERS, KV_HEADS, CAPACITY, dim, torch.empty(0, dtype=dtype, device=on), PAGE_ROWS)
    cache.reserve(CAPACITY)
    keys, values = (random(BASE + ROWS, KV_HEADS, dim) for _ in range(2))
    cache.store(SLOT, 0, keys, values)
    shape = HeadShape(KV_HEADS * GROUP, KV_HEADS, dim, dim, PAGE_ROWS)
    queries = random(ROWS, shape.stride)
    sinks = torch.linspace(-4, 12, KV_HEADS * GROUP).to(on) if has_sinks else None
    sums = None if dim % SQUARES_WIDTH else torch.empty(ROWS, shape.heads * dim // SQUARES_WIDTH, device=on)
    together = attend(shape, queries, places_of(cache, BASE, ROWS), SLOT, CAPACITY, sinks, column_sums=sums)
    assert sums is None or torch.equal(sums, group_sums(together, SQUARES_WIDTH))

    expected = dense(queries.view(ROWS, -1, dim), keys, values, sinks)
    near = 1e-5 if dtype is torch.float32 else 1e-2
    assert (together.double() - expected).norm() < near * expected.norm()
    # What the CPU sums in one order, the interpreter's numpy does not for another number of rows.
    if ON_GPU:
        alone = [
            attend(shape, queries[row : row + 1], places_of(cache, BASE + row, 1), SLOT, CAPACITY, sinks)
            for row in range(ROWS)
        ]
        assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("window", [seldom(0), 200, seldom(500)])
@torch.inference_mode()
def test_programs_have_several_chunks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits as with a program for each, whether all of them can be seen or not."""
    from shard_worker.model.kernels import attention
    from shard_worker.model.kernels.heads import HeadShape

    on, dim, length, rows = device().torch_device, 16, 900, 2 if ON_GPU else 1
    generator = torch.Generator().manual_seed(6)
    cache = AttentionCache(1, KV_HEADS, length, dim, torch.empty(0, device=on), PAGE_ROWS)
    cache.reserve(length)
    keys, values = (torch.randn(length, KV_HEADS, dim, generator=generator).to(on) for _ in range(2))
    cache.store(0, 0, keys, values)
    shape = HeadShape(KV_HEADS * GROUP, KV_HEADS, dim, dim, PAGE_ROWS, window=window)
    queries = torch.randn(rows, shape.stride, generator=generator).to(on)
    found = []
    for programs in (264, 3 * KV_HEADS, KV_HEADS):
        monkeypatch.setattr(attention, "_PROGRAMS", programs)
        found.append(attention.attend(shape, queries, places_of(cache, length - rows, rows), 0, length))
    assert all(torch.equal(one, found[0]) for one in found)
    expected = dense(queries.view(rows, -1, dim), keys, values, window=window)
    assert (found[0].double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("own", ["heads", "elements"])
@torch.inference_mode()
def test_gates_of_heads(own: str) -> None:
    """One of each head or of each of its numbers: the result is multiplied by their softplus."""
    from shard_worker.model.kernels.attention import attend
    from shard_worker.model.kernels.heads import HeadShape

    on, dim, rows, generator = device().torch_device, 16, 2, torch.Generator().manual_seed(4)
    cache = AttentionCache(1, KV_HEADS, PAGE_ROWS, dim, torch.empty(0, device=on), PAGE_ROWS)
    cache.reserve(rows)
    cache.store(0, 0, *(torch.randn(rows, KV_HEADS, dim, generator=generator).to(on) for _ in range(2)))
    shape = HeadShape(KV_HEADS * GROUP, KV_HEADS, dim, dim, PAGE_ROWS)
    queries = torch.randn(rows, shape.stride, generator=generator).to(on)
    gates = (torch.randn(rows, shape.heads * (1 if own == "heads" else dim), generator=generator) * 9).to(on)
    plain, gated = (attend(shape, queries, places_of(cache, 0, rows), 0, PAGE_ROWS, None, one) for one in (None, gates))
    expected = plain.view(rows, shape.heads, dim).double() * F.softplus(gates.double()).view(rows, shape.heads, -1)
    torch.testing.assert_close(gated, expected.flatten(1).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="a GPU's own attention")
@pytest.mark.parametrize("window", [None, 128])
@torch.inference_mode()
def test_sinks_by_flash_attention(window: int | None) -> None:
    """Rows of a prompt behind others, with small and large sinks: as near to the sums in float32 as 16 bits are."""
    if not has_flash_attention(device(), DTYPE, 64):
        pytest.skip("there is none on this GPU")
    on, generator = device().torch_device, torch.Generator().manual_seed(7)
    queries, keys, values = (
        torch.randn(extents, generator=generator).to(on, DTYPE)
        for extents in ((300, 8, 64), (2, 500, 64), (2, 500, 64))
    )
    sinks = torch.linspace(-4, 12, 8, device=on)
    exact = attend_with_sinks(queries.float(), keys.float(), values.float(), sinks, window)
    found = flash_with_sinks(queries, keys, values, sinks, window)
    assert found.dtype is DTYPE
    assert (found.float() - exact).norm() < 1e-2 * exact.norm()
