"""Attention of one position over cached keys and values of 16-bit floats, on CPUs that multiply none themselves.

Keys and values are read once for up to four queries of a head, and widened in registers.
"""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.attention_kernel import ROWS, attention_module
from shard_worker.cpu_kernels.kernel_writer import BLOCK, ELEMENTS
from shard_worker.cpu_kernels.native import NativeFunction, is_available, lanes, multiplies

_ARGUMENTS = struct.Struct("=12q")
"""The kernel's, as `attention_module` says."""


def takes(keys: torch.Tensor) -> bool:
    """Return whether `attend` takes these keys, and values like them, and is faster than torch."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in (torch.bfloat16, torch.float16)
        and not multiplies(keys.dtype)
        and keys.stride(2) == 1
        and keys.shape[1] >= BLOCK
        and is_available()
        and keys.shape[2] % lanes() == 0
    )


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return softmax(q kᵀ / sqrt(head_dim)) v, [heads, head_dim].

    queries: [heads, head_dim], which see all keys. keys, values: [kv_heads, span, head_dim], of the queries' dtype, of
    which `takes` says yes.
    The first call for heads of a size takes some tenths of a second more, in which the kernel is compiled.
    """
    (heads, head_dim), (kv_heads, span, _) = queries.shape, keys.shape
    queries, line = queries.contiguous(), -(-span // lanes()) * lanes()
    threads = min(kv_heads, torch.get_num_threads())
    results, scores = torch.empty_like(queries), torch.empty(threads, ROWS, line)
    addresses = (tensor.data_ptr() for tensor in (keys, values, queries, results, scores))
    steps = (step for tensor in (keys, values) for step in tensor.stride()[:2])
    arguments = _ARGUMENTS.pack(*addresses, kv_heads, span, *steps, line)
    _kernel(keys.dtype, head_dim, heads // kv_heads).run(arguments, threads)
    return results


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, group: int) -> NativeFunction:
    name = "attend"
    return NativeFunction(attention_module(ELEMENTS[dtype], lanes(), head_dim, group, name), name)
