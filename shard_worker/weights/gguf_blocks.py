"""From the blocks of GGUF to packed matrices: the same numbers to the bit, in the one form that computing knows.

A block holds the codes of neighbouring values of a row with their scales. Super-blocks of 256 values (the K types and
IQ4_XS) have small whole numbers as scales of 16 or 32 values, and one number for all that multiplies these: both are
kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.errors import Unimplemented
from services.model.gguf.blocks import SERVED, BlockType
from shard_worker.weights.gguf_grids import grid
from shard_worker.weights.integers import halved_powers
from shard_worker.weights.packed import (
    BLOCK_COLUMNS,
    E2M1_DOUBLED,
    Codes,
    GroupNumbers,
    PackedWeight,
    Packing,
    pack_4_bits,
)

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""

_LOW_HALVES, _LOW_SIX, _HIGH_TWO_OF_SIX = 0x0F0F0F0F, 0x3F3F3F3F, 0x30303030
"""Bits of four bytes."""

_VALUES_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 24}
"""How many values are brought to their form at a time, which bounds what is in memory beside the result: on a CPU so
many that it stays within its caches."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The parts of some blocks, the first extent of each being the number of blocks.

    codes: one a value, uint8 or int8; two in a byte where `_Form.run` says so. scales, offsets: one a group.
    scale_factor, offset_factor: one a block.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    scale_factor: torch.Tensor | None = None
    offset_factor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Form:
    """How a type is read. split: takes blocks apart, uint8 [n, bytes of a block]. origin, table: as of `Packing`.

    run: where two codes of 4 bits are in a byte still, of how many bytes the low halves come first and then the high
    ones; 0 where each code is in a byte of its own. short, powers: as of `Packing`.
    """

    split: Callable[[torch.Tensor], _Blocks]
    origin: int = 0
    table: tuple[int, ...] | None = None
    run: int = 0
    short: bool = False
    powers: bool = False


def unpack_blocks(
    kind: BlockType, data: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> PackedWeight:
    """Return the matrix that rows of blocks are.

    data: uint8 [rows, bytes of a row], which is not kept. dtype: of the activations that the matrix takes. device:
    where it is to be, None for where the data are; blocks are sent there as they are.

    Raises Unimplemented for a type that is not served.
    """
    form = _FORMS.get(kind.name)
    if form is None or kind.held is None:
        raise Unimplemented(
            f"GGUF's type {kind.name} is not served, only {', '.join(SERVED)} are: convert the file to Q4_K_M or Q8_0"
        )
    device = device or data.device
    rows, columns = len(data), data.shape[1] // kind.bytes * kind.values
    bits = kind.held_bits(columns)
    step = max(1, _VALUES_AT_A_TIME[device.type] // columns)
    parts: list[torch.Tensor | None] = [None] * 5
    for first in range(0, rows, step):
        some = data[first : first + step].to(device)
        blocks = form.split(some.reshape(-1, kind.bytes))
        numbers = (blocks.scales, blocks.offsets, blocks.scale_factor, blocks.offset_factor)
        for index, part in enumerate((_held_codes(blocks.codes, len(some), form, bits), *numbers)):
            if part is None:
                continue
            whole = parts[index]
            if whole is None:
                extent = part.numel() // len(some)
                if rows <= step:
                    parts[index] = _own(part, some).view(rows, extent)
                    continue
                whole = parts[index] = torch.empty(rows, extent, dtype=part.dtype, device=device)
            whole[first : first + step].view(part.shape).copy_(part)
    codes, scales, offsets, scale_factors, offset_factors = parts
    assert codes is not None
    assert scales is not None
    group, values = kind.held.group, kind.values
    return PackedWeight(
        _packing(form, bits),
        codes,
        GroupNumbers(scales, group, scale_factors, 0 if scale_factors is None else values),
        None
        if offsets is None
        else GroupNumbers(offsets, group, offset_factors, 0 if offset_factors is None else values),
        dtype=dtype,
    )


def _own(part: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a part in memory of its own, side by side. data: what is not kept."""
    is_view = part.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    return part.clone(memory_format=torch.contiguous_format) if is_view else part.contiguous()


def _held_codes(codes: torch.Tensor, rows: int, form: _Form, bits: int) -> torch.Tensor:
    """Return the codes of some rows as they are held, of any shape: row after row."""
    if bits == 4:
        if form.run == BLOCK_COLUMNS // 2:
            return codes
        return _paired(codes) if form.run == BLOCK_COLUMNS // 4 else pack_4_bits(codes.reshape(rows, -1))
    if form.run:
        codes = _nibbles(codes, form.run)
    if form.table is not None:
        return torch.tensor(form.table, dtype=torch.int8, device=codes.device)[codes.int()]
    held = codes.view(torch.int8)
    return held - form.origin if form.origin else held


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits in the order of `BLOCK_COLUMNS`.

    codes: bytes, of runs of a quarter of so many columns; the low halves of a run come first.
    """
    words = _as_words(codes).view(-1, 2, BLOCK_COLUMNS // 16)
    first, second = words.unbind(1)
    held = torch.empty_like(words)
    torch.bitwise_or(first & _LOW_HALVES, (second & _LOW_HALVES) << 4, out=held[:, 0])
    torch.bitwise_or(first >> 4 & _LOW_HALVES, second & ~_LOW_HALVES, out=held[:, 1])
    return held.view(torch.uint8)


def _as_words(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes as int32, so that operators change four at once: a view if they lie side by side."""
    return packed.contiguous().view(-1).view(torch.int32)


def _packing(form: _Form, bits: int) -> Packing:
    """Return how codes are held: those of 8 bits are the numbers that they stand for."""
    if bits == 8:
        return Packing(Codes.INT8, short=form.short)
    table = None if form.table is None else tuple(map(float, form.table))
    return Packing(Codes.BITS4, form.origin, table, powers=form.powers)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a byte of every block, [n, 1]."""
    if all(number % 2 == 0 for number in (blocks.shape[1], at, blocks.storage_offset())) and blocks.is_contiguous():
        # Torch takes a third of the time to move a number of 16 bits that it takes for two bytes.
        return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].contiguous()
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Return codes of 4 bits, [n, 2 * bytes]: of every `run` bytes first the low halves and then the high ones."""
    if run % 4:
        runs = packed.reshape(len(packed), -1, run)
        return torch.stack([runs & 15, runs >> 4], 2).flatten(1)
    words = _as_words(packed).view(-1, run // 4)
    codes = words.new_empty(len(words), 2, run // 4)
    torch.bitwise_and(words, _LOW_HALVES, out=codes[:, 0])
    torch.bitwise_and(words >> 4, _LOW_HALVES, out=codes[:, 1])
    return codes.view(torch.uint8).view(len(packed), -1)


def _add_bits(codes: torch.Tensor, packed: torch.Tensor, run: int, width: int, at: int) -> torch.Tensor:
    """Set further bits of codes [n, values] that have 0 there, and return these.

    packed: as of `_bits`, with run and width. at: the lowest bit of the codes that is set.
    """
    shifts = range(0, 8, width)
    words, mask = _as_words(packed).view(-1, run // 4), ((1 << width) - 1 << at) * 0x01010101
    of_bits = codes.view(torch.int32).view(len(words), len(shifts), run // 4)
    for index, shift in enumerate(shifts):
        moved = words << at - shift if shift < at else words >> shift - at
        of_bits[:, index].bitwise_or_(moved.bitwise_and_(mask))
    return codes


def _bits(packed: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Return codes of `width` bits: of every `run` bytes first the lowest bits of all of them, then the next ones."""
    runs = packed.reshape(len(packed), -1, run)
    # One shift after the other: torch takes ten times as long to shift by a tensor of them.
    return torch.stack([runs >> shift & (1 << width) - 1 for shift in range(0, 8, width)], 2).flatten(1)


def _high_bits_of_5(blocks: torch.Tensor) -> torch.Tensor:
    """Return the highest bits of 32 codes of 5 bits, which 4 bytes hold in order, at their place in the codes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks.unsqueeze(2) >> shifts & 1).flatten(1) << 4


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the offsets of the 8 groups of a super-block, 6 bits each, from 12 bytes."""
    first, second, high = _as_words(packed).view(-1, 3).T.contiguous().unbind()
    scales, offsets = first.new_empty(len(first), 2), first.new_empty(len(first), 2)
    scales[:, 0] = first & _LOW_SIX
    scales[:, 1] = (high & _LOW_HALVES).bitwise_or_(first >> 2 & _HIGH_TWO_OF_SIX)
    offsets[:, 0] = second & _LOW_SIX
    offsets[:, 1] = (high >> 4 & _LOW_HALVES).bitwise_or_(second >> 2 & _HIGH_TWO_OF_SIX)
    return scales.view(torch.uint8), offsets.view(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:], _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(blocks[:, 4:], _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 6:], 16) | _high_bits_of_5(blocks[:, 2:6]), _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Blocks:
    codes = _nibbles(blocks[:, 8:], 16) | _high_bits_of_5(blocks[:, 4:8])
    return _Blocks(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> _Blocks:
    scales, codes = blocks[:, :16], _bits(blocks[:, 16:80], 32, 2)
    return _Blocks(codes, scales & 15, scales >> 4, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: torch.Tensor) -> _Blocks:
    codes = _bits(blocks[:, 32:96], 32, 2) | _bits(blocks[:, :32], 32, 1) << 2
    low, high = _nibbles(blocks[:, 96:104], 8), _bits(blocks[:, 104:108], 4, 2)
    return _Blocks(codes, (low | high << 4).view(torch.int8) - 32, scale_factor=_half(blocks, 108))


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    scales, offsets = _six_bit_scales(blocks[:, 4:16])
    return _Blocks(blocks[:, 16:], scales, offsets, _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    scales, offsets = _six_bit_scales(blocks[:, 4:16])
    codes = _add_bits(_nibbles(blocks[:, 48:], 32), blocks[:, 16:48], 32, 1, at=4)
    return _Blocks(codes, scales, offsets, _half(blocks, 0), -_half(blocks, 2))


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    codes = _add_bits(_nibbles(blocks[:, :128], 64), blocks[:, 128:192], 32, 2, at=4)
    return _Blocks(codes, blocks[:, 192:208].view(torch.int8), scale_factor=_half(blocks, 208))


def _iq4_xs(blocks: torch.Tensor) -> _Blocks:
    low, high = _nibbles(blocks[:, 4:8].reshape(-1, 1), 1).reshape(-1, 8), blocks[:, 2:4]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    scales = low | (high.unsqueeze(2) >> shifts & 3).flatten(1) << 4
    return _Blocks(blocks[:, 8:], scales.view(torch.int8) - 32, scale_factor=_half(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(blocks[:, 1:], halved_powers(blocks[:, :1]))


def _nvfp4(blocks: torch.Tensor) -> _Blocks:
    scales = blocks[:, :4]
    # e4m3 without a sign, halved; its largest number is not one, but 0 in ggml.
    numbers = (scales & 127).view(torch.float8_e4m3fn).half() / 2
    return _Blocks(_nibbles(blocks[:, 4:], 8), torch.where(scales & 127 == 127, 0, numbers))


def _words(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return unsigned numbers that bytes [n, ...] are, int64. dtype: the signed one of as many bits."""
    return packed.contiguous().view(dtype).long() & (1 << 8 * dtype.itemsize) - 1


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Return 1 where a bit is 0 and -1 where it is 1, int8."""
    return 1 - 2 * bits.to(torch.int8)


def _signs_of_7_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return the signs of 8 values for each number, [n, ... * 8]: 7 have a bit each, and an even number is negative."""
    bits = numbers.unsqueeze(-1) >> torch.arange(7, device=numbers.device) & 1
    return _signs(torch.cat([bits, bits.sum(-1, keepdim=True) & 1], -1)).flatten(1)


def _from_grid(name: str, indices: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return values whose magnitudes stand in a type's grid at the indices, int8 [n, values]."""
    return grid(name, indices.device)[indices.long()].flatten(1) * signs


def _sevens(words: torch.Tensor) -> torch.Tensor:
    """Return the four numbers of 7 bits in the lower part of 32 bits, [n, ... * 4]."""
    shifts = torch.arange(0, 28, 7, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 127).flatten(1)


def _odd(scales: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the odd numbers that scales of 4 bits stand for, in parts of 1: float16 has them all."""
    return (2 * scales + 1).half() / parts


def _iq2_xxs(blocks: torch.Tensor) -> _Blocks:
    groups = blocks[:, 2:].reshape(len(blocks), 8, 8)
    words = _words(groups[:, :, 4:], torch.int32).flatten(1)
    codes = _from_grid("IQ2_XXS", groups[:, :, :4].flatten(1), _signs_of_7_bits(_sevens(words)))
    return _Blocks(codes, _odd(words >> 28, 8), scale_factor=_half(blocks, 0))


def _iq2_xs(blocks: torch.Tensor) -> _Blocks:
    words = _words(blocks[:, 2:66], torch.int16)
    codes = _from_grid("IQ2_XS", words & 511, _signs_of_7_bits(words >> 9))
    return _Blocks(codes, _odd(_nibbles(blocks[:, 66:], 1), 8), scale_factor=_half(blocks, 0))


def _iq2_s(blocks: torch.Tensor) -> _Blocks:
    indices = blocks[:, 2:34].int() | _bits(blocks[:, 66:74], 1, 2).int() << 8
    codes = _from_grid("IQ2_S", indices, _signs(_bits(blocks[:, 34:66], 1, 1)))
    return _Blocks(codes, _odd(_nibbles(blocks[:, 74:], 1), 8), scale_factor=_half(blocks, 0))


def _iq3_xxs(blocks: torch.Tensor) -> _Blocks:
    words = _words(blocks[:, 66:], torch.int32)
    codes = _from_grid("IQ3_XXS", blocks[:, 2:66], _signs_of_7_bits(_sevens(words)))
    return _Blocks(codes, _odd(words >> 28, 4), scale_factor=_half(blocks, 0))


def _iq3_s(blocks: torch.Tensor) -> _Blocks:
    indices = blocks[:, 2:66].int() | _bits(blocks[:, 66:74], 1, 1).int() << 8
    codes = _from_grid("IQ3_S", indices, _signs(_bits(blocks[:, 74:106], 1, 1)))
    return _Blocks(codes, 2 * _nibbles(blocks[:, 106:], 1) + 1, scale_factor=_half(blocks, 0))


_FORMS = {
    "Q4_0": _Form(_q4_0, origin=8, run=16),
    "Q4_1": _Form(_q4_1, run=16),
    "Q5_0": _Form(_q5_0, origin=16, short=True),
    "Q5_1": _Form(_q5_1, short=True),
    "Q8_0": _Form(_q8_0),
    "Q2_K": _Form(_q2_k),
    "Q3_K": _Form(_q3_k, origin=4),
    "Q4_K": _Form(_q4_k, run=32),
    "Q5_K": _Form(_q5_k, short=True),
    "Q6_K": _Form(_q6_k, origin=32, short=True),
    "IQ4_NL": _Form(_q4_0, table=IQ4_TABLE, run=16),
    "IQ4_XS": _Form(_iq4_xs, table=IQ4_TABLE, run=16),
    "MXFP4": _Form(_mxfp4, table=E2M1_DOUBLED, run=16, powers=True),
    "NVFP4": _Form(_nvfp4, table=E2M1_DOUBLED),
    "IQ2_XXS": _Form(_iq2_xxs),
    "IQ2_XS": _Form(_iq2_xs),
    "IQ2_S": _Form(_iq2_s),
    "IQ3_XXS": _Form(_iq3_xxs),
    "IQ3_S": _Form(_iq3_s),
}
