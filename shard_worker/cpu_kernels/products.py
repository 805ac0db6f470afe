"""Rows of activations times a matrix of narrow elements, on CPUs that multiply no such elements themselves.

The matrix is read once for all rows, and its elements are widened in registers. A row is summed up in one order
whatever rows are beside it, so that its results have the same bits.
"""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.native import NativeFunction, is_available, lanes
from shard_worker.cpu_kernels.product_kernel import BLOCK, RUN, Elements, product_module

_LEAST_SHARE = 1 << 15
"""How many elements of the matrix are worth a thread."""

_ARGUMENTS = struct.Struct("=10q")
"""The kernel's, as `product_module` says."""

DENSE = {torch.bfloat16: Elements.BFLOAT16, torch.float16: Elements.FLOAT16}
"""What dense matrices may be made of."""


class Product:
    """The product with one matrix."""

    __slots__ = ("_arguments", "_held", "_kernel", "_most_threads", "_rows", "dtype")

    def __init__(
        self, elements: Elements, matrix: torch.Tensor, columns: int, dtype: torch.dtype, numbers: torch.Tensor | None
    ) -> None:
        """matrix: the elements [rows, …], of as many columns as they stand for. dtype: of activations and products.
        numbers: of codes the scales and offsets, bfloat16 [rows, groups, 2] without gaps.

        Both are kept, and what `takes_dense` or `takes_codes` has said yes to. For the first matrix of a kind the
        kernel is compiled, which takes some tenths of a second.
        """
        self._held, self.dtype, self._rows = (matrix, numbers), dtype, len(matrix)
        groups = 1 if numbers is None else numbers.shape[1]
        self._kernel = _kernel(elements, min(columns // groups, RUN))
        shift = (columns // groups).bit_length() - 1
        addresses = matrix.data_ptr(), 0 if numbers is None else numbers.data_ptr()
        self._arguments = addresses, (self._rows, columns, matrix.stride(0), groups, shift)
        self._most_threads = max(1, self._rows * columns // _LEAST_SHARE)

    @classmethod
    def of_dense(cls, matrix: torch.Tensor) -> Product:
        """Return that with a dense matrix [rows, columns], in whose dtype activations and products are."""
        return cls(DENSE[matrix.dtype], matrix, matrix.shape[1], matrix.dtype, None)

    @classmethod
    def of_codes(cls, codes: torch.Tensor, numbers: torch.Tensor, columns: int) -> Product:
        """Return that with a matrix of codes: uint8 [rows, columns], or two in a byte, [rows, columns / 2]. numbers: as
        of the class. Activations and products are bfloat16."""
        elements = Elements.CODES_8 if codes.shape[1] == columns else Elements.CODES_4
        return cls(elements, codes, columns, torch.bfloat16, numbers)

    @staticmethod
    def takes_dense(matrix: torch.Tensor) -> bool:
        """Return whether the kernel takes a dense matrix."""
        return (
            matrix.device.type == "cpu"
            and matrix.dtype in DENSE
            and matrix.stride(1) == 1
            and len(matrix) >= BLOCK
            and is_available()
            and matrix.shape[1] % lanes() == 0
        )

    @staticmethod
    def takes_codes(rows: int, columns: int, bits: int) -> bool:
        """Return whether the kernel takes a matrix of codes of so many bits, 4 or 8."""
        elements = Elements.CODES_8 if bits == 8 else Elements.CODES_4
        return rows >= BLOCK and is_available() and columns % elements.step(lanes()) == 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, columns] times the transposed matrix, plus bias [rows]: [n, rows].

        Summed up in float32, and rounded once.
        """
        wide, (addresses, extents) = x.float().contiguous(), self._arguments
        count = wide.shape[0]
        product = torch.empty(count, self._rows)
        arguments = _ARGUMENTS.pack(*addresses, wide.data_ptr(), product.data_ptr(), *extents, count)
        self._kernel.run(arguments, min(self._most_threads, torch.get_num_threads()))
        return (product if bias is None else product.add_(bias)).to(self.dtype)


@functools.cache
def _kernel(elements: Elements, run: int) -> NativeFunction:
    name = "multiply"
    return NativeFunction(product_module(elements, lanes(), run, name), name)
