"""MXFP4 as in safetensors files: numbers of 4 bits, two neighbours in a byte, with a power of two for 32 columns."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts
from shard_worker.weights.integers import e2m1_weight, halved_powers
from shard_worker.weights.packed import LARGEST_POWER, GroupNumbers, PackedWeight


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    exponents = parts.tensor("scales").view(torch.uint8)
    if (exponents == 255).any():
        raise parts.damaged("scales", "holds 255, which is NaN; exponents must be 0 to 144")
    halves = GroupNumbers(halved_powers(exponents), parts.packed.group)
    if (halves.values > LARGEST_POWER).any():
        raise parts.damaged("scales", f"holds {exponents.max()}, which is more than 2**17; exponents must be 0 to 144")
    return e2m1_weight(parts.tensor("codes"), halves, dtype, powers=True)
