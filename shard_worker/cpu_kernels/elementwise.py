"""Elementwise functions of 16-bit floats in one pass, where torch's operators take longer than what they compute.
Float32 stays with torch, which rounds as the models' own code does."""

from __future__ import annotations

import functools
import struct

import torch

from shard_worker.cpu_kernels.elementwise_kernel import sum_module, swiglu_module
from shard_worker.cpu_kernels.kernel_writer import ELEMENTS, Elements
from shard_worker.cpu_kernels.native import Call, NativeFunction, is_available, lanes, threads_for

_SWIGLU_ARGUMENTS = struct.Struct("=4q")
"""The kernel's, as `swiglu_module` says."""

_SUM_ARGUMENTS = struct.Struct("=4q")
"""The kernel's, as `sum_module` says."""


def takes(gate_up: torch.Tensor) -> bool:
    """Return whether `swiglu` takes these rows, [n, 2 * width]."""
    return (
        gate_up.device.type == "cpu"
        and gate_up.dtype in (torch.bfloat16, torch.float16)
        and gate_up.dim() == 2
        and gate_up.is_contiguous()
        and is_available()
        and gate_up.shape[1] % (2 * lanes()) == 0
    )


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Do what `ops.activation.swiglu` does, for rows that `takes` says yes to.

    An element comes out the same whatever is beside it. For the first rows of a dtype the kernel is compiled, which
    takes some hundredths of a second.
    """
    rows, both = gate_up.shape
    results = torch.empty(rows, both // 2, dtype=gate_up.dtype)
    swiglu_call(gate_up, results).run()
    return results


def swiglu_call(gate_up: torch.Tensor, results: torch.Tensor) -> Call:
    """Return the call that does what `swiglu` does. results: where they go, [n, width] without gaps."""
    arguments = _SWIGLU_ARGUMENTS.pack(gate_up.data_ptr(), results.data_ptr(), *results.shape)
    return Call(_swiglu(ELEMENTS[gate_up.dtype]), arguments, threads_for(gate_up.numel()))


def sum_call(one: torch.Tensor, other: torch.Tensor, results: torch.Tensor) -> Call:
    """Return the call that adds two tensors, which have whole vectors of 16-bit floats and no gaps, as results have."""
    arguments = _SUM_ARGUMENTS.pack(one.data_ptr(), other.data_ptr(), results.data_ptr(), one.numel())
    return Call(_sum(ELEMENTS[one.dtype]), arguments, threads_for(one.numel()))


@functools.cache
def _swiglu(elements: Elements) -> NativeFunction:
    name = "swiglu"
    return NativeFunction(swiglu_module(elements, lanes(), name), name)


@functools.cache
def _sum(elements: Elements) -> NativeFunction:
    name = "sum_of_two"
    return NativeFunction(sum_module(elements, lanes(), name), name)
