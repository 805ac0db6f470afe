"""Products with packed matrices against those of their elements in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.model.cached_tensors import PAGE_ROWS
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.ops.rope import Rotation
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.random_packed import KINDS, random_packed
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.weight import DenseWeight, ReorderedWeight, StackedWeight, Weight, concatenate
from tests.shard_worker.model.kernels.machine import DTYPE, LANE_COLUMNS, ON_GPU, device, places_of, seldom

pytestmark = pytest.mark.gpu

EPS = 1e-6
WIDTH, DEPTH = (1536, 4096) if ON_GPU else (24, 256)


def random(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device().torch_device, dtype)


def packed(kind: str, rows: int = WIDTH, columns: int = DEPTH, dtype: torch.dtype = DTYPE) -> PackedWeight:
    return random_packed(kind, rows, columns, dtype, device().torch_device)


def tiled(weight: Weight, *, lane_columns: int = LANE_COLUMNS) -> Weight:
    """The form that kernels multiply by. lane_columns: as of `Tiling`."""
    if isinstance(weight, StackedWeight):
        return StackedWeight([tiled(part, lane_columns=lane_columns) for part in weight.parts])
    if isinstance(weight, ReorderedWeight):
        return ReorderedWeight(tiled(weight.weight, lane_columns=lane_columns), weight.order)
    if isinstance(weight, PackedWeight):
        return TiledWeight(weight, tiling_of(weight, lane_columns=lane_columns))
    return weight


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether rounding the result alone explains what differs."""
    rounding = (expected.to(found.dtype).double() - expected).norm()
    return bool((found.double() - expected).norm() <= 1.02 * rounding + 2e-6 * expected.norm())


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["q4_k", "iq4_xs", "int8", "fp8"])
@torch.inference_mode()
def test_elements_are_unpacked_in_one_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them and some rows' are those of plain torch, but for the rounding of a sum."""
    from shard_worker.weights import packed as module

    weight, by_kernel = packed(kind, 8), []
    for kernel in (True, False):
        monkeypatch.setattr(module, "_unpacks_by_kernel", lambda device, kernel=kernel: kernel)
        by_kernel.append([weight.unpacked(), weight.unpacked(slice(3, 7), DTYPE), weight.lookup(torch.tensor([5, 2]))])
    for own, expected in zip(*by_kernel, strict=True):
        assert (own.dtype, own.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(own, expected, rtol=1e-6 if own.dtype is torch.float32 else 1e-2, atol=1e-6)


def check_sums(sums: torch.Tensor, rows: torch.Tensor) -> None:
    """Fail unless these are the sums of every 32 columns, the last ones of fewer."""
    padded = F.pad(rows.double(), (0, -rows.shape[1] % 32))
    torch.testing.assert_close(sums.double(), padded.view(len(rows), -1, 32).sum(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_products_are_those_of_the_elements(kind: str) -> None:
    """They are rounded once, at their end: nothing before costs more than float32 does."""
    from shard_worker.model.kernels.matmul import linear

    weight = packed(kind)
    for rows in (1, 3, 16, 40, 256) if ON_GPU else (3,):
        x = random(rows, DEPTH, seed=rows)
        assert near(linear(x, tiled(weight))[0], x.double() @ weight.unpacked().double().T)


@pytest.mark.parametrize(
    ("kind", "lane_columns"),
    [
        (pytest.param if (kind, lane_columns) in (("awq", 0), ("awq", 2), ("q4_k", 4)) else seldom)(kind, lane_columns)
        for kind in ("q4_k", "q6_k", "awq", "nvfp4", "q8_0")
        for lane_columns in (0, 2, 4)
    ],
)
@torch.inference_mode()
def test_the_order_in_which_lanes_multiply_changes_no_product(
    kind: str, lane_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns are brought back to their order: with 16, 32 and 64 bytes at a time, and tiles of 32 bytes;
    where warps multiply by themselves and together; several rows, and one whose groups are multiplied apart."""
    from shard_worker.model.kernels import codes, matmul
    from shard_worker.model.kernels.codes import multiplies_apart
    from shard_worker.model.kernels.product_cuts import Config

    form_of = codes.form_of
    # The interpreter does not run PTX.
    monkeypatch.setattr(matmul, "form_of", lambda weight: form_of(weight)._replace(assembly=""))
    for columns in (256, 192):
        weight, x = packed(kind, 64, columns), random(3, columns, seed=1)
        if columns == 192 and weight.scales.group > 64:
            continue
        held, expected = tiled(weight, lane_columns=lane_columns), x.double() @ weight.unpacked().double().T
        assert isinstance(held, TiledWeight)
        for width, warps in ((32, 2), (64, 2), (64, 4)) if ON_GPU else ((32, 2), (64, 4)):
            config = Config(width, held.tiling.columns, 1, warps, 2, 8)
            for together in (False, True):
                monkeypatch.setattr(matmul, "multiplies_together", lambda *_, together=together: together)
                assert near(matmul.linear(x, held, config=config)[0], expected)
                if multiplies_apart(form_of(held)):
                    alone = config._replace(height=1)
                    assert near(matmul.linear(x[:1], held, config=alone)[0], expected[:1])


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["q4_k"])
@torch.inference_mode()
def test_a_row_is_the_same_alone_and_among_others(kind: str) -> None:
    """To the last bit, for tiles of all heights, as wide as heads too, and where the depth is in parts."""
    from shard_worker.device.devices import kernel_target
    from shard_worker.model.kernels.codes import form_of
    from shard_worker.model.kernels.matmul import linear
    from shard_worker.model.kernels.product_cuts import choose_packed

    depth = max(DEPTH, 1024)
    target = kernel_target(device().torch_device)
    for paired, head_dim in ((False, None), (True, None), (False, 128)) if ON_GPU else ((False, None),):
        weight = tiled(packed(kind, WIDTH * (2 if paired else 1), depth))
        assert isinstance(weight, TiledWeight)
        width, form = weight.rows // 2 if paired else weight.rows, form_of(weight)
        most = 512 if ON_GPU else 17
        x = random(most, depth, seed=2)
        counts = (1, 8, 16, 17, 32, 64, 128, 200, 256, 512) if ON_GPU else (1, 17)
        cuts = {rows: choose_packed(form, width, depth, paired, head_dim, 2, target, rows) for rows in counts}
        assert cuts[1].split > 1
        alone = torch.cat(
            [linear(x[row : row + 1], weight, paired=paired, config=cuts[1])[0] for row in range(0, most, 16)]
        )
        for rows in counts:
            together, _ = linear(x[:rows], weight, paired=paired, config=cuts[rows])
            assert torch.equal(together[::16], alone[: -(-rows // 16)]), (paired, head_dim, cuts[rows])


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@torch.inference_mode()
def test_what_is_done_around_a_product(dtype: torch.dtype) -> None:
    """A norm that is due, SwiGLU, bias, residual and the next norm; gates and ups of one form and of two."""
    from shard_worker.model.kernels.matmul import Normed, Summed, begin, linear

    limit = 1e-5 if dtype is torch.float32 else 1e-2
    x, norm = random(3, DEPTH, seed=3, dtype=dtype), torch.rand(DEPTH, device=device().torch_device) + 0.5
    normed = begin(x, norm, EPS)
    due = F.rms_norm(x.double(), (DEPTH,), norm.double(), EPS)
    gates, ups = packed("q4_k", dtype=dtype), packed("q8_0", dtype=dtype)
    for weight in (packed("q4_k", 2 * WIDTH, dtype=dtype), StackedWeight((gates, ups))):
        parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
        gate, up = (due @ torch.cat([part.unpacked() for part in parts]).double().T).chunk(2, -1)
        (found, summed), expected = linear(normed, tiled(weight), paired=True, then=tiled(gates)), F.silu(gate) * up
        if isinstance(weight, PackedWeight):
            assert isinstance(summed, Summed)
            check_sums(summed.sums, found)
        assert (found.double() - expected).norm() < limit * expected.norm()

    bias, residual = random(WIDTH, seed=4, dtype=dtype), random(3, WIDTH, seed=5, dtype=dtype)
    then = torch.rand(WIDTH, device=device().torch_device) + 0.5
    order = torch.randperm(DEPTH, generator=torch.Generator().manual_seed(6)).to(x.device)
    weight = tiled(ReorderedWeight(gates, order.int()))
    found, following = linear(
        x, weight, bias=bias, residual=residual, norm=then, eps=EPS, then=tiled(concatenate([gates, ups]))
    )
    expected = x.double()[:, order] @ gates.unpacked().double().T + bias.double() + residual.double()
    assert (found.double() - expected).norm() < limit * expected.norm()
    assert isinstance(following, Normed)
    assert following.sums is not None
    check_sums(following.sums, following.scaled)
    assert (following.squares.sum(1).double() - expected.square().sum(1)).norm() < limit * expected.square().sum()
    assert (following.scaled.double() - expected * then.double()).norm() < limit * (expected * then).norm()


@torch.inference_mode()
def test_heads_of_unlike_forms_are_those_of_one_matrix() -> None:
    """Queries, keys, values and gates, packed each in its own way and dense: what a dense matrix of the same elements
    makes of them, in the result and in the session's pages."""
    from shard_worker.model.kernels.attention import rope_table
    from shard_worker.model.kernels.heads import Heads, HeadShape
    from shard_worker.model.kernels.matmul import linear

    on, heads, kv_heads, dim, rows = device().torch_device, 2, 1, 32, 3
    shape = HeadShape(heads, kv_heads, dim, dim, PAGE_ROWS, gated=True)
    parts: list[Weight] = [
        packed("q4_k", heads * dim, dtype=torch.float32),
        packed("q6_k", kv_heads * dim, dtype=torch.float32),
        DenseWeight(random(kv_heads * dim, DEPTH, seed=7, dtype=torch.float32) / 50),
        packed("q4_k", heads * dim, dtype=torch.float32),
    ]
    elements = [part.unpacked() if isinstance(part, PackedWeight) else part.tensor for part in parts]
    x, norms = random(rows, DEPTH, seed=8, dtype=torch.float32), torch.rand(heads + kv_heads, dim, device=on) + 0.5
    bias = random(sum(part.rows for part in parts), seed=9, dtype=torch.float32)
    found = []
    for weight in (tiled(concatenate(parts)), torch.cat(elements)):
        cache = AttentionCache(1, kv_heads, PAGE_ROWS, dim, x, PAGE_ROWS)
        cache.reserve(rows)
        places = places_of(cache, 0, rows)
        rope = rope_table(places, rows, Rotation(torch.logspace(0, -3, dim // 2, device=on)), torch.float32)
        queries, _ = linear(x, weight, bias=bias, heads=Heads(shape, norms, *rope, places, 0), eps=EPS)
        found.append([queries, *(cache.read(slice(None), which, 0, rows) for which in (0, 1))])
    for own, expected in zip(*found, strict=True):
        assert (own - expected).norm() < 1e-4 * expected.norm()
