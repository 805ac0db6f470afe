"""Programs: calls one behind the other, against the same calls by themselves."""

from __future__ import annotations

import pytest
import torch

from shard_worker.cpu_kernels import native
from shard_worker.cpu_kernels.elementwise import sum_call, swiglu_call
from shard_worker.cpu_kernels.norm import norm_call
from shard_worker.cpu_kernels.program import Program

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")


def test_each_call_reads_what_the_one_before_it_wrote(threads: int) -> None:
    """Many times over, as threads that did not wait for each other would not fail every time."""
    torch.manual_seed(threads)
    width, weight = 1024, torch.rand(1024)
    gate_up = torch.randn(3, 2 * width).bfloat16()
    gated, total, normed = (torch.empty(3, width, dtype=torch.bfloat16) for _ in range(3))
    calls = [
        swiglu_call(gate_up, gated),
        sum_call(gated, gated, total),
        norm_call(total, weight, 1e-6, normed),
        sum_call(normed, total, total),
        norm_call(total, weight, 1e-6, normed),
    ]
    for call in calls:
        call.run()
    expected = normed.clone()
    program = Program(calls)
    for _ in range(200):
        for tensor in (gated, total, normed):
            tensor.zero_()
        program.run()
        assert torch.equal(normed, expected)


def test_a_call_is_replaced_by_another_one_of_its_function() -> None:
    """The others stay as they are."""
    one, other, third = (torch.full((1, 64), float(number)).bfloat16() for number in (1, 2, 4))
    first, last = torch.empty_like(one), torch.empty_like(one)
    program = Program([sum_call(one, other, first), sum_call(first, first, last)])
    program.run()
    assert torch.equal(last, torch.full_like(one, 6))
    program.change(0, sum_call(other, third, first))
    program.run()
    assert torch.equal(last, torch.full_like(one, 12))
    with pytest.raises(AssertionError):
        program.change(0, norm_call(one, torch.ones(64), 1.0, first))
