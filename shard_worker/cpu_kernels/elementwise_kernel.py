"""Kernels that compute each element by itself, in LLVM's language."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.kernel_writer import Elements, KernelWriter

if TYPE_CHECKING:
    from llvmlite import ir


def swiglu_module(elements: Elements, lanes: int, name: str) -> ir.Module:
    """Return the module with the kernel of `silu(gate) * up` (arXiv 2002.05202), by which each thread takes some
    columns.

    elements: of the rows and of what they become; `silu(gate)` is rounded to them too, as if it were computed by
    itself. lanes: how many float32 a vector has; they divide the width.

    The kernel's arguments: the addresses of the rows, [n, 2 * width], gates first, and of what they become, [n, width],
    both without gaps; and n and the width.
    """
    return _ElementwiseWriter(lanes).swiglu(elements, name)


def sum_module(elements: Elements, lanes: int, name: str) -> ir.Module:
    """Return the module with the kernel of a sum, by which each thread takes some elements.

    elements: of all tensors. lanes: how many float32 a vector has; they divide the number of elements.

    The kernel's arguments: the addresses of two tensors and of their sum, all without gaps; and how many elements each
    has.
    """
    return _ElementwiseWriter(lanes).sum(elements, name)


class _ElementwiseWriter(KernelWriter):
    """Writes a kernel."""

    def swiglu(self, elements: Elements, name: str) -> ir.Module:
        """Return the module, as `swiglu_module` does."""
        builder, (rows, results), (count, width) = self._kernel(name, 2, 2)
        stored = self._types[elements]
        with self._own_places(builder, width) as place, self._loop(builder, self._index(0), count, 1) as row:
            to = builder.add(builder.mul(row, width), place)
            gate_at = builder.add(to, builder.mul(row, width))
            gate = self._load_floats(builder, self._at(builder, rows, gate_at, stored), elements)
            up_at = builder.add(gate_at, width)
            up = self._load_floats(builder, self._at(builder, rows, up_at, stored), elements)
            silu = self._widened(builder, self._narrowed(builder, self._silu(builder, gate), elements), elements)
            self._store_floats(builder, builder.fmul(silu, up), self._at(builder, results, to, stored), elements)
        builder.ret_void()
        return self._module

    def sum(self, elements: Elements, name: str) -> ir.Module:
        """Return the module, as `sum_module` does."""
        builder, (one, other, results), (count,) = self._kernel(name, 3, 1)
        stored = self._types[elements]
        with self._own_places(builder, count) as place:
            both = (self._load_floats(builder, self._at(builder, of, place, stored), elements) for of in (one, other))
            total = builder.fadd(*both)
            self._store_floats(builder, total, self._at(builder, results, place, stored), elements)
        builder.ret_void()
        return self._module

    @contextlib.contextmanager
    def _own_places(self, builder: ir.IRBuilder, count: Any) -> Iterator[Any]:
        """Write what is done for each vector of the thread's share of `count` elements, by its first element."""
        thread, threads = self._threads(builder)
        vectors = builder.sdiv(count, self._index(self._lanes))
        share = builder.sdiv(builder.add(vectors, builder.sub(threads, self._index(1))), threads)
        first = builder.mul(thread, share)
        end = self._least(builder, builder.add(first, share), vectors)
        with self._loop(builder, first, end, 1) as vector:
            yield builder.mul(vector, self._index(self._lanes))

    def _silu(self, builder: ir.IRBuilder, x: Any) -> Any:
        """Return `x / (1 + exp(-x))`; where x is negative as `x exp(x) / (1 + exp(x))`, so that nothing overflows."""
        zeros, signs = self._all_floats(0.0), self._all(0x7FFFFFFF)
        magnitude = builder.bitcast(builder.and_(builder.bitcast(x, self._words), signs), self._vector)
        power = self._exp(builder, builder.fsub(zeros, magnitude))
        above = builder.select(builder.fcmp_ordered("<", x, zeros), builder.fmul(x, power), x)
        return builder.fdiv(above, builder.fadd(self._all_floats(1.0), power))
