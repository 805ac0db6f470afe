"""MXFP4 as in safetensors files: numbers of 4 bits, two neighbours in a byte, with a power of two for 32 columns."""

from __future__ import annotations

import torch

from shard_worker.weights.formats import StoredParts
from shard_worker.weights.packed import E2M1_DOUBLED, Codes, GroupNumbers, PackedWeight, Packing, pack_4_bits

BIAS = 127
"""What exponents are stored with added."""


def load(parts: StoredParts, dtype: torch.dtype) -> PackedWeight:
    """Return the matrix, as `WeightFormat.load`."""
    exponents = parts.tensor("scales").view(torch.uint8)
    if (exponents == 255).any():
        raise parts.damaged("scales", "holds 255, which is NaN; exponents must be 0 to 254")
    # Half of them, as the table holds the doubled numbers. The smallest ones are subnormal, in bfloat16 too.
    scales = torch.exp2(exponents.double() - BIAS - 1).bfloat16()
    packing = Packing(Codes.BITS4, table=tuple(map(float, E2M1_DOUBLED)))
    codes = pack_4_bits(pairs_of_4_bits(parts.tensor("codes")))
    return PackedWeight(packing, codes, GroupNumbers(scales, parts.packed.group), dtype=dtype)


def pairs_of_4_bits(held: torch.Tensor) -> torch.Tensor:
    """Return the codes in bytes [rows, columns / 2], each with two neighbouring columns, the first in the low half."""
    return torch.stack([held & 15, held >> 4], 2).flatten(1)
