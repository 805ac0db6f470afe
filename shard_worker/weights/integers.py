"""Matrices of whole numbers of 4 and 8 bits, in the form in which they are multiplied by: what their formats share."""

from __future__ import annotations

import torch

from shard_worker.weights.packed import Codes, GroupNumbers, PackedWeight, Packing, pack_4_bits


def integer_weight(
    codes: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> PackedWeight:
    """Return the matrix with the elements `scale * (code - zero)`.

    codes: 0 to 2 ** bits - 1, uint8 [rows, columns]. scales: floating point [rows, columns / group]. zeros: the code
    that stands for 0 in each group, integers of the same shape; None where it is the one in the middle everywhere.
    dtype: of the activations that it takes and gives.
    """
    middle = 1 << bits - 1
    offsets = None
    if zeros is not None:
        # From the middle to the zero point: one more than fits where a code has 8 bits.
        values = (middle - zeros.short()).to(torch.int8 if bits == 4 else torch.int16)
        offsets = GroupNumbers(values.contiguous(), group, scales, group)
    if bits == 4:
        packing, held = Packing(Codes.BITS4, origin=middle), pack_4_bits(codes)
    else:
        packing, held = Packing(Codes.INT8), (codes ^ middle).view(torch.int8)
    return PackedWeight(packing, held, GroupNumbers(scales, group), offsets, dtype=dtype)


def split_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in words of 32 bits, uint8 with `32 / bits` times the words' last extent, lowest bits first.

    words: int32, contiguous in their last extent.
    """
    held = words.contiguous().view(torch.uint8)
    return held if bits == 8 else torch.stack([held & 15, held >> 4], -1).flatten(-2)
