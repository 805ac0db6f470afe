"""Norms, RoPE and the cache write of an attention's heads in one pass over 16-bit floats, where torch's operators take
longer than what they compute."""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.heads_kernel import heads_module
from shard_worker.cpu_kernels.kernel_writer import ELEMENTS, Elements
from shard_worker.cpu_kernels.native import Call, NativeFunction, is_available, lanes, threads_for
from shard_worker.cpu_kernels.norm import epsilon_at

_ARGUMENTS = struct.Struct("=17q")
"""The kernel's, as `heads_module` says."""


def takes(
    projected: torch.Tensor,
    norm: torch.Tensor | None,
    table: tuple[torch.Tensor, torch.Tensor],
    stored: torch.dtype,
) -> bool:
    """Return whether `finishing_call` takes these rows, [n, heads, head_dim], with a norm's weights, [heads, head_dim]
    of queries and keys, and a table as of `ops.rope.rope_table`. stored: the dtype of the places for keys and values.
    """
    size, turning = projected.shape[2], table[0].shape[-1]
    return (
        projected.device.type == "cpu"
        and projected.dtype in (torch.bfloat16, torch.float16)
        and stored is projected.dtype
        and projected.stride()[1:] == (size, 1)
        and (norm is None or (norm.dtype is torch.float32 and norm.is_contiguous()))
        and all(one.dtype is projected.dtype and one.is_contiguous() for one in table)
        and is_available()
        and turning % (2 * lanes()) == 0
        and turning <= size
        and (size - turning) % lanes() == 0
    )


def finishing_call(
    projected: torch.Tensor,
    first_value: int,
    norm: torch.Tensor | None,
    eps: float,
    table: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Call:
    """Return the call that stores the queries of projected rows [n, all heads, head_dim] and their keys, both normed
    and turned, and their values.

    Of a row's heads queries are the first, keys the next, and values those from `first_value` on. norm: None where
    nothing is normed. table: as of `ops.rope.rope_table`. queries: where they go, [n, heads, head_dim] without gaps.
    keys, values: where they go, [kv_heads, n, head_dim] both, with the same strides. All have the rows' dtype. `takes`
    has said yes. For the first rows of a dtype the kernel is compiled, which takes some hundredths of a second.
    """
    (count, _, size), heads, kv_heads = projected.shape, queries.shape[1], keys.shape[0]
    tensors = (*table, queries, keys, values, epsilon_at(eps))
    arguments = _ARGUMENTS.pack(
        projected.data_ptr(), 0 if norm is None else norm.data_ptr(), *(tensor.data_ptr() for tensor in tensors), count,
        projected.stride(0), heads, kv_heads, first_value, size, table[0].shape[-1], *keys.stride()[:2],
    )  # fmt: skip
    return Call(_kernel(ELEMENTS[projected.dtype], norm is not None), arguments, threads_for(projected.numel()))


@functools.cache
def _kernel(elements: Elements, normed: bool) -> NativeFunction:
    name = "finish_heads"
    return NativeFunction(heads_module(elements, lanes(), name, normed=normed), name)
