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
from shard_worker.cpu_kernels.native import NativeFunction, is_available, threads_for

_ARGUMENTS = struct.Struct("=13q")
"""The kernel's, as `codes_module` says."""


class CodesProduct:
    """The product with one matrix."""

    __slots__ = ("_codes", "_columns", "_kernel", "_numbers")

    def __init__(self, codes: torch.Tensor, numbers: torch.Tensor, columns: int) -> None:
        """codes: of 8 bits uint8 [rows, columns], or two of 4 bits in a byte, [rows, columns / 2], as `codes_module`
        says. numbers: their scales and offsets, bfloat16 [rows, groups, 2] without gaps.

        Both are kept, and what `takes` has said yes to. For the first matrix of a kind the kernel is compiled, which
        takes some tenths of a second.
        """
        self._codes, self._numbers, self._columns = codes, numbers, columns
        bits = 8 if codes.shape[1] == columns else 4
        self._kernel = _kernel(bits, min(columns // numbers.shape[1], LARGEST_RUN))

    @staticmethod
    def takes(rows: int, columns: int, bits: int, group: int) -> bool:
        """Return whether the kernel takes a matrix of codes of so many bits, 4 or 8, in groups of so many columns."""
        return rows >= BLOCK and is_available() and columns % step_of(bits, min(group, LARGEST_RUN)) == 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, columns], bfloat16, times the transposed matrix, plus bias [rows]: [n, rows]."""
        (rows, groups, _), columns, count = self._numbers.shape, self._columns, x.shape[0]
        x, shift = x.contiguous(), (columns // groups).bit_length() - 1
        length = rounded_row(columns, groups)
        rounded = torch.empty(count, length, dtype=torch.uint8)
        product = torch.empty(count, rows, dtype=torch.bfloat16)
        addresses = (tensor.data_ptr() for tensor in (self._codes, self._numbers, x, rounded, product))
        added = None if bias is None else bias.to(torch.bfloat16).contiguous()
        of_bias = 0 if added is None else added.data_ptr()
        arguments = _ARGUMENTS.pack(
            *addresses, of_bias, rows, columns, self._codes.shape[1], groups, shift, length, count
        )
        self._kernel.run(arguments, threads_for(rows * columns))
        return product


@functools.cache
def _kernel(bits: int, run: int) -> NativeFunction:
    name = "multiply_codes"
    return NativeFunction(codes_module(bits, run, name), name)
