"""The largest number of each row."""

from __future__ import annotations

import pytest
import torch

from shard_worker.ops.largest import largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_of_equal_ones_is_taken(dtype: torch.dtype) -> None:
    """Logits of 16 bits are often equal, and what is forbidden is minus infinity."""
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, [700, 40, 999]] = 9.0
    rows[1, :] = float("-inf")
    rows[1, 5] = -60000.0

    found = largest(rows)

    assert found.dtype is torch.int64
    assert found.tolist() == [40, 5, rows[2].tolist().index(max(rows[2].tolist()))]
