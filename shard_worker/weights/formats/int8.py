"""Whole numbers of 8 bits as they are, with a scale for each group of columns, for each row or for all."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts
from shard_worker.weights.integers import integer_weight
from shard_worker.weights.packed import PackedWeight


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    rows, _ = parts.shape
    codes = parts.tensor("codes").view(torch.uint8) ^ 128
    scales = _by_row(parts.scales("scales"), rows)
    zeros = _by_row(parts.tensor("zeros"), rows).short() + 128 if parts.has("zeros") else None
    return integer_weight(codes, 8, scales, zeros, parts.packed.group, dtype)


def _by_row(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, groups], from one number for all rows too."""
    return numbers if numbers.dim() == 2 else numbers.reshape(1, 1).repeat(rows, 1)
