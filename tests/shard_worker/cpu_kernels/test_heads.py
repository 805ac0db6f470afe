"""The kernel that finishes heads against norms and RoPE in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.model.rope import Rope
from shard_worker.cpu_kernels import heads, native
from shard_worker.cpu_kernels.heads import finishing_call
from shard_worker.ops.rope import Rotation, rope_table

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")

EPS = 1e-2


@pytest.fixture(params=[8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many float32 a vector has."""
    monkeypatch.setattr(heads, "lanes", lambda: request.param)
    heads._kernel.cache_clear()
    yield request.param
    heads._kernel.cache_clear()


def table_of(positions: range, turning: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(torch.tensor(positions), Rotation.of(Rope(turning, 10000.0), torch.device("cpu")), dtype)


def expected(
    x: torch.Tensor, norm: torch.Tensor | None, table: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return heads [n, heads, head_dim], normed, rounded and turned in float64."""
    wide = x.double()
    if norm is not None:
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        wide = (wide * factor * norm.double()).to(dtype).double()
    cos, sin = (one.double() for one in table)
    turning = cos.shape[-1]
    part = wide[..., :turning]
    return torch.cat([part * cos + part.roll(turning // 2, -1) * sin, wide[..., turning:]], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("count", "queries", "kv_heads", "size", "turning", "first_value"),
    [(1, 4, 2, 32, 32, 6), (7, 6, 2, 64, 32, 8), (40, 2, 1, 128, 128, 3), (3, 4, 4, 48, 32, 4)],
)
def test_heads_are_normed_turned_and_stored(
    count: int,
    queries: int,
    kv_heads: int,
    size: int,
    turning: int,
    first_value: int,
    normed: bool,
    dtype: torch.dtype,
    lanes: int,
    threads: int,
) -> None:
    """One row and many, with elements that do not turn, keys that are values too, and gates behind; nothing is written
    beside, and a row has the same bits alone."""
    torch.manual_seed(count)
    every = queries + 3 * kv_heads
    projected = (torch.randn(count, every * size) * 3).to(dtype).view(count, every, size)
    norm = torch.randn(queries + kv_heads, size) if normed else None
    table = table_of(range(5, 5 + count), turning, dtype)
    assert heads.takes(projected, norm, table, dtype)

    def finished(rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cached = torch.full((2, kv_heads, count + 9, size), 77.0, dtype=dtype)
        own = projected[rows]
        keys, values = cached.narrow(2, 4, len(own)).unbind()
        part = (table[0][rows], table[1][rows])
        made = torch.empty(len(own), queries, size, dtype=dtype)
        finishing_call(own, first_value, norm, EPS, part, made, keys, values).run()
        assert (cached[:, :, :4] == 77).all()
        assert (cached[:, :, 4 + len(own) :] == 77).all()
        return made, keys.transpose(0, 1), values.transpose(0, 1)

    made, keys, values = finished(slice(None))
    exact = expected(projected[:, : queries + kv_heads], norm, table, dtype)
    both = torch.cat([made, keys], 1)
    assert both.dtype is dtype
    assert (both.double() - exact).norm() <= (exact.to(dtype).double() - exact).norm() * 1.1 + 1e-6 * exact.norm()
    assert torch.equal(values, projected[:, first_value : first_value + kv_heads])
    for one, alone in zip((made, keys, values), finished(slice(count - 1, count)), strict=True):
        assert torch.equal(one[-1:], alone)


def test_what_it_does_not_take() -> None:
    """Float32, heads that fill no vector, tables of another dtype, heads that lie apart, norms of 16 bits, caches of
    eight."""
    bits16 = torch.bfloat16
    rows, size = torch.zeros(2, 4, 64, dtype=bits16), native.lanes()
    table = table_of(range(2), 64, bits16)
    assert heads.takes(rows, None, table, bits16)
    assert heads.takes(rows, torch.zeros(3, 64), table, bits16)
    assert not heads.takes(rows, torch.zeros(3, 64, dtype=bits16), table, bits16)
    assert not heads.takes(rows, None, table, torch.float8_e4m3fn)
    assert not heads.takes(rows.float(), None, table, torch.float32)
    assert not heads.takes(rows, None, table_of(range(2), 64, torch.float32), bits16)
    assert not heads.takes(rows, None, table_of(range(2), size, bits16), bits16)
    assert not heads.takes(rows, None, table_of(range(2), 128, bits16), bits16)
    assert not heads.takes(rows[:, ::2], None, table, bits16)
    assert not heads.takes(torch.zeros(2, 4, 64 + size // 2, dtype=bits16), None, table, bits16)
