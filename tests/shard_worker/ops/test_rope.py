"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch

from shard_worker.ops.rope import apply_rope, inverse_frequencies, rope_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("rotary_dim", [16, 4])
def test_pairs_turn_by_position_times_frequency(rotary_dim: int) -> None:
    """Elements d and d + rotary_dim / 2 are one complex number, turned by position * theta^(-2d / rotary_dim)."""
    theta, positions = 500.0, torch.tensor([0, 1, 7, 3000])
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))

    own = apply_rope(x, rope_table(positions, inverse_frequencies(rotary_dim, theta, CPU), torch.float32))

    half = rotary_dim // 2
    for row, position in enumerate(positions.tolist()):
        for d in range(half):
            angle = torch.tensor(position * theta ** (-2 * d / rotary_dim), dtype=torch.float64)
            turned = torch.complex(x[row, :, d].double(), x[row, :, d + half].double()) * torch.exp(1j * angle)
            torch.testing.assert_close(own[row, :, d].double(), turned.real, rtol=0, atol=2e-4)
            torch.testing.assert_close(own[row, :, d + half].double(), turned.imag, rtol=0, atol=2e-4)


def test_elements_beyond_the_rotary_part_pass_through() -> None:
    """With rotary_dim below head_dim the rest of each head is untouched."""
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    table = rope_table(torch.tensor([5, 6, 7]), inverse_frequencies(4, 1e4, CPU), torch.float32)

    own = apply_rope(x, table)

    assert torch.equal(own[..., 4:], x[..., 4:])
    assert not torch.equal(own[..., :4], x[..., :4])
