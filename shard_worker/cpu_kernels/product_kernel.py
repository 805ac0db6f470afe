"""The kernel of a product, in LLVM's language."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.native import THREAD_COUNT, THREAD_NUMBER

if TYPE_CHECKING:
    from llvmlite import ir

BLOCK = 8
"""How many of the matrix's rows are multiplied by all rows of activations before the next ones are read. A thread's
share is made of such blocks."""

RUN = 32
"""Of codes of 4 bits the low halves of so many bytes are neighbouring columns, and the high halves the next ones."""

_AHEAD = 2
"""How many blocks ahead the matrix is brought into the caches: short rows end before a CPU's own prefetching begins."""

_WIDENED_ROWS = 2
"""How many of the matrix's rows are widened at a time into the fastest cache, for many rows of activations."""

_WIDTHS = (4, 2, 1)
"""By how many rows of activations these are multiplied at a time: all sums of a tile are in registers."""


class Elements(Enum):
    """What a matrix is made of.

    CODES_8, CODES_4: whole numbers from 0 on, in bytes, or two in a byte as `RUN` says. An element is `scale * (code -
    middle) + offset`, with one scale and offset for some neighbouring columns of a row, a power of two from 16 on.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    CODES_8 = "codes of 8 bits"
    CODES_4 = "codes of 4 bits"

    @property
    def are_codes(self) -> bool:
        """Whether elements are made of codes."""
        return self in (Elements.CODES_8, Elements.CODES_4)

    @property
    def tiles(self) -> dict[int, int]:
        """How many rows of the matrix are multiplied at a time by one row of activations, by two, or by four, where
        there are no others: elements are widened in registers then.

        So many sums are independent of each other that a product need not wait for the one before. Scales and offsets
        take registers too.
        """
        return {1: 4, 2: 4, 4: 2} if self.are_codes else {1: 8, 2: 4, 4: 2}

    @property
    def middle(self) -> int:
        """Which code stands for the offset itself, so that rounding it to 16 bits matters little."""
        return 128 if self is Elements.CODES_8 else 8

    def step(self, lanes: int) -> int:
        """Return how many columns are multiplied at a time, in vectors of so many: these divide a matrix's columns."""
        return {Elements.CODES_8: RUN, Elements.CODES_4: 2 * RUN}.get(self, lanes)


def product_module(elements: Elements, lanes: int, run: int, name: str) -> ir.Module:
    """Return the module with the kernel, by which each thread multiplies its share of the matrix's rows.

    lanes: how many float32 a vector has. run: how many columns of codes have one scale and offset at least, up to
    `RUN`.

    The kernel's arguments: the addresses of the matrix, of its scales and offsets, of the rows of activations and of
    the product; how many rows and columns the matrix has, how many elements (of codes, bytes) lie from one of its rows
    to the next, and how many pairs of a scale and an offset a row has; the logarithm to the base 2 of the columns that
    have one pair; and how many rows of activations there are. Scales and offsets are pairs of bfloat16. Activations and
    the product are float32 without gaps.
    """
    return ProductWriter(elements, lanes, run).module(name)


class ProductWriter:
    """Writes the kernel for matrices of one kind."""

    def __init__(self, elements: Elements, lanes: int, run: int) -> None:
        from llvmlite import ir

        self._ir, self._elements, self._lanes, self._module = ir, elements, lanes, ir.Module()
        self._run = run
        self._index, self._pointer, self._float = ir.IntType(64), ir.PointerType(), ir.FloatType()
        self._word, self._vector = ir.IntType(32), ir.VectorType(self._float, lanes)
        self._words = ir.VectorType(self._word, lanes)
        types = {Elements.FLOAT32: self._float, Elements.BFLOAT16: ir.IntType(16), Elements.FLOAT16: ir.HalfType()}
        self._types = {each: types.get(each, ir.IntType(8)) for each in Elements}
        self._stored = self._types[elements]
        three = ir.FunctionType(self._vector, [self._vector] * 3)
        self._multiply_add = ir.Function(self._module, three, f"llvm.fma.v{lanes}f32")
        prefetched = ir.FunctionType(ir.VoidType(), [self._pointer] + [self._word] * 3)
        self._prefetch = ir.Function(self._module, prefetched, "llvm.prefetch.p0")
        summed = ir.FunctionType(self._float, [self._float, self._vector])
        self._sum = ir.Function(self._module, summed, f"llvm.vector.reduce.fadd.v{lanes}f32")

    def module(self, name: str) -> ir.Module:
        """Return the module, as `product_module` does."""
        kernel = self._function(name, [self._pointer])
        builder = self._ir.IRBuilder(kernel.append_basic_block())
        (matrix, numbers, activations, product), others = self._arguments(builder, kernel, 4, 6)
        rows, columns, stride, pairs, shift, count = others
        thread, threads = (self._openmp(builder, function) for function in (THREAD_NUMBER, THREAD_COUNT))
        # The last block reaches back into the one before it, to have all its rows: they come out the same again.
        blocks = builder.sdiv(builder.add(rows, self._index(BLOCK - 1)), self._index(BLOCK))
        share = builder.sdiv(builder.add(blocks, builder.sub(threads, self._index(1))), threads)
        first = builder.mul(thread, share)
        end = self._least(builder, builder.add(first, share), blocks)
        widened = builder.alloca(self._float, builder.mul(columns, self._index(_WIDENED_ROWS)))
        widened.align = 64
        block_function = self._block()
        with self._loop(builder, first, end, 1) as block:
            last = builder.sub(rows, self._index(BLOCK))
            row = self._least(builder, builder.mul(block, self._index(BLOCK)), last)
            own = self._at(builder, matrix, builder.mul(row, stride), self._stored)
            of_own = self._at(builder, numbers, builder.mul(row, pairs), self._word)
            to = self._at(builder, product, row, self._float)
            arguments = [own, stride, of_own, pairs, shift, activations, columns, to, rows, count, widened]
            builder.call(block_function, arguments)
        builder.ret_void()
        return self._module

    @property
    def _kinds(self) -> list[Any]:
        """The types of a tile's arguments: where its part of the matrix begins and the distance between the rows; the
        same of scales and offsets, and the logarithm of the columns that have one; where the rows of activations begin
        and how long they are; where the product begins and the distance between its rows."""
        pointer, index = self._pointer, self._index
        return [pointer, index, pointer, index, index, pointer, index, pointer, index]

    def _block(self) -> ir.Function:
        """Return the function that multiplies a block of the matrix by all rows of activations.

        Its arguments are those of a tile, how many rows of activations there are, and memory for `_WIDENED_ROWS`.
        """
        function = self._function("block", [*self._kinds, self._index, self._pointer])
        matrix, stride, numbers, pairs, shift, activations, columns, product, rows, count, widened = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())

        def part_of(above: int) -> tuple[list[Any], Any]:
            """Return what a tile is told of the matrix from this row of the block on, and where its product begins."""
            row = self._index(above)
            own = self._at(builder, matrix, builder.mul(row, stride), self._stored)
            of_own = self._at(builder, numbers, builder.mul(row, pairs), self._word)
            return [own, stride, of_own, pairs, shift], self._at(builder, product, row, self._float)

        done = builder.append_basic_block()
        for few, height in self._elements.tiles.items():
            tile = self._tile(self._elements, few, height)
            with builder.if_then(builder.icmp_signed("==", count, self._index(few))):
                for above in range(0, BLOCK, height):
                    part, to = part_of(above)
                    builder.call(tile, [*part, activations, columns, to, rows])
                builder.branch(done)
        widen = self._widen()
        tiles = {width: self._tile(Elements.FLOAT32, width, _WIDENED_ROWS) for width in _WIDTHS}
        for above in range(0, BLOCK, _WIDENED_ROWS):
            part, to = part_of(above)
            builder.call(widen, [*part, widened, columns])
            first = self._index(0)
            for width, tile in tiles.items():
                end = builder.and_(count, self._index(-width))
                with self._loop(builder, first, end, width) as row:
                    own = self._at(builder, activations, builder.mul(row, columns), self._float)
                    place = self._at(builder, to, builder.mul(row, rows), self._float)
                    builder.call(tile, [widened, columns, *part[2:], own, columns, place, rows])
                first = end
        builder.branch(done)
        builder.position_at_end(done)
        builder.ret_void()
        return function

    def _widen(self) -> ir.Function:
        """Return the function that widens `_WIDENED_ROWS` rows of the matrix.

        Its arguments are the first ones of a tile, the memory for these rows, and how long they are.
        """
        kinds = [*self._kinds[:5], self._pointer, self._index]
        function = self._function("widen", kinds)
        matrix, stride, numbers, pairs, shift, widened, columns = function.args
        builder, count = self._ir.IRBuilder(function.append_basic_block()), _WIDENED_ROWS
        lines = self._rows_of(builder, matrix, stride, self._stored, count)
        numbers_of = self._rows_of(builder, numbers, pairs, self._word, count)
        to = self._rows_of(builder, widened, columns, self._float, count)
        with self._loop(builder, self._index(0), columns, self._elements.step(self._lanes)) as column:
            for first, vectors in self._vectors(builder, self._elements, lines, numbers_of, stride, shift, column):
                place = builder.add(column, self._index(first))
                for line, vector in zip(to, vectors, strict=True):
                    builder.store(vector, self._at(builder, line, place, self._float)).align = 4
        builder.ret_void()
        return function

    def _tile(self, elements: Elements, width: int, height: int) -> ir.Function:
        """Return the function that multiplies `height` rows of elements by `width` rows of activations."""
        function = self._function(f"tile_{elements.name}_{width}", self._kinds)
        matrix, stride, numbers, pairs, shift, activations, columns, product, rows = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        lines = self._rows_of(builder, matrix, stride, self._types[elements], height)
        numbers_of = self._rows_of(builder, numbers, pairs, self._word, height)
        inputs = self._rows_of(builder, activations, columns, self._float, width)
        zeros, step = self._ir.Constant(self._vector, [0.0] * self._lanes), self._index(elements.step(self._lanes))
        entry, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        column = builder.phi(self._index)
        column.add_incoming(self._index(0), entry)
        begun = [[builder.phi(self._vector) for _ in range(width)] for _ in range(height)]
        sums = [[*of_row] for of_row in begun]
        for first, vectors in self._vectors(builder, elements, lines, numbers_of, stride, shift, column):
            place = builder.add(column, self._index(first))
            seen = [self._load(builder, self._at(builder, row, place, self._float), self._vector) for row in inputs]
            for of_row, weights in zip(sums, vectors, strict=True):
                for number, row in enumerate(seen):
                    of_row[number] = builder.call(self._multiply_add, [weights, row, of_row[number]])
        for before, after in zip(begun, sums, strict=True):
            for one, next_one in zip(before, after, strict=True):
                one.add_incoming(zeros, entry)
                one.add_incoming(next_one, body)
        following = builder.add(column, step)
        column.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed("<", following, columns), body, done)
        builder.position_at_end(done)
        for above, of_row in enumerate(sums):
            for row, vector in enumerate(of_row):
                whole = builder.call(self._sum, [self._ir.Constant(self._float, -0.0), vector], fastmath=("reassoc",))
                place = builder.add(builder.mul(rows, self._index(row)), self._index(above))
                builder.store(whole, self._at(builder, product, place, self._float))
        builder.ret_void()
        return function

    # --- elements
    def _rows_of(self, builder: ir.IRBuilder, pointer: Any, distance: Any, element: Any, count: int) -> list[Any]:
        """Return where rows begin that lie so far apart."""
        return [self._at(builder, pointer, builder.mul(distance, self._index(row)), element) for row in range(count)]

    def _vectors(
        self,
        builder: ir.IRBuilder,
        elements: Elements,
        lines: list[Any],
        numbers: list[Any],
        stride: Any,
        shift: Any,
        column: Any,
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the elements of rows from a column on as float32, one vector of each row at a time, behind how many
        columns come before it."""
        step = elements.step(self._lanes)
        if elements is not Elements.FLOAT32:
            for line in lines:
                self._bring(builder, line, column, builder.mul(stride, self._index(_AHEAD * BLOCK)))
        # Columns of a run have one scale and offset.
        run = self._run if elements.are_codes else step
        for begin in range(0, step, run):
            group = builder.ashr(builder.add(column, self._index(begin)), shift)
            pairs = [self._pair(builder, one, group) if elements.are_codes else None for one in numbers]
            for first in range(begin, begin + run, self._lanes):
                of_rows = zip(lines, pairs, strict=True)
                yield first, (self._widened(builder, elements, line, column, first, pair) for line, pair in of_rows)

    def _widened(self, builder: ir.IRBuilder, elements: Elements, line: Any, column: Any, first: int, pair: Any) -> Any:
        """Return elements of a row of the matrix as float32: a vector of them from `column + first` on.

        pair: of codes what `_pair` returned for them.
        """
        stored, place = self._types[elements], builder.add(column, self._index(first))
        if elements is Elements.CODES_4:
            # The second run of columns is in the same bytes as the first one.
            place = builder.add(builder.ashr(column, self._index(1)), self._index(first % RUN))
        at = self._at(builder, line, place, stored)
        if elements is Elements.FLOAT32:
            return self._load(builder, at, self._vector)
        if not elements.are_codes:
            return self._widened_floats(builder, at)
        words = builder.zext(self._load(builder, at, self._ir.VectorType(stored, self._lanes)), self._words)
        if elements is Elements.CODES_4:
            words = builder.and_(words, self._all(15)) if first < RUN else builder.lshr(words, self._all(4))
        scale, lowest = pair
        return builder.call(self._multiply_add, [builder.sitofp(words, self._vector), scale, lowest])

    def _widened_floats(self, builder: ir.IRBuilder, pointer: Any) -> Any:
        """Return 16-bit floats that lie there as float32."""
        narrow = self._load(builder, pointer, self._ir.VectorType(self._stored, self._lanes))
        if self._elements is Elements.FLOAT16:
            return builder.fpext(narrow, self._vector)
        # A bfloat16 is the upper half of a float32.
        return builder.bitcast(builder.shl(builder.zext(narrow, self._words), self._all(16)), self._vector)

    def _pair(self, builder: ir.IRBuilder, numbers: Any, group: Any) -> tuple[Any, Any]:
        """Return the scale of a group of columns, and what a code of 0 stands for, each as a vector."""
        word = builder.load(self._at(builder, numbers, group, self._word), typ=self._word)
        both = builder.shl(word, self._word(16)), builder.and_(word, self._word(0xFFFF0000))
        scale, offset = (self._spread(builder, builder.bitcast(one, self._float)) for one in both)
        back = self._ir.Constant(self._vector, [float(-self._elements.middle)] * self._lanes)
        return scale, builder.call(self._multiply_add, [scale, back, offset])

    def _bring(self, builder: ir.IRBuilder, line: Any, column: Any, distance: Any) -> None:
        """Have elements brought into the caches that lie so far behind a row's; beyond the matrix it does nothing."""
        place = builder.ashr(column, self._index(1)) if self._elements is Elements.CODES_4 else column
        later = self._at(builder, line, builder.add(place, distance), self._stored)
        # To be read, soon and again.
        builder.call(self._prefetch, [later, *(self._word(hint) for hint in (0, 3, 1))])

    # --- LLVM's language
    def _function(self, name: str, kinds: list[Any]) -> ir.Function:
        return self._ir.Function(self._module, self._ir.FunctionType(self._ir.VoidType(), kinds), name)

    def _arguments(self, builder: ir.IRBuilder, kernel: ir.Function, addresses: int, numbers: int) -> tuple[Any, Any]:
        """Return what a kernel is told: so many addresses, and behind them so many numbers."""
        places = [self._index(number) for number in range(addresses + numbers)]
        at = [self._at(builder, kernel.args[0], place, self._index) for place in places]
        loaded = [builder.load(place, typ=self._index) for place in at]
        return [builder.inttoptr(one, self._pointer) for one in loaded[:addresses]], loaded[addresses:]

    def _all(self, number: int) -> Any:
        return self._ir.Constant(self._words, [number] * self._lanes)

    def _spread(self, builder: ir.IRBuilder, number: Any) -> Any:
        """Return a vector of one number."""
        ir = self._ir
        one = builder.insert_element(ir.Constant(self._vector, ir.Undefined), number, self._word(0))
        return builder.shuffle_vector(one, ir.Constant(self._vector, ir.Undefined), self._all(0))

    def _load(self, builder: ir.IRBuilder, pointer: Any, kind: Any) -> Any:
        """Load a vector that lies anywhere."""
        loaded = builder.load(pointer, typ=kind)
        loaded.align = 1
        return loaded

    def _at(self, builder: ir.IRBuilder, pointer: Any, index: Any, element: Any) -> Any:
        """Return the address of an element."""
        return builder.gep(pointer, [index], source_etype=element)

    def _least(self, builder: ir.IRBuilder, one: Any, other: Any) -> Any:
        return builder.select(builder.icmp_signed("<", one, other), one, other)

    def _openmp(self, builder: ir.IRBuilder, name: str) -> Any:
        function = self._ir.Function(self._module, self._ir.FunctionType(self._word, []), name)
        return builder.sext(builder.call(function, []), self._index)

    @contextlib.contextmanager
    def _loop(self, builder: ir.IRBuilder, first: Any, end: Any, step: Any) -> Iterator[Any]:
        """Write what is done for every index from `first` on, `step` apart, while it is below `end`."""
        before, head = builder.block, builder.append_basic_block()
        body, done = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(self._index)
        index.add_incoming(first, before)
        builder.cbranch(builder.icmp_signed("<", index, end), body, done)
        builder.position_at_end(body)
        yield index
        index.add_incoming(builder.add(index, self._index(step) if isinstance(step, int) else step), builder.block)
        builder.branch(head)
        builder.position_at_end(done)
