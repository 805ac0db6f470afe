"""AWQ's layout `gemm`: the transposed matrix, whose words of 32 bits have eight neighbouring rows of one column."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts, checked_zeros
from shard_worker.weights.integers import bytes_of_words, integer_weight
from shard_worker.weights.packed import PackedWeight

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its eight rows is, counted in codes of 4 bits from the lowest."""


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    rows, columns = parts.shape
    words = bytes_of_words(parts.tensor("codes").t()).view(rows // len(PLACES), columns, 4)
    pairs = torch.empty((len(words), len(PLACES), columns // 2), dtype=torch.uint8, device=words.device)
    for number in range(4):
        # One row in the low halves and one in the high ones.
        left, right = words[:, ::2, number], words[:, 1::2, number]
        pairs[:, PLACES.index(2 * number)] = (left & 15) | right << 4
        pairs[:, PLACES.index(2 * number + 1)] = left >> 4 | (right & 0xF0)
    words = parts.tensor("zeros").t()
    zeros = torch.stack([words >> 4 * place & 15 for place in PLACES], 1).flatten(0, 1)
    scales = parts.scales("scales").t().contiguous()
    own_zeros = checked_zeros(parts, "zeros", zeros)
    return integer_weight(pairs.flatten(0, 1), 4, scales, own_zeros, parts.packed.group, dtype)
