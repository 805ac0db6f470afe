"""Rows of float32 times a matrix of 16-bit floats, on CPUs that multiply no 16-bit floats themselves.

The matrix is read once for all rows and widened in registers. Torch reads it once a row, or widens it in memory first.
A row is summed up in one order whatever rows are beside it, so that its results have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shard_worker.cpu_kernels.native import THREAD_COUNT, THREAD_NUMBER, NativeFunction, has_wide_vectors, is_available

if TYPE_CHECKING:
    from llvmlite import ir

_BLOCK = 8
"""How many of the matrix's rows are multiplied by all rows of activations before the next ones are read. A thread's
share is made of such blocks."""

_TILES = {4: 2, 2: 4, 1: 8}
"""How many of the matrix's rows are multiplied by so many rows of activations at a time, in registers: so many sums are
independent of each other that a product need not wait for the one before."""

_AHEAD = 2
"""How many blocks ahead the matrix is brought into the caches: short rows end before a CPU's own prefetching begins."""

_LEAST_SHARE = 1 << 15
"""How many elements of the matrix are worth a thread."""

_ARGUMENTS = struct.Struct("=7q")
"""The kernel's, as `_Writer.module` says."""


class Product:
    """The product with one matrix."""

    __slots__ = ("_kernel", "_matrix", "_most_threads")

    def __init__(self, matrix: torch.Tensor) -> None:
        """matrix: [rows, columns], one that `takes` says yes to; it is kept.

        For the first one of an element type the kernel is compiled, which takes some tenths of a second.
        """
        self._matrix, self._kernel = matrix, _kernel(matrix.dtype)
        self._most_threads = max(1, matrix.numel() // _LEAST_SHARE)

    @staticmethod
    def takes(matrix: torch.Tensor) -> bool:
        """Return whether the kernel takes a matrix."""
        return (
            matrix.device.type == "cpu"
            and matrix.dtype in (torch.bfloat16, torch.float16)
            and matrix.stride(1) == 1
            and len(matrix) >= _BLOCK
            and is_available()
            and matrix.shape[1] % _lanes() == 0
        )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, columns] times the transposed matrix, plus bias [rows]: [n, rows], in the matrix's dtype.

        Summed up in float32, and rounded once.
        """
        matrix, wide = self._matrix, x.float().contiguous()
        (rows, columns), count = matrix.shape, wide.shape[0]
        product = torch.empty(count, rows)
        arguments = _ARGUMENTS.pack(
            matrix.data_ptr(), wide.data_ptr(), product.data_ptr(), rows, columns, matrix.stride(0), count
        )
        self._kernel.run(arguments, min(self._most_threads, torch.get_num_threads()))
        return (product if bias is None else product.add_(bias)).to(matrix.dtype)


@functools.cache
def _lanes() -> int:
    """Return how many float32 a vector has."""
    return 16 if has_wide_vectors() else 8


@functools.cache
def _kernel(dtype: torch.dtype) -> NativeFunction:
    name = "multiply"
    return NativeFunction(_Writer(dtype, _lanes()).module(name), name)


class _Writer:
    """Writes the kernel for matrices of one element type."""

    def __init__(self, dtype: torch.dtype, lanes: int) -> None:
        from llvmlite import ir

        self._ir, self._is_bfloat = ir, dtype is torch.bfloat16
        self._lanes, self._module = lanes, ir.Module()
        self._index, self._pointer, self._float = ir.IntType(64), ir.PointerType(), ir.FloatType()
        self._element = ir.IntType(16) if self._is_bfloat else ir.HalfType()
        self._vector = ir.VectorType(self._float, lanes)
        self._narrow = ir.VectorType(self._element, lanes)
        self._words = ir.VectorType(ir.IntType(32), lanes)
        three = ir.FunctionType(self._vector, [self._vector] * 3)
        self._multiply_add = ir.Function(self._module, three, f"llvm.fma.v{lanes}f32")
        prefetched = ir.FunctionType(ir.VoidType(), [self._pointer] + [ir.IntType(32)] * 3)
        self._prefetch = ir.Function(self._module, prefetched, "llvm.prefetch.p0")
        summed = ir.FunctionType(self._float, [self._float, self._vector])
        self._sum = ir.Function(self._module, summed, f"llvm.vector.reduce.fadd.v{lanes}f32")

    def module(self, name: str) -> ir.Module:
        """Return the module with the whole kernel: a thread multiplies its share of the matrix's rows.

        Its arguments: the addresses of the matrix, of the rows of activations and of the product, how many rows and
        columns the matrix has, how many elements lie from one of its rows to the next, and the rows of activations.
        """
        ir = self._ir
        kernel = ir.Function(self._module, ir.FunctionType(ir.VoidType(), [self._pointer]), name)
        builder = ir.IRBuilder(kernel.append_basic_block())
        block_function = self._block()
        loaded = [
            builder.load(self._at(builder, kernel.args[0], place, self._index), typ=self._index) for place in range(7)
        ]
        matrix, activations, product = (builder.inttoptr(address, self._pointer) for address in loaded[:3])
        rows, columns, stride, count = loaded[3:]
        thread, threads = (self._openmp(builder, function) for function in (THREAD_NUMBER, THREAD_COUNT))
        # The last block reaches back into the one before it, to have all its rows: they come out the same again.
        blocks = builder.sdiv(builder.add(rows, self._index(_BLOCK - 1)), self._index(_BLOCK))
        share = builder.sdiv(builder.add(blocks, builder.sub(threads, self._index(1))), threads)
        first = builder.mul(thread, share)
        end = self._least(builder, builder.add(first, share), blocks)
        with self._loop(builder, first, end, 1) as block:
            last = builder.sub(rows, self._index(_BLOCK))
            row = self._least(builder, builder.mul(block, self._index(_BLOCK)), last)
            own = self._at(builder, matrix, builder.mul(row, stride), self._element)
            to = self._at(builder, product, row, self._float)
            builder.call(block_function, [own, stride, activations, columns, to, rows, count])
        builder.ret_void()
        return self._module

    def _block(self) -> ir.Function:
        """Return the function that multiplies a block of the matrix by all rows of activations.

        Its arguments: the block and the distance between its rows, the rows of activations and how long they are, where
        the product begins and the distance between its rows, and how many rows of activations there are.
        """
        ir = self._ir
        kinds = [self._pointer, self._index, self._pointer, self._index, self._pointer, self._index, self._index]
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), "block")
        function.linkage = "internal"
        matrix, stride, activations, columns, product, rows, count = function.args
        builder = ir.IRBuilder(function.append_basic_block())
        first = self._index(0)
        for width, height in _TILES.items():
            tile = self._tile(width, height)
            end = builder.and_(count, self._index(-width))
            with self._loop(builder, first, end, width) as row:
                own = self._at(builder, activations, builder.mul(row, columns), self._float)
                to = self._at(builder, product, builder.mul(row, rows), self._float)
                for above in map(self._index, range(0, _BLOCK, height)):
                    part = self._at(builder, matrix, builder.mul(above, stride), self._element)
                    place = self._at(builder, to, above, self._float)
                    builder.call(tile, [part, stride, own, columns, place, rows])
            first = end
        builder.ret_void()
        return function

    def _tile(self, width: int, height: int) -> ir.Function:
        """Return the function that multiplies `height` rows of the matrix by `width` rows of activations.

        Its arguments are those of a block, but for the last one.
        """
        ir = self._ir
        kinds = [self._pointer, self._index, self._pointer, self._index, self._pointer, self._index]
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), f"tile_{width}")
        function.linkage = "internal"
        matrix, stride, activations, columns, product, rows = function.args
        builder = ir.IRBuilder(function.append_basic_block())
        zeros, step = ir.Constant(self._vector, [0.0] * self._lanes), self._index(self._lanes)
        entry, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        column = builder.phi(self._index)
        column.add_incoming(self._index(0), entry)
        sums = [[builder.phi(self._vector) for _ in range(width)] for _ in range(height)]
        starts = [builder.add(builder.mul(columns, self._index(row)), column) for row in range(width)]
        inputs = [
            self._load(builder, self._at(builder, activations, start, self._float), self._vector) for start in starts
        ]
        for above, of_row in enumerate(sums):
            start = builder.add(builder.mul(stride, self._index(above)), column)
            weights = self._widened(builder, self._at(builder, matrix, start, self._element))
            later = builder.add(builder.mul(stride, self._index(_AHEAD * _BLOCK)), start)
            # To be read, soon and again; beyond the matrix it does nothing.
            hints = [ir.IntType(32)(hint) for hint in (0, 3, 1)]
            builder.call(self._prefetch, [self._at(builder, matrix, later, self._element), *hints])
            for total, row in zip(of_row, inputs, strict=True):
                total.add_incoming(zeros, entry)
                total.add_incoming(builder.call(self._multiply_add, [weights, row, total]), body)
        following = builder.add(column, step)
        column.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed("<", following, columns), body, done)
        builder.position_at_end(done)
        for above, of_row in enumerate(sums):
            for row, total in enumerate(of_row):
                # What a sum was behind the last columns.
                [_, (behind, _)] = total.incomings
                whole = builder.call(self._sum, [ir.Constant(self._float, -0.0), behind], fastmath=("reassoc",))
                place = builder.add(builder.mul(rows, self._index(row)), self._index(above))
                builder.store(whole, self._at(builder, product, place, self._float))
        builder.ret_void()
        return function

    def _widened(self, builder: ir.IRBuilder, pointer: Any) -> Any:
        """Return the elements of the matrix that lie there, as float32."""
        narrow = self._load(builder, pointer, self._narrow)
        if not self._is_bfloat:
            return builder.fpext(narrow, self._vector)
        # A bfloat16 is the upper half of a float32.
        words = builder.shl(builder.zext(narrow, self._words), self._ir.Constant(self._words, [16] * self._lanes))
        return builder.bitcast(words, self._vector)

    def _load(self, builder: ir.IRBuilder, pointer: Any, kind: Any) -> Any:
        """Load a vector that lies anywhere."""
        loaded = builder.load(pointer, typ=kind)
        loaded.align = 2
        return loaded

    def _at(self, builder: ir.IRBuilder, pointer: Any, index: Any, element: Any) -> Any:
        """Return the address of an element."""
        return builder.gep(pointer, [self._index(index) if isinstance(index, int) else index], source_etype=element)

    def _least(self, builder: ir.IRBuilder, one: Any, other: Any) -> Any:
        return builder.select(builder.icmp_signed("<", one, other), one, other)

    def _openmp(self, builder: ir.IRBuilder, name: str) -> Any:
        function = self._ir.Function(self._module, self._ir.FunctionType(self._ir.IntType(32), []), name)
        return builder.sext(builder.call(function, []), self._index)

    @contextlib.contextmanager
    def _loop(self, builder: ir.IRBuilder, first: Any, end: Any, step: int) -> Iterator[Any]:
        """Write what is done for every index from `first` on while it is below `end`."""
        before, head = builder.block, builder.append_basic_block()
        body, done = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(self._index)
        index.add_incoming(first, before)
        builder.cbranch(builder.icmp_signed("<", index, end), body, done)
        builder.position_at_end(body)
        yield index
        index.add_incoming(builder.add(index, self._index(step)), builder.block)
        builder.branch(head)
        builder.position_at_end(done)
