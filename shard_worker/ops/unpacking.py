"""Elements of packed matrices on a GPU, in one pass over memory: what prompts of many rows are multiplied by.

Only where kernels can run is Triton installed: who imports this has asked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024
_BLOCK = 64
"""Columns whose 4-bit codes lie in as many halves of 32 bytes."""

KINDS = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
"""Types of groups' numbers that can be read."""

Numbers = tuple[torch.Tensor, int, torch.Tensor | None, int]
"""Those of groups of columns, with the group's columns; and factors of them, with the columns that share one."""


@triton.jit
def _numbers(values, factors, row, columns, width, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """Return the numbers of the groups that columns of a row are in, float32."""
    numbers = tl.load(values + row * tl.cdiv(width, GROUP) + columns // GROUP, mask=columns < width, other=0)
    numbers = numbers.to(tl.float32)
    if SPAN > 0:
        at = factors + row * tl.cdiv(width, SPAN) + columns // SPAN
        numbers *= tl.load(at, mask=columns < width, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def _unpack(
    codes, table, scales, scale_factors, offsets, offset_factors, out, width, origin,
    BITS4: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, OFFSET_GROUP: tl.constexpr,
    OFFSET_SPAN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the elements of some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    if BITS4:
        at = row * (width // 2) + columns // BLOCK * (BLOCK // 2) + columns % (BLOCK // 2)
        both = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        whole = both >> (columns % BLOCK // (BLOCK // 2) * 4) & 15
        elements = tl.load(table + whole) if table is not None else (whole - origin).to(tl.float32)
    else:
        whole = tl.load(codes + row * width + columns, mask=inside, other=0).to(tl.int32)
        if FLOAT8:
            # By its bits, as not all GPUs know the type: those of float16, whose exponent counts from elsewhere.
            bits = (((whole & 0x80) << 8) | ((whole & 0x7F) << 7)).to(tl.int16)
            elements = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            elements = (((whole << 24) >> 24) - origin).to(tl.float32)
    elements *= _numbers(scales, scale_factors, row, columns, width, GROUP, SPAN)
    if offsets is not None:
        elements += _numbers(offsets, offset_factors, row, columns, width, OFFSET_GROUP, OFFSET_SPAN)
    tl.store(out + row * width + columns, elements.to(out.dtype.element_ty), mask=inside)


def unpack(
    codes: torch.Tensor,
    columns: int,
    origin: int,
    table: torch.Tensor | None,
    scales: Numbers,
    offsets: Numbers | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the elements of a packed matrix, [rows, columns], computed in float32 and then rounded to `dtype`.

    codes: as of `weights.packed.Codes`. origin: of codes. table: float32 [16], what they stand for, None where they
    stand for themselves.
    """
    out = torch.empty((len(codes), columns), dtype=dtype, device=codes.device)
    values, group, factors, span = scales
    offset_values, offset_group, offset_factors, offset_span = offsets or (None, 1, None, 0)
    _unpack[(len(codes), triton.cdiv(columns, _COLUMNS))](
        codes.view(torch.uint8), table, values, factors, offset_values, offset_factors, out, columns, origin,
        BITS4=codes.shape[1] < columns, FLOAT8=codes.dtype is torch.float8_e4m3fn, GROUP=group, SPAN=span,
        OFFSET_GROUP=offset_group, OFFSET_SPAN=offset_span, COLUMNS=_COLUMNS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
