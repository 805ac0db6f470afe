"""Rows of activations times a matrix of codes, on CPUs that multiply no 16-bit floats themselves.

Activations are rounded to whole numbers of 16 bits, as `codes_kernel` says, by which codes are multiplied as they are:
twice as many at a time as float32, and without widening them to these. A row has the same bits whatever rows are beside
it.
"""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.codes_kernel import LARGEST_RUN, codes_module, rounded_row, step_of
from shard_worker.cpu_kernels.kernel_writer import BLOCK
from shard_worker.cpu_kernels.native import Call, NativeFunction, is_available, threads_for

_ARGUMENTS = struct.Struct("=14q")
"""The kernel's, as `codes_module` says."""


class CodesProduct:
    """The product with one matrix."""

    __slots__ = ("_codes", "_kernel", "_numbers", "_shift", "columns", "rounded_row", "rows")

    def __init__(self, codes: torch.Tensor, numbers: torch.Tensor, columns: int) -> None:
        """codes: of 8 bits uint8 [rows, columns], or two of 4 bits in a byte, [rows, columns / 2], as `codes_module`
        says. numbers: their scales and offsets, bfloat16 [rows, groups, 2] without gaps.

        Both are kept, and what `takes` has said yes to. For the first matrix of a kind the kernel is compiled, which
        takes some tenths of a second.
        """
        self._codes, self._numbers, self.columns = codes, numbers, columns
        self.rows, groups, _ = numbers.shape
        self.rounded_row = rounded_row(columns, groups)
        """Bytes that a row of activations takes while it is multiplied."""
        self._shift = (columns // groups).bit_length() - 1
        bits = 8 if codes.shape[1] == columns else 4
        self._kernel = _kernel(bits, min(columns // groups, LARGEST_RUN))

    @staticmethod
    def takes(rows: int, columns: int, bits: int, group: int) -> bool:
        """Return whether the kernel takes a matrix of codes of so many bits, 4 or 8, in groups of so many columns."""
        return rows >= BLOCK and is_available() and columns % step_of(bits, min(group, LARGEST_RUN)) == 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, columns], bfloat16, times the transposed matrix, plus bias [rows]: [n, rows]."""
        x, count = x.contiguous(), x.shape[0]
        rounded = torch.empty(count, self.rounded_row, dtype=torch.uint8)
        product = torch.empty(count, self.rows, dtype=torch.bfloat16)
        added = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self.call(x, added, rounded, product).run()
        return product

    def call(self, x: torch.Tensor, bias: torch.Tensor | None, rounded: torch.Tensor, product: torch.Tensor) -> Call:
        """Return the call that does what `multiply` does.

        x, bias: bfloat16 without gaps. rounded: memory for rounded activations, n times `rounded_row` bytes at least.
        product: where it goes, bfloat16 [n, rows], whose rows may lie apart.
        """
        groups, shift = self._numbers.shape[1], self._shift
        addresses = (tensor.data_ptr() for tensor in (self._codes, self._numbers, x, rounded, product))
        of_bias = 0 if bias is None else bias.data_ptr()
        sizes = (
            self.rows,
            self.columns,
            self._codes.shape[1],
            groups,
            shift,
            self.rounded_row,
            x.shape[0],
            product.stride(0),
        )
        return Call(self._kernel, _ARGUMENTS.pack(*addresses, of_bias, *sizes), threads_for(self.rows * self.columns))


@functools.cache
def _kernel(bits: int, run: int) -> NativeFunction:
    name = "multiply_codes"
    return NativeFunction(codes_module(bits, run, name), name)
