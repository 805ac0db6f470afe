"""Choosing scales and codes for a matrix of 16 or 32 bits, group by group, with the least squared error.

Of a few scales for each group, which clip its largest elements more or less, the one is taken whose rounded elements
are nearest to the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from services.model.quantization import QuantizedTo
from shard_worker.weights.packed import Codes, GroupNumbers, PackedWeight, Packing, pack_4_bits

SCALE_DTYPE = torch.bfloat16
"""That of scales, which codes are chosen for: torch's int4 product on CPUs takes no other."""

_ORIGIN = 8
"""The code of zero in 4 bits."""


@dataclass(frozen=True, slots=True)
class _Range:
    """What codes may be, before an origin is added.

    low, high: the least and the greatest. ratios: scales that are tried, as parts of the one that clips nothing, which
    is taken where there are none: numbers of floating point are no nearer with others. signed: whether scales have a
    sign, so that a group's largest element is always a multiple of `low`, which lies further from zero than `high`.
    """

    low: int
    high: int
    ratios: tuple[float, ...]
    signed: bool = False


_RANGES = {
    QuantizedTo.INT4: _Range(-8, 7, (0.7, 0.76, 0.82, 0.88, 0.94, 1.0), signed=True),
    QuantizedTo.INT8: _Range(-127, 127, (0.97, 0.985, 1.0, 1.01)),
    QuantizedTo.FP8: _Range(-448, 448, ()),
}


def quantize(
    parts: Iterable[torch.Tensor], to: QuantizedTo, shape: tuple[int, int], group: int, dtype: torch.dtype
) -> PackedWeight:
    """Return a packed matrix.

    parts: its rows in order, some at a time, [n, columns] of floating point, on the device where it is to be. shape:
    its rows and columns. group: how many columns have one scale. dtype: of the activations that it takes and gives.
    """
    rows, columns = shape
    codes = scales = None
    first = 0
    for part in parts:
        some_codes, some_scales = _quantized(part, to, group)
        if codes is None or scales is None:
            codes = some_codes.new_empty(rows, some_codes.shape[1])
            scales = some_scales.new_empty(rows, columns // group)
        some = slice(first, first + len(part))
        codes[some], scales[some] = some_codes, some_scales
        first += len(part)
    assert codes is not None
    assert scales is not None
    assert first == rows
    packing = {
        QuantizedTo.INT4: Packing(Codes.BITS4, origin=_ORIGIN),
        QuantizedTo.INT8: Packing(Codes.INT8),
        QuantizedTo.FP8: Packing(Codes.FLOAT8),
    }[to]
    return PackedWeight(packing, codes, GroupNumbers(scales, group), dtype=dtype)


def _quantized(rows: torch.Tensor, to: QuantizedTo, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes as they are stored, and scales [n, columns / group], of some rows [n, columns]."""
    exact = rows.float().view(-1, group)
    limits = _RANGES[to]
    # Apart: torch's `aminmax` of rows is many times slower on CPUs.
    least, greatest = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
    if limits.signed:
        whole = torch.where(-least > greatest, least, greatest) / limits.low
    else:
        whole = torch.maximum(-least, greatest) / limits.high
    scales = whole.to(SCALE_DTYPE).float()
    least_error = torch.full_like(whole, torch.inf)
    for ratio in limits.ratios:
        tried = (whole * ratio).to(SCALE_DTYPE).float()
        error = torch.addcmul(exact, _codes(exact, tried, to), tried, value=-1)
        error = torch.linalg.vector_norm(error, dim=1, keepdim=True)
        better = error < least_error
        least_error, scales = torch.where(better, error, least_error), torch.where(better, tried, scales)
    codes = _codes(exact, scales, to).view(len(rows), -1)
    if to is QuantizedTo.INT4:
        stored = pack_4_bits(codes.add_(_ORIGIN))
    else:
        stored = codes.to(torch.int8 if to is QuantizedTo.INT8 else torch.float8_e4m3fn)
    return stored, scales.view(len(rows), -1).to(SCALE_DTYPE)


def _codes(exact: torch.Tensor, scales: torch.Tensor, to: QuantizedTo) -> torch.Tensor:
    """Return codes without their origin, float32 [groups, columns of a group]; those of floating point are not rounded.

    scales: [groups, 1]; zero for groups of nothing but zeros.
    """
    limits = _RANGES[to]
    codes = (exact / torch.where(scales == 0, 1, scales)).clamp_(limits.low, limits.high)
    return codes if to is QuantizedTo.FP8 else codes.round_()
