"""Matrices of 8-bit floating point numbers with scales: of blocks of rows and columns, of rows, or one for all."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import Rows, StoredParts
from shard_worker.weights.packed import Codes, GroupNumbers, PackedWeight, Packing
from shard_worker.weights.weight import Weight


def load(parts: StoredParts, dtype: torch.dtype) -> Weight:
    """Return the matrix, as `WeightFormat.load`; every row has the scales of its blocks, so that rows can be selected
    and stand below those of other matrices."""
    rows, columns = parts.shape
    group, group_rows = parts.packed.group, parts.packed.group_rows
    scales = parts.scales("scales").reshape(-(-rows // group_rows), -(-columns // group))
    scales = scales.repeat_interleave(group_rows, 0)[:rows].contiguous()

    def make(codes: torch.Tensor, some: Rows) -> PackedWeight:
        return PackedWeight(Packing(Codes.FLOAT8), codes, GroupNumbers(scales[some], group), dtype=dtype)

    return parts.unread("codes", make, (Codes.FLOAT8, group, scales.dtype), dtype)
