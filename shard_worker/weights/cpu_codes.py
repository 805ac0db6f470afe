"""Packed matrices on CPUs whose codes a kernel multiplies as whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from services.model.target_tensors import CPU_ROWS_MULTIPLE
from shard_worker.cpu_kernels import native
from shard_worker.cpu_kernels.codes_kernel import middle_of
from shard_worker.cpu_kernels.codes_products import CodesProduct, Share, multiply_each
from shard_worker.cpu_kernels.unpacking import unpack
from shard_worker.weights.weight import Weight, multiplied_dtype, rows_at_a_time
from shard_worker.weights.whole_codes import WholeCodes, group_of

_LEAST_GROUP = 16
"""The fewest columns that have one scale and offset, where `group_of` knows no more."""

UNPACKED_FROM = 128
"""From so many rows of activations on, unpacking some of the matrix at a time and multiplying by that is faster."""


class CpuCodesWeight(Weight):
    """A matrix on the CPU for bfloat16 activations, in codes of 4 or 8 bits."""

    __slots__ = ("_codes", "_numbers", "columns", "device", "dtype", "product", "rows")

    def __init__(self, packed: WholeCodes) -> None:
        """packed: a matrix that `takes` says yes to; it is copied. Scales and offsets are rounded to bfloat16, which
        float16 activations would lose by."""
        self.rows, self.columns = packed.rows, packed.columns
        self.dtype, self.device = packed.dtype, packed.device
        group, bits = _group(packed), packed.unsigned_bits
        assert bits is not None
        self._codes = torch.empty(self.rows, self.columns * bits // 8, dtype=torch.uint8)
        self._numbers = torch.empty(self.rows, self.columns // group, 2, dtype=torch.bfloat16)
        for some in self._parts():
            part = packed.part(some)
            self._codes[some] = part.unsigned()
            scales, offsets = part.unsigned_numbers(group)
            self._numbers[some] = torch.stack([scales, offsets.add_(scales, alpha=middle_of(bits))], 2)
        self.product = CodesProduct(self._codes, self._numbers, self.columns)
        """What multiplies rows by it."""

    @staticmethod
    def takes(packed: WholeCodes) -> bool:
        """Return whether a packed matrix can be held so, and this CPU has nothing faster: what multiplies 16-bit floats
        and no pairs of whole numbers may have."""
        return (
            packed.device.type == "cpu"
            and packed.dtype is torch.bfloat16
            and packed.unsigned_bits is not None
            and packed.rows % CPU_ROWS_MULTIPLE == 0
            and _group(packed) > 0
            and CodesProduct.takes(packed.rows, packed.columns, packed.unsigned_bits, _group(packed))
            and (native.multiplies_pairs() or multiplied_dtype(packed.dtype, packed.device) is not packed.dtype)
        )

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._numbers.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a matrix of codes has no dense form")

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        """As `Weight.matmul`. A row's result does not depend on how many rows there are, except for so many that the
        matrix is unpacked, which it is not where batch-invariant rows are asked for."""
        if batch_invariant_rows is not None or len(x) < UNPACKED_FROM:
            return self.product.multiply(x, bias)
        wide = multiplied_dtype(self.dtype, self.device)
        activations, added = x.to(wide), None if bias is None else bias.to(wide)
        product = torch.empty(len(x), self.rows, dtype=self.dtype)
        for some in self._parts():
            own_bias = None if added is None else added[some]
            elements = unpack(self._codes[some], self._numbers[some], self.columns, wide)
            product[:, some] = F.linear(activations, elements, own_bias)
        return product

    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        raise TypeError("rows cannot be taken out of a matrix of codes: select them before `prepared`")

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        raise TypeError("matrices of codes cannot be concatenated: concatenate them before `prepared`")

    def _parts(self) -> list[slice]:
        """Return runs of rows that are brought to another form at a time."""
        step = rows_at_a_time(self.columns, self.device)
        return [slice(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]


def matmul_each(
    shares: Sequence[tuple[Weight, torch.Tensor | None, int]], x: torch.Tensor, batch_invariant_rows: int | None
) -> torch.Tensor:
    """Return rows x [n, columns] times matrices of one shape: of each, with its bias, some rows, behind those of the
    one before it; [n, rows]. Rows come out as `Weight.matmul` multiplies them."""
    together: list[Share] = []
    for weight, bias, count in shares:
        few = batch_invariant_rows is not None or count < UNPACKED_FROM
        if isinstance(weight, CpuCodesWeight) and few and (not together or weight.product.is_like(together[0][0])):
            together.append((weight.product, None if bias is None else bias.to(weight.dtype).contiguous(), count))
    if len(together) == len(shares):
        return multiply_each(together, x)
    parts = x.split_with_sizes([count for _, _, count in shares])
    pairs = zip(shares, parts, strict=True)
    made = [weight.matmul(part, bias, batch_invariant_rows) for (weight, bias, _), part in pairs]
    return made[0] if len(made) == 1 else torch.cat(made)


def _group(packed: WholeCodes) -> int:
    """Return the largest group that the kernel takes whose elements have one scale and offset; 0 if none is."""
    return group_of(packed) or (_LEAST_GROUP if packed.group % _LEAST_GROUP == 0 else 0)
