"""The kernel for norms against the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shard_worker.cpu_kernels import native, norm

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")


@pytest.fixture(params=[8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many float32 a vector has."""
    monkeypatch.setattr(norm, "lanes", lambda: request.param)
    norm._kernel.cache_clear()
    yield request.param
    norm._kernel.cache_clear()


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "per_head"), [((1, 16), False), ((7, 64), False), ((5, 3, 32), False), ((5, 3, 32), True)]
)
def test_rows_are_normed(shape: tuple[int, ...], per_head: bool, dtype: torch.dtype, lanes: int, threads: int) -> None:
    """Rows and heads, with a weight for all or one for each head, rounded once; the same bits in a part of them, and
    where steps lie apart."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[1:] if per_head else shape[-1:])
    assert norm.takes(x, weight)
    made, exact = norm.rms_norm(x, weight, 1e-2), formula(x, weight, 1e-2)
    assert (made.shape, made.dtype) == (x.shape, dtype)
    torch.testing.assert_close(made, exact.to(dtype), rtol=8e-3, atol=1e-6)
    assert (made.double() - exact).norm() <= (exact.to(dtype).double() - exact).norm() * 1.01 + 1e-6 * exact.norm()
    assert torch.equal(norm.rms_norm(x[-1:], weight, 1e-2), made[-1:])
    apart = torch.cat([x, x], 1)[:, : x.shape[1]]
    if x.dim() == 3:
        assert norm.takes(apart, weight)
        assert torch.equal(norm.rms_norm(apart, weight, 1e-2), made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """To the nearest, and what lies halfway to the even one; infinities and what is no number stay."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    weight = torch.full((16,), 1 + 2.0**-8 if dtype is torch.bfloat16 else 1 + 2.0**-11)
    rows = every[every.isfinite()].unflatten(0, (-1, 16))
    made = norm.rms_norm(rows, weight, 1e-2)
    length = rows.float().square().mean(-1, keepdim=True)
    plain = (rows.float() * (1 / (length + torch.tensor(1e-2)).sqrt()) * weight).to(dtype)
    torch.testing.assert_close(made, plain, rtol=1e-2, atol=1e-6, equal_nan=True)
    assert (made.view(torch.int16) != plain.view(torch.int16)).float().mean() < 0.01
    odd = torch.ones(3, 16, dtype=dtype)
    odd[1, 3], odd[2, 3] = float("nan"), float("inf")
    got = norm.rms_norm(odd, torch.ones(16), 0.0)
    assert bool(got[0].isfinite().all())
    assert bool(got[1].isnan().all())
    assert bool(got[2, 3].isnan())


def test_what_it_does_not_take() -> None:
    """Rows that fill no vector, elements that lie apart, other dtypes and shapes of weights."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    assert norm.takes(zeros(2, 16), torch.ones(16))
    for x, weight in (
        (zeros(2, 12), torch.ones(12)),
        (zeros(16, 2).T, torch.ones(16)),
        (zeros(2, 16).float(), torch.ones(16)),
        (zeros(2, 16), torch.ones(16).bfloat16()),
        (zeros(2, 3, 16), torch.ones(3, 1)),
        (zeros(2, 3, 32)[:, :, :16], torch.ones(16)),
        (zeros(2, 2, 3, 16), torch.ones(16)),
    ):
        assert not norm.takes(x, weight)
