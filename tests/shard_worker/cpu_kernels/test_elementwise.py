"""Elementwise kernels against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from shard_worker.cpu_kernels import elementwise, native
from shard_worker.cpu_kernels.elementwise import sum_call, swiglu

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")


@pytest.fixture(autouse=True, params=[8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many float32 a vector has: wider ones than the CPU's are made of two."""
    monkeypatch.setattr(elementwise, "lanes", lambda: request.param)
    for kernel in (elementwise._swiglu, elementwise._sum):
        kernel.cache_clear()
    yield request.param
    for kernel in (elementwise._swiglu, elementwise._sum):
        kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (1, 3072), (7, 80), (64, 32)])
def test_swiglu_is_silu_times_up(rows: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """Rounded after silu and after the product, as two operators would; each row as it is alone."""
    torch.manual_seed(width)
    gate_up = (torch.randn(rows, 2 * width) * 6).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    silu = F.silu(gate).to(dtype)
    expected = (silu.double() * up).to(dtype)

    assert elementwise.takes(gate_up)
    made = swiglu(gate_up)
    assert (made.shape, made.dtype) == (expected.shape, dtype)
    # An exponential in float32 is wrong by some of its last bits: hardly any silu lies so near the middle of two.
    assert (made != expected).sum() <= made.numel() // 200
    torch.testing.assert_close(made, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for row in range(rows):
        assert torch.equal(swiglu(gate_up[row : row + 1]), made[row : row + 1])


def test_gates_of_all_sizes() -> None:
    """Very small ones leave nothing, very large ones themselves; what is no number stays none."""
    gates = torch.tensor([0.0, -0.0, 100.0, -100.0, 3e38, -3e38, torch.inf, torch.nan, 1e-30, -1e-30] + [1.0] * 6)
    made = swiglu(torch.cat([gates, torch.ones(16)])[None].bfloat16())[0].float()
    expected = F.silu(gates.double().bfloat16().double()).bfloat16().float()
    assert made[7].isnan()
    torch.testing.assert_close(made, expected, rtol=8e-3, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 1040)])
def test_sums_are_those_of_torch(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """To the bit, also where they are written over one of the two."""
    one, other = ((torch.randn(shape) * 3).to(dtype) for _ in range(2))
    expected = one + other
    made = torch.empty_like(one)
    sum_call(one, other, made).run()
    assert torch.equal(made, expected)
    sum_call(one, other, one).run()
    assert torch.equal(one, expected)


def test_what_it_does_not_take(lanes: int) -> None:
    """Rows that fill no vector, float32, and elements that lie apart."""
    assert elementwise.takes(torch.zeros(2, 2 * lanes, dtype=torch.bfloat16))
    for gate_up in (
        torch.zeros(2, lanes, dtype=torch.bfloat16),
        torch.zeros(2, 2 * lanes),
        torch.zeros(2, 4 * lanes, dtype=torch.bfloat16)[:, : 2 * lanes],
        torch.zeros(2 * lanes, dtype=torch.bfloat16),
    ):
        assert not elementwise.takes(gate_up)
