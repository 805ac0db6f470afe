"""GPTQ's layout: the transposed matrix, whose words of 32 bits have neighbouring columns of one row.

Zero points are words of neighbouring rows, less one in files of the first version.
"""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts, checked_zeros, in_group_order
from shard_worker.weights.integers import bytes_of_words, integer_weight, split_pairs
from shard_worker.weights.weight import Weight


def load(parts: StoredParts, dtype: torch.dtype) -> Weight:
    """Return the matrix, as `WeightFormat.load`."""
    (rows, _), bits, group = parts.shape, parts.packed.bits, parts.packed.group
    codes = bytes_of_words(parts.tensor("codes").t())
    role = "zeros_less_one" if parts.has("zeros_less_one") else "zeros"
    zeros = bytes_of_words(parts.tensor(role))
    zeros = (zeros if bits == 8 else split_pairs(zeros))[:, :rows]
    if role == "zeros_less_one":
        # 0 less one is stored as the largest code.
        zeros = zeros + 1 & (1 << bits) - 1
    zeros_or_none = checked_zeros(parts, role, zeros.t())
    scales = parts.scales("scales").t().contiguous()
    return in_group_order(parts, codes, lambda held: integer_weight(held, bits, scales, zeros_or_none, group, dtype))
