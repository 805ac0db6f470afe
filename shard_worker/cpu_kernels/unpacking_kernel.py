"""The kernel that makes elements of codes, in LLVM's language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.codes_kernel import RUN, middle_of
from shard_worker.cpu_kernels.kernel_writer import Elements, KernelWriter

if TYPE_CHECKING:
    from llvmlite import ir

_LANES = 16
"""How many elements are made at a time: so many neighbours have one scale and offset."""


def unpacking_module(bits: int, elements: Elements, name: str) -> ir.Module:
    """Return the module with the kernel, by which each thread makes the elements of its share of a matrix's rows.

    Codes, scales and offsets are as `codes_module` says. bits: of a code, 4 or 8. elements: of the result.

    The kernel's arguments: the addresses of the codes, of their scales and offsets, and of the result; how many rows
    and columns there are, whole runs of `RUN`; how many groups a row has; and the logarithm to the base 2 of a group's
    columns. None of the three tensors has gaps.
    """
    return _UnpackingWriter(_LANES).module(bits, elements, name)


class _UnpackingWriter(KernelWriter):
    """Writes the kernel."""

    def module(self, bits: int, elements: Elements, name: str) -> ir.Module:
        """Return the module, as `unpacking_module` does."""
        builder, (codes, numbers, results), others = self._kernel(name, 3, 4)
        rows, columns, groups, shift = others
        thread, threads = self._threads(builder)
        byte = self._ir.IntType(8)
        stride = builder.ashr(columns, self._index(1)) if bits == 4 else columns
        with self._loop(builder, thread, rows, threads) as row:
            own = self._at(builder, codes, builder.mul(row, stride), byte)
            of_own = self._at(builder, numbers, builder.mul(row, groups), self._word)
            to = self._at(builder, results, builder.mul(row, columns), self._types[elements])
            with self._loop(builder, self._index(0), columns, 2 * RUN if bits == 4 else RUN) as column:
                place = builder.ashr(column, self._index(1)) if bits == 4 else column
                for begin in range(0, RUN, _LANES):
                    at = self._at(builder, own, builder.add(place, self._index(begin)), byte)
                    read = self._load(builder, at, self._ir.VectorType(byte, _LANES))
                    for half, some in enumerate(self._codes(builder, read, bits)):
                        first = builder.add(column, self._index(half * RUN + begin))
                        made = self._elements(builder, some, of_own, builder.ashr(first, shift), middle_of(bits))
                        self._store_floats(builder, made, self._at(builder, to, first, self._types[elements]), elements)
        builder.ret_void()
        return self._module

    def _codes(self, builder: ir.IRBuilder, read: Any, bits: int) -> list[Any]:
        """Return the codes in a vector of bytes: all of 8 bits, or the low halves of 4 bits and the high ones."""
        if bits == 8:
            return [read]
        return [builder.and_(read, self._number(read.type, 15)), builder.lshr(read, self._number(read.type, 4))]

    def _elements(self, builder: ir.IRBuilder, codes: Any, numbers: Any, group: Any, middle: int) -> Any:
        """Return what codes of one group stand for, float32."""
        both = builder.load(self._at(builder, numbers, group, self._word), typ=self._word)
        both.align = 2
        pair = self._spread(builder, both)
        scale = builder.bitcast(builder.shl(pair, self._all(16)), self._vector)
        offset = builder.bitcast(builder.and_(pair, self._all(0xFFFF0000)), self._vector)
        whole = builder.sub(builder.zext(codes, self._words), self._all(middle))
        return builder.call(self._multiply_add, [builder.sitofp(whole, self._vector), scale, offset])
