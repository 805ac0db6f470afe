"""Whole numbers of 4 or 8 bits in words of 32, row by row, as compressed-tensors stores them.

Zero points are packed the same way, but column by column, and like the numbers they are stored with half of their range
added. With activation order `weight_g_idx` is the group of each column.
"""

from __future__ import annotations

import torch

from shard_worker.weights.formats import Rows, StoredParts, in_group_order
from shard_worker.weights.integers import bytes_of_words, integer_weight, split_pairs
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.weight import Weight


def load(parts: StoredParts, dtype: torch.dtype) -> Weight:
    """Return the matrix, as `WeightFormat.load`."""
    (rows, columns), bits, group = parts.shape, parts.packed.bits, parts.packed.group
    if parts.tensor("shape").tolist() != [rows, columns]:
        raise parts.damaged("shape", f"is {parts.tensor('shape').tolist()}; it must be [{rows}, {columns}]")
    zeros = None
    if parts.has("zeros"):
        zeros = bytes_of_words(parts.tensor("zeros").t())
        zeros = (zeros if bits == 8 else split_pairs(zeros)).t()[:rows]
    scales = parts.scales("scales")

    def make(codes: torch.Tensor, some: Rows) -> PackedWeight:
        own_zeros = None if zeros is None else zeros[some]
        return integer_weight(codes, bits, scales[some], own_zeros, group, dtype)

    if parts.has("group_of_column"):
        return in_group_order(parts, bytes_of_words(parts.tensor("codes")), lambda held: make(held, slice(None)))
    kind = (bits, group, scales.dtype, zeros is None)
    return parts.unread("codes", lambda words, some: make(bytes_of_words(words), some), kind, dtype)
