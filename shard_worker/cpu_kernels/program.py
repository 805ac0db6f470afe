"""Calls of kernels that run one behind the other by a single call, with nothing of Python in between: what Python does
between two kernels it does with caches that the first has emptied."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shard_worker.cpu_kernels.kernel_writer import KernelWriter
from shard_worker.cpu_kernels.native import THREADS_BARRIER, Call, NativeFunction

if TYPE_CHECKING:
    from llvmlite import ir

_ENTRY = struct.Struct("=2q")
"""Where a function and its arguments are."""


class Program:
    """Calls in their order. Each is run by all threads, and begins once all are through with the one before it."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """calls: at least one."""
        self._threads = max(call.threads for call in calls)
        self._functions = [call.function for call in calls]
        places, size = [], _ENTRY.size * len(calls)
        for call in calls:
            places.append(size)
            size += len(call.arguments)
        self._places, self._memory = places, ctypes.create_string_buffer(size)
        self._bytes = memoryview(self._memory).cast("B")
        begin = ctypes.addressof(self._memory)
        for number, call in enumerate(calls):
            _ENTRY.pack_into(self._memory, _ENTRY.size * number, call.function.address, begin + places[number])
            self.change(number, call)
        self._arguments = _ENTRY.pack(begin, len(calls))

    def change(self, number: int, call: Call) -> None:
        """Have one of the calls replaced by another one of the same function."""
        assert call.function is self._functions[number]
        place = self._places[number]
        self._bytes[place : place + len(call.arguments)] = call.arguments

    def run(self) -> None:
        """Run all calls, on as many threads as one of them is worth."""
        _runner().run(self._arguments, min(self._threads, torch.get_num_threads()))


def program_module(name: str) -> ir.Module:
    """Return the module with the kernel that calls other kernels, by all threads each.

    Its arguments: the address of pairs of addresses, of a kernel and of its arguments; and how many pairs there are.
    """
    return _ProgramWriter(1).module(name)


class _ProgramWriter(KernelWriter):
    """Writes the kernel."""

    def module(self, name: str) -> ir.Module:
        """Return the module, as `program_module` does."""
        builder, (entries,), (count,) = self._kernel(name, 1, 1)
        kernel = self._ir.PointerType(self._ir.FunctionType(self._ir.VoidType(), [self._pointer]))
        barrier = self._declared(THREADS_BARRIER, self._ir.VoidType(), [])
        with self._loop(builder, self._index(0), builder.mul(count, self._index(2)), 2) as place:
            at = (self._at(builder, entries, builder.add(place, self._index(one)), self._index) for one in (0, 1))
            function, arguments = (builder.load(one, typ=self._index) for one in at)
            builder.call(builder.inttoptr(function, kernel), [builder.inttoptr(arguments, self._pointer)])
            # The next one reads what other threads have written.
            builder.call(barrier, [])
        builder.ret_void()
        return self._module


@functools.cache
def _runner() -> NativeFunction:
    name = "run_program"
    return NativeFunction(program_module(name), name)
