"""MXFP4 as in safetensors files: numbers of 4 bits, two neighbours in a byte, with a power of two for 32 columns."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts
from shard_worker.weights.integers import e2m1_weight
from shard_worker.weights.packed import GroupNumbers, PackedWeight

BIAS = 127
"""What exponents are stored with added."""


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    exponents = parts.tensor("scales").view(torch.uint8)
    if (exponents == 255).any():
        raise parts.damaged("scales", "holds 255, which is NaN; exponents must be 0 to 254")
    # The smallest halves are subnormal numbers, in bfloat16 too.
    halves = torch.exp2(exponents.double() - BIAS - 1).bfloat16()
    return e2m1_weight(parts.tensor("codes"), GroupNumbers(halves, parts.packed.group), dtype)
