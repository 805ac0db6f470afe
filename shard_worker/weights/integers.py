"""Matrices of codes of 4 and 8 bits, in the form in which they are multiplied by: what their formats share.

Files have codes of 4 bits in pairs of neighbouring columns, the first one in the low half of a byte.
"""

from __future__ import annotations

import torch

from shard_worker.weights.packed import BLOCK_COLUMNS, E2M1_DOUBLED, Codes, GroupNumbers, PackedWeight, Packing
from shard_worker.weights.weight import rows_at_a_time


def integer_weight(
    codes: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> PackedWeight:
    """Return the matrix with the elements `scale * (code - zero)`.

    codes: 0 to 2 ** bits - 1, uint8 [rows, columns] for 8 bits and pairs [rows, columns / 2] for 4. scales: floating
    point [rows, columns / group]. zeros: the code that stands for 0 in each group, integers of the same shape; None
    where it is the one in the middle everywhere. dtype: of the activations that it takes and gives.
    """
    middle = 1 << bits - 1
    offsets = None
    if zeros is not None:
        # In float32 they are exact for scales of 16 bits.
        offsets = GroupNumbers((middle - zeros.short()) * scales.float(), group)
    if bits == 8:
        packing, held = Packing(Codes.INT8), (codes ^ middle).view(torch.int8)
    elif _has_blocks(codes):
        packing, held = Packing(Codes.BITS4, origin=middle), in_blocks(codes)
    else:
        packing, held = Packing(Codes.INT8, origin=middle), split_pairs(codes).view(torch.int8)
    return PackedWeight(packing, held, GroupNumbers(scales, group), offsets, dtype=dtype)


def e2m1_weight(pairs: torch.Tensor, scales: GroupNumbers, dtype: torch.dtype, *, powers: bool = False) -> PackedWeight:
    """Return the matrix of floating point numbers of 4 bits, each times twice its scale.

    pairs: codes, uint8 [rows, columns / 2]. scales: halved, as the table that the codes are looked up in holds twice
    the numbers. dtype: of the activations that it takes and gives. powers: as of `Packing`.
    """
    if _has_blocks(pairs):
        packing = Packing(Codes.BITS4, table=tuple(map(float, E2M1_DOUBLED)), powers=powers)
        held = in_blocks(pairs)
    else:
        table = torch.tensor(E2M1_DOUBLED, dtype=torch.int8, device=pairs.device)
        packing, held = Packing(Codes.INT8), table[split_pairs(pairs).int()]
    return PackedWeight(packing, held, scales, dtype=dtype)


def halved_powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return half of 2 ** (e - 127) for exponents of 8 bits, as MXFP4 has them, in bfloat16, which holds all of them.

    They are made of their bits: for the two smallest it is a subnormal number.
    """
    whole = exponents.int()
    bits = torch.where(whole < 2, 0x00200000 << whole, (whole - 1) << 23)
    return bits.view(torch.float32).bfloat16()


def bytes_of_words(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of words of 32 bits, uint8 with 4 times the words' last extent, lowest bits first: codes of 8
    bits, or pairs of codes of 4."""
    return words.contiguous().view(torch.uint8)


def split_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes in pairs, uint8 with twice the last extent."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def in_blocks(pairs: torch.Tensor) -> torch.Tensor:
    """Return codes in pairs, uint8 [rows, columns / 2], in the order of `BLOCK_COLUMNS`."""
    held = torch.empty_like(pairs, memory_format=torch.contiguous_format)
    step = rows_at_a_time(pairs.shape[1], pairs.device)
    for rows in range(0, len(pairs), step):
        some = pairs[rows : rows + step]
        first, second = some.reshape(len(some), -1, 2, BLOCK_COLUMNS // 4).short().unbind(2)
        # Each byte's two codes become the low halves of two bytes, or the high ones.
        words = ((first | first << 4) & 0x0F0F) | ((second | second << 4) & 0x0F0F) << 4
        held[rows : rows + step].view(torch.int16).view(words.shape).copy_(words)
    return held


def _has_blocks(pairs: torch.Tensor) -> bool:
    """Return whether the columns of pairs are whole blocks; otherwise each code is held in a byte."""
    return pairs.shape[1] * 2 % BLOCK_COLUMNS == 0
