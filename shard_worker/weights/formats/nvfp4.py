"""NVFP4: numbers of 4 bits with a scale of 8 bits for 16 columns, and one in float32 for the whole matrix.

compressed-tensors divides by the scale of the whole matrix, ModelOpt multiplies by its own: the part's role says which.
"""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts
from shard_worker.weights.integers import e2m1_weight
from shard_worker.weights.packed import GroupNumbers, PackedWeight


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    rows, columns = parts.shape
    if parts.has("scale_divisor"):
        divisor = parts.scales("scale_divisor")
        if not divisor.all():
            raise parts.damaged("scale_divisor", "is 0; scales are divided by it")
        whole = 1 / divisor
    else:
        whole = parts.scales("scale_factor")
    factors = (whole / 2).reshape(1, 1).repeat(rows, 1)
    scales = GroupNumbers(parts.scales("scales"), parts.packed.group, factors, columns)
    return e2m1_weight(parts.tensor("codes"), scales, dtype)
