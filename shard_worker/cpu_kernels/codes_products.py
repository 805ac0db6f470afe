"""Rows of activations times a matrix of codes, on CPUs.

Activations are rounded to whole numbers of 16 bits, as `codes_kernel` says, by which codes are multiplied as they are:
twice as many at a time as float32, and without widening them to these. A row has the same bits whatever rows are beside
it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from shard_worker.cpu_kernels.codes_kernel import LARGEST_RUN, codes_module, rounded_row, scratch_size, step_of
from shard_worker.cpu_kernels.kernel_writer import BLOCK
from shard_worker.cpu_kernels.native import Call, NativeFunction, is_available, threads_for

_ARGUMENTS = struct.Struct("=12q")
"""The kernel's, as `codes_module` says."""

_MATRIX = struct.Struct("=5q")
"""Those of each matrix, behind the others."""


class CodesProduct:
    """The product with one matrix."""

    __slots__ = ("_addresses", "_codes", "_numbers", "columns", "kernel", "rounded_row", "rows", "sizes")

    def __init__(self, codes: torch.Tensor, numbers: torch.Tensor, columns: int) -> None:
        """codes: of 8 bits uint8 [rows, columns], or two of 4 bits in a byte, [rows, columns / 2], as `codes_module`
        says. numbers: their scales and offsets, bfloat16 [rows, groups, 2] without gaps.

        Both are kept, and what `takes` has said yes to. For the first matrix of a kind the kernel is compiled, which
        takes some tenths of a second.
        """
        self._codes, self._numbers, self.columns = codes, numbers, columns
        self.rows, groups, _ = numbers.shape
        self.rounded_row = rounded_row(columns, groups)
        """Bytes that a row of activations takes while it is multiplied, as `scratch_size` asks."""
        shift = (columns // groups).bit_length() - 1
        self._addresses = codes.data_ptr(), numbers.data_ptr()
        self.sizes = self.rows, columns, codes.shape[1], groups, shift, self.rounded_row
        bits = 8 if codes.shape[1] == columns else 4
        self.kernel = _kernel(bits, min(columns // groups, LARGEST_RUN))

    @staticmethod
    def takes(rows: int, columns: int, bits: int, group: int) -> bool:
        """Return whether the kernel takes a matrix of codes of so many bits, 4 or 8, in groups of so many columns."""
        return rows >= BLOCK and is_available() and columns % step_of(bits, min(group, LARGEST_RUN)) == 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, columns], bfloat16, times the transposed matrix, plus bias [rows]: [n, rows]."""
        x, count = x.contiguous(), x.shape[0]
        scratch = torch.zeros(scratch_size(self.rounded_row, count), dtype=torch.uint8)
        product = torch.empty(count, self.rows, dtype=torch.bfloat16)
        added = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self.call(x, added, scratch, product).run()
        return product

    def call(self, x: torch.Tensor, bias: torch.Tensor | None, scratch: torch.Tensor, product: torch.Tensor) -> Call:
        """Return the call that does what `multiply` does.

        x, bias: bfloat16 without gaps. scratch: memory as `scratch_size` says, uint8. product: where it goes, bfloat16
        [n, rows], whose rows may lie apart.
        """
        return call_of_each([(self, bias, x.shape[0])], x, scratch, product)

    def is_like(self, other: CodesProduct) -> bool:
        """Return whether one call can multiply by both matrices."""
        return self.kernel is other.kernel and self.sizes == other.sizes

    def arguments(self, bias: torch.Tensor | None, first: int, count: int) -> bytes:
        """Return what the kernel is told of this matrix: by which rows of activations, from `first` on, it is
        multiplied."""
        return _MATRIX.pack(*self._addresses, 0 if bias is None else bias.data_ptr(), first, count)


Share = tuple[CodesProduct, torch.Tensor | None, int]
"""A matrix, its bias, bfloat16 without gaps, and how many rows of activations are multiplied by it."""


def multiply_each(shares: Sequence[Share], x: torch.Tensor) -> torch.Tensor:
    """Return rows x [n, columns], bfloat16, times matrices that are alike: of each some rows, behind those of the one
    before it, as `CodesProduct.multiply` multiplies them; [n, rows]."""
    x, (first, _, _) = x.contiguous(), shares[0]
    scratch = torch.zeros(scratch_size(first.rounded_row, x.shape[0]), dtype=torch.uint8)
    product = torch.empty(x.shape[0], first.rows, dtype=torch.bfloat16)
    call_of_each(shares, x, scratch, product).run()
    return product


def call_of_each(shares: Sequence[Share], x: torch.Tensor, scratch: torch.Tensor, product: torch.Tensor) -> Call:
    """Return the call that does what `multiply_each` does. scratch, product: as of `CodesProduct.call`."""
    one, parts, begin = shares[0][0], [], 0
    for matrix, bias, count in shares:
        parts.append(matrix.arguments(bias, begin, count))
        begin += count
    addresses = x.data_ptr(), scratch.data_ptr(), product.data_ptr()
    numbers = *one.sizes, x.shape[0], product.stride(0), len(shares)
    return Call(
        one.kernel, b"".join((_ARGUMENTS.pack(*addresses, *numbers), *parts)), threads_for(one.rows * one.columns)
    )


@functools.cache
def _kernel(bits: int, run: int) -> NativeFunction:
    name = "multiply_codes"
    return NativeFunction(codes_module(bits, run, name), name)
