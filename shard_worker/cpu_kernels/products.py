"""Rows of activations times a dense matrix of 16-bit floats, on CPUs that multiply none themselves.

The matrix is read once for all rows, and its elements are widened in registers. A row is summed up in one order
whatever rows are beside it, so that its results have the same bits.
"""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.kernel_writer import BLOCK, ELEMENTS, Elements
from shard_worker.cpu_kernels.native import NativeFunction, is_available, lanes, threads_for
from shard_worker.cpu_kernels.product_kernel import product_module

_ARGUMENTS = struct.Struct("=8q")
"""The kernel's, as `product_module` says."""


class Product:
    """The product with one matrix."""

    __slots__ = ("_kernel", "_matrix")

    def __init__(self, matrix: torch.Tensor) -> None:
        """matrix: [rows, columns], which `takes` has said yes to, and which is kept. Activations and products are of
        its dtype. For the first matrix of a dtype the kernel is compiled, which takes some tenths of a second."""
        self._matrix, self._kernel = matrix, _kernel(ELEMENTS[matrix.dtype])

    @staticmethod
    def takes(matrix: torch.Tensor) -> bool:
        """Return whether the kernel takes a matrix."""
        return (
            matrix.device.type == "cpu"
            and matrix.dtype in (torch.bfloat16, torch.float16)
            and matrix.stride(1) == 1
            and len(matrix) >= BLOCK
            and is_available()
            and matrix.shape[1] % lanes() == 0
        )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, columns] times the transposed matrix, plus bias [rows]: [n, rows].

        Summed up in float32, and rounded once.
        """
        matrix, wide, count = self._matrix, x.float().contiguous(), x.shape[0]
        product = torch.empty(count, matrix.shape[0], dtype=matrix.dtype)
        added = None if bias is None else bias.to(matrix.dtype).contiguous()
        addresses = matrix.data_ptr(), wide.data_ptr(), product.data_ptr(), 0 if added is None else added.data_ptr()
        arguments = _ARGUMENTS.pack(*addresses, *matrix.shape, matrix.stride(0), count)
        self._kernel.run(arguments, threads_for(matrix.numel()))
        return product


@functools.cache
def _kernel(elements: Elements) -> NativeFunction:
    name = "multiply"
    return NativeFunction(product_module(elements, lanes(), name), name)
