"""Causal attention of a session's last rows over cached keys and values of 16-bit floats, on CPUs.

Keys and values are read once for up to four queries of a head, and widened in registers.
"""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.attention_kernel import ROWS, attention_module
from shard_worker.cpu_kernels.kernel_writer import BLOCK, ELEMENTS
from shard_worker.cpu_kernels.native import Call, NativeFunction, is_available, lanes

_ARGUMENTS = struct.Struct("=14q")
"""The kernel's, as `attention_module` says."""

_ALL = (1 << 63) - 1
"""The window of rows that see all positions."""


def takes(keys: torch.Tensor, rows: int = 1) -> bool:
    """Return whether `attend` takes these keys, and values like them, for so many rows."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in (torch.bfloat16, torch.float16)
        and keys.stride(2) == 1
        and keys.shape[1] - rows + 1 >= BLOCK
        and is_available()
        and keys.shape[2] % lanes() == 0
    )


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Return softmax(q kᵀ / sqrt(head_dim)) v, [n, heads, head_dim].

    queries: [n, heads, head_dim], of the last n positions, each of which sees all up to its own. keys, values:
    [kv_heads, span, head_dim], of the queries' dtype, of which `takes` says yes. window: how many positions a row sees,
    BLOCK at least; None for all. A row comes out bit for bit as it would alone.
    The first call for heads of a size takes some tenths of a second more, in which the kernel is compiled.
    """
    queries = queries.contiguous()
    results, scores = torch.empty_like(queries), torch.empty(scores_size(keys.shape[1]))
    attending_call(queries, keys, values, results, scores, window).run()
    return results


def scores_size(span: int) -> int:
    """Return how many float32 `attending_call` writes scores to, for rows that see up to so many positions."""
    return torch.get_num_threads() * ROWS * (-(-span // lanes()) * lanes())


def attending_call(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    results: torch.Tensor,
    scores: torch.Tensor,
    window: int | None = None,
) -> Call:
    """Return the call that does what `attend` does. results: where they go, like queries, both without gaps. scores:
    memory for those, float32, at least `scores_size`."""
    (rows, heads, head_dim), (kv_heads, span, _) = queries.shape, keys.shape
    line = scores.numel() // (torch.get_num_threads() * ROWS) // lanes() * lanes()
    addresses = (tensor.data_ptr() for tensor in (keys, values, queries, results, scores))
    steps = (step for tensor in (keys, values) for step in tensor.stride()[:2])
    arguments = _ARGUMENTS.pack(*addresses, kv_heads, rows, span - rows + 1, window or _ALL, *steps, line)
    function = _kernel(keys.dtype, head_dim, heads // kv_heads)
    return Call(function, arguments, min(rows * kv_heads, torch.get_num_threads()))


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, group: int) -> NativeFunction:
    name = "attend"
    return NativeFunction(attention_module(ELEMENTS[dtype], lanes(), head_dim, group, name), name)
