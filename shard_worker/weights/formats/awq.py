"""AWQ's layout `gemm`: the transposed matrix, whose words of 32 bits have eight neighbouring rows of one column."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts, checked_zeros
from shard_worker.weights.integers import integer_weight, split_words
from shard_worker.weights.packed import PackedWeight

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which half byte of a word, the lowest bits first, each of its eight rows is."""


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    codes, zeros = (_in_order(split_words(parts.tensor(role), 4)) for role in ("codes", "zeros"))
    scales = parts.scales("scales").t().contiguous()
    own_zeros = checked_zeros(parts, "zeros", zeros)
    return integer_weight(codes.contiguous(), 4, scales, own_zeros, parts.packed.group, dtype)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [columns, rows] in the order of the words' halves of bytes as [rows, columns]."""
    columns, rows = codes.shape
    return codes.view(columns, rows // 8, 8)[:, :, list(PLACES)].view(columns, rows).t()
