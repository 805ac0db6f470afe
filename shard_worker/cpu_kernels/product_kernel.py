"""The kernel of a product with a dense matrix, in LLVM's language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.kernel_writer import BLOCK, Elements, KernelWriter

if TYPE_CHECKING:
    from llvmlite import ir

_WIDENED_ROWS = 2
"""How many of the matrix's rows are widened at a time into the fastest cache, for many rows of activations."""

_WIDTHS = (4, 2, 1)
"""By how many rows of activations these are multiplied at a time: all sums of a tile are in registers."""

_FEW = (1, 2, 3, 4)
"""Where there are so many rows of activations, elements are widened in registers, one row of the matrix after the
other, as they lie in memory: they are read faster so than several rows at a time."""


def product_module(elements: Elements, lanes: int, name: str) -> ir.Module:
    """Return the module with the kernel, by which each thread multiplies its share of the matrix's rows.

    elements: of the matrix, of the product, and of the bias. lanes: how many float32 a vector has; they divide the
    columns.

    The kernel's arguments: the addresses of the matrix, of the rows of activations, of the product, and of the bias or
    0; how many rows and columns the matrix has, and how many elements lie from one of its rows to the next; and how
    many rows of activations there are. Activations are float32, and have no gaps, nor has the product.
    """
    return ProductWriter(elements, lanes).module(name)


class ProductWriter(KernelWriter):
    """Writes the kernel for matrices of one kind."""

    def __init__(self, elements: Elements, lanes: int) -> None:
        super().__init__(lanes)
        self._elements, self._stored = elements, self._types[elements]

    def module(self, name: str) -> ir.Module:
        """Return the module, as `product_module` does."""
        builder, (matrix, activations, product, bias), others = self._kernel(name, 4, 4)
        rows, columns, stride, count = others
        widened = builder.alloca(self._float, builder.mul(columns, self._index(_WIDENED_ROWS)))
        widened.align = 64
        block = self._block()
        with self._blocks(builder, rows) as row:
            own = self._at(builder, matrix, builder.mul(row, stride), self._stored)
            to = self._at(builder, product, row, self._stored)
            own_bias = self._bias_of(builder, bias, row, self._elements)
            builder.call(block, [own, stride, activations, columns, to, rows, own_bias, count, widened])
        builder.ret_void()
        return self._module

    @property
    def _kinds(self) -> list[Any]:
        """The types of a tile's arguments: where its part of the matrix begins and the distance between the rows; where
        the rows of activations begin and how long they are; where the product begins and the distance between its
        rows; and where the bias begins."""
        return [*[self._pointer, self._index] * 3, self._pointer]

    def _block(self) -> ir.Function:
        """Return the function that multiplies a block of the matrix by all rows of activations.

        Its arguments are those of a tile, how many rows of activations there are, and memory for `_WIDENED_ROWS`.
        """
        function = self._function("block", [*self._kinds, self._index, self._pointer])
        matrix, stride, activations, columns, product, rows, bias, count, widened = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())

        def part_of(above: int) -> tuple[Any, Any, Any]:
            """Return where the block's rows begin from this one on, their part of the product, and their bias."""
            own = self._at(builder, matrix, builder.mul(self._index(above), stride), self._stored)
            to = self._at(builder, product, self._index(above), self._stored)
            return own, to, self._bias_of(builder, bias, self._index(above), self._elements)

        done = builder.append_basic_block()
        for few in _FEW:
            tile = self._tile(self._elements, few, 1)
            with builder.if_then(builder.icmp_signed("==", count, self._index(few))):
                for above in range(BLOCK):
                    own, to, own_bias = part_of(above)
                    builder.call(tile, [own, stride, activations, columns, to, rows, own_bias])
                builder.branch(done)
        widen = self._widen()
        tiles = {width: self._tile(Elements.FLOAT32, width, _WIDENED_ROWS) for width in _WIDTHS}
        for above in range(0, BLOCK, _WIDENED_ROWS):
            own, to, own_bias = part_of(above)
            builder.call(widen, [own, stride, widened, columns])
            first = self._index(0)
            for width, tile in tiles.items():
                end = builder.and_(count, self._index(-width))
                with self._loop(builder, first, end, width) as row:
                    inputs = self._at(builder, activations, builder.mul(row, columns), self._float)
                    place = self._at(builder, to, builder.mul(row, rows), self._stored)
                    builder.call(tile, [widened, columns, inputs, columns, place, rows, own_bias])
                first = end
        builder.branch(done)
        builder.position_at_end(done)
        builder.ret_void()
        return function

    def _widen(self) -> ir.Function:
        """Return the function that widens `_WIDENED_ROWS` rows of the matrix.

        Its arguments are the first ones of a tile, the memory for these rows, and how long they are.
        """
        function = self._function("widen", [self._pointer, self._index] * 2)
        matrix, stride, widened, columns = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        lines = self._rows_of(builder, matrix, stride, self._stored, _WIDENED_ROWS)
        to = self._rows_of(builder, widened, columns, self._float, _WIDENED_ROWS)
        for line, own in zip(lines, to, strict=True):
            with self._loop(builder, self._index(0), columns, self._lanes) as column:
                vector = self._elements_at(builder, self._elements, line, stride, column)
                self._store(builder, vector, self._at(builder, own, column, self._float))
        builder.ret_void()
        return function

    def _tile(self, elements: Elements, width: int, height: int) -> ir.Function:
        """Return the function that multiplies `height` rows of elements by `width` rows of activations."""
        function = self._function(f"tile_{elements.name}_{width}", self._kinds)
        matrix, stride, activations, columns, product, rows, bias = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        lines = self._rows_of(builder, matrix, stride, self._types[elements], height)
        inputs = self._rows_of(builder, activations, columns, self._float, width)
        zeros = [self._all_floats(0.0)] * (height * width)
        with self._sums(builder, self._index(0), columns, self._lanes, zeros) as (column, sums):
            seen = [self._load(builder, self._at(builder, row, column, self._float), self._vector) for row in inputs]
            for above, line in enumerate(lines):
                vector = self._elements_at(builder, elements, line, stride, column)
                for number, row in enumerate(seen, above * width):
                    sums[number] = builder.call(self._multiply_add, [vector, row, sums[number]])
        for number, total in enumerate(sums):
            above, row = divmod(number, width)
            place = builder.add(builder.mul(rows, self._index(row)), self._index(above))
            own_bias = self._bias_of(builder, bias, self._index(above), self._elements)
            self._put(builder, self._total(builder, total), product, place, own_bias)
        builder.ret_void()
        return function

    def _put(self, builder: ir.IRBuilder, total: Any, product: Any, place: Any, bias: Any) -> None:
        """Write a number of the product."""
        found = self._biased(builder, total, bias, self._elements)
        builder.store(self._narrowed(builder, found, self._elements), self._at(builder, product, place, self._stored))

    def _elements_at(self, builder: ir.IRBuilder, elements: Elements, line: Any, stride: Any, column: Any) -> Any:
        """Return a vector of a row of the matrix as float32, and have rows further below brought into the caches."""
        at = self._at(builder, line, column, self._types[elements])
        if elements is Elements.FLOAT32:
            return self._load(builder, at, self._vector)
        self._bring(builder, line, column, stride, self._stored)
        return self._load_floats(builder, at, elements)
