"""The elements that codes stand for, in one pass, where torch takes four."""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.kernel_writer import ELEMENTS, Elements
from shard_worker.cpu_kernels.native import NativeFunction, threads_for
from shard_worker.cpu_kernels.unpacking_kernel import unpacking_module

_ARGUMENTS = struct.Struct("=7q")
"""The kernel's, as `unpacking_module` says."""


def unpack(codes: torch.Tensor, numbers: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of some rows, [n, columns]. codes, numbers: as of a `CodesProduct`, which takes them. dtype:
    float32, bfloat16 or float16."""
    rows, groups, _ = numbers.shape
    results = torch.empty(rows, columns, dtype=dtype)
    addresses = (tensor.data_ptr() for tensor in (codes, numbers, results))
    arguments = _ARGUMENTS.pack(*addresses, rows, columns, groups, (columns // groups).bit_length() - 1)
    bits = 8 if codes.shape[1] == columns else 4
    _kernel(bits, ELEMENTS[dtype]).run(arguments, threads_for(results.numel()))
    return results


@functools.cache
def _kernel(bits: int, elements: Elements) -> NativeFunction:
    name = "unpack"
    return NativeFunction(unpacking_module(bits, elements, name), name)
