"""Root-mean-square normalisation of 16-bit floats in one pass, where torch's operators take longer than what they
compute. Float32 stays with torch, which rounds as the models' own code does."""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.kernel_writer import ELEMENTS, Elements
from shard_worker.cpu_kernels.native import Call, NativeFunction, is_available, lanes, threads_for
from shard_worker.cpu_kernels.norm_kernel import norm_module

_ARGUMENTS = struct.Struct("=9q")
"""The kernel's, as `norm_module` says."""


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `rms_norm` takes these rows, 16-bit floats [n, d] or [n, heads, d], of which steps may lie apart,
    and weights [d] or [heads, d]."""
    return (
        x.device.type == "cpu"
        and x.dim() in (2, 3)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and (x.dim() == 2 or x.stride(1) == x.shape[2])
        and weight.shape in (x.shape[-1:], x.shape[1:])
        and weight.dtype is torch.float32
        and weight.is_contiguous()
        and is_available()
        and x.shape[-1] % lanes() == 0
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Do what `ops.norm.rms_norm` does, for rows that `takes` says yes to. For the first rows of a dtype the kernel is
    compiled, which takes some hundredths of a second."""
    results = torch.empty(x.shape, dtype=x.dtype)
    norm_call(x, weight, eps, results).run()
    return results


def norm_call(x: torch.Tensor, weight: torch.Tensor, eps: float, results: torch.Tensor) -> Call:
    """Return the call that does what `rms_norm` does. results: where they go, like x without gaps."""
    size, count, epsilon = x.shape[-1], x.shape[1] if x.dim() == 3 else 1, epsilon_at(eps)
    addresses = (tensor.data_ptr() for tensor in (x, weight, results, epsilon))
    arguments = _ARGUMENTS.pack(*addresses, x.shape[0], x.stride(0), count, size, weight.numel() // size)
    return Call(_kernel(ELEMENTS[x.dtype]), arguments, threads_for(x.numel()))


@functools.cache
def epsilon_at(eps: float) -> torch.Tensor:
    """Return a norm's epsilon in memory, float32, for kernels."""
    return torch.tensor(eps)


@functools.cache
def _kernel(elements: Elements) -> NativeFunction:
    name = "norm"
    return NativeFunction(norm_module(elements, lanes(), name), name)
