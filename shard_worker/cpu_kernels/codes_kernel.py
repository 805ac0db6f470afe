"""The kernels of a product with a matrix of codes, in LLVM's language: whole numbers times whole numbers.

Codes are whole, and activations are made so: each span of a row is multiplied by the power of two that brings its
largest one between 2**14 and 2**15, and rounded. A bfloat16 has 8 bits, so that only activations are rounded that are
less than a 128th of the largest, by a 65000th of that at most. Sums of whole numbers round nothing, and come out the
same in any order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels import native
from shard_worker.cpu_kernels.kernel_writer import BLOCK, Elements, KernelWriter
from shard_worker.cpu_kernels.native import THREADS_BARRIER

if TYPE_CHECKING:
    from llvmlite import ir

RUN = 32
"""Of codes of 4 bits the low halves of so many bytes are neighbouring columns, and the high halves the next ones."""

SPAN = 256
"""How many columns of activations have one power of two; the last ones of a row may be fewer."""

LARGEST_RUN = 128
"""Of more columns than these the products are not summed up as whole numbers, which then stay below 2**31."""

_LANES = 8
"""How many sums a vector has. It has twice as many whole numbers of 16 bits, whose products are summed up by twos."""

_PAIRS = 2 * _LANES

_FEW = (1, 2, 3, 4)
"""Where there are so many rows of activations, codes are widened in registers, one row of the matrix after the other,
as they lie in memory: they are read up to twice as fast so as several rows at a time."""

_WIDTHS = (4, 2, 1)
"""By how many rows of activations codes are multiplied at a time that have been widened in memory, for more rows."""

_RUNS = 8
"""In how many runs each thread's share of a matrix's blocks is taken."""

_CACHE_LINE = 64
"""How many bytes are brought into the caches at a time."""

_BEFORE_EXPONENT, _BEFORE_UPPER_HALF = 7, 16
"""How many bits of a bfloat16 come before its exponent, and how many bits of a float32 before its upper half."""

_LARGEST_POWER, _INFINITE = 141, 255
"""A bfloat16 whose exponent, as it is stored, is e lies below 2**15 once it is multiplied by 2**(141 - e); with the
largest exponent it is infinite, or no number."""


def middle_of(bits: int) -> int:
    """Return which code stands for the offset itself, so that rounding it to 16 bits matters little."""
    return 1 << (bits - 1)


def step_of(bits: int, run: int) -> int:
    """Return how many columns are multiplied at a time where so many have one scale. They divide a matrix's columns."""
    return max(run, 2 * RUN if bits == 4 else RUN)


def rounded_row(columns: int, groups: int) -> int:
    """Return how many bytes a row of rounded activations takes: whole numbers of 16 bits, the sum of each group of
    columns, and what a one stands for in each span."""
    return 2 * columns + 4 * (groups + -(-columns // SPAN))


def scratch_size(rounded_row: int, rows: int) -> int:
    """Return how many bytes of memory the kernel needs for so many rows of activations, each as `rounded_row` says.

    They are 0 before the first call, and may be used for any other one that does not run at the same time.
    """
    return _CACHE_LINE + rounded_row * rows


def codes_module(bits: int, run: int, name: str) -> ir.Module:
    """Return the module with the kernel, by which threads round rows of activations, and then multiply all of them by a
    matrix, or runs of them by a matrix each. They take blocks of the matrices' rows as they come to them, since one
    thread may be slower than another.

    An element of a matrix is `scale * (code - middle) + offset`, with one scale and offset for some neighbouring
    columns of a row, a power of two from 16 on. Codes are whole numbers from 0 on, in bytes, or two in a byte as `RUN`
    says. bits: of a code, 4 or 8. run: how many columns have one scale and offset at least, up to `LARGEST_RUN`.

    The kernel's arguments: the addresses of the activations, of memory as `scratch_size` says, and of the product; how
    many rows and columns each matrix has, how many bytes lie from one of its rows to the next, and how many groups a
    row has; the logarithm to the base 2 of a group's columns; how many bytes a rounded row takes; how many rows of
    activations there are; how many elements lie from one row of the product to the next; and how many matrices there
    are. Behind them of each matrix: its address, that of its scales and offsets, and that of its bias or 0; which row
    of activations is the first that is multiplied by it, and how many are. Scales and offsets are pairs of bfloat16.
    Activations, the product and biases are bfloat16, activations and biases without gaps.
    """
    return _CodesWriter(bits, run).module(name)


class _CodesWriter(KernelWriter):
    """Writes the kernel for codes of so many bits, of which so many columns have one scale and offset at least."""

    def __init__(self, bits: int, run: int) -> None:
        super().__init__(_LANES)
        ir = self._ir
        self._bits, self._run, self._step = bits, run, step_of(bits, run)
        self._byte, self._half = ir.IntType(8), ir.IntType(16)
        self._halves = ir.VectorType(self._half, _PAIRS)
        self._bytes = ir.VectorType(self._byte, RUN)

    def module(self, name: str) -> ir.Module:
        """Return the module, as `codes_module` does."""
        builder, (activations, scratch, product), others = self._kernel(name, 3, 9)
        rows, columns, stride, groups, shift, length, count, distance, matrices = others
        widened = builder.alloca(self._half, builder.mul(columns, self._index(self._height)))
        widened.align = _CACHE_LINE
        own_row = builder.alloca(self._byte, length)
        own_row.align = _CACHE_LINE
        thread, threads = self._threads(builder)
        rounding, rounds = self._rounding(), [columns, groups, shift, length, count]
        is_one = builder.icmp_signed("==", count, self._index(1))
        together = self._at(builder, scratch, self._index(_CACHE_LINE), self._byte)
        with builder.if_else(is_one) as (alone, otherwise):
            with alone:
                # To round one row takes less time than to wait for the thread that does.
                builder.call(rounding, [activations, own_row, *rounds, self._index(0), self._index(1)])
            with otherwise:
                builder.call(rounding, [activations, together, *rounds, thread, threads])
                # Other threads' rows are multiplied, too.
                builder.call(self._declared(THREADS_BARRIER, self._ir.VoidType(), []), [])
        rounded = builder.select(is_one, own_row, together)
        block, behind = self._block(), self._index(3 + 9)
        with self._taken(builder, scratch, rows, matrices) as (number, first_block, end_block):
            first = builder.add(behind, builder.mul(number, self._index(5)))
            at = (
                self._at(builder, builder.function.args[0], builder.add(first, self._index(one)), self._index)
                for one in range(5)
            )
            *addresses, begin, own_count = (builder.load(one, typ=self._index) for one in at)
            matrix, numbers, bias = (builder.inttoptr(address, self._pointer) for address in addresses)
            own_rounded = self._at(builder, rounded, builder.mul(begin, length), self._byte)
            own_product = self._at(builder, product, builder.mul(begin, distance), self._half)
            last = builder.sub(rows, self._index(BLOCK))
            with self._loop(builder, first_block, end_block, 1) as number_of_block:
                # The last block reaches back into the one before it: those rows come out the same again.
                row = self._least(builder, builder.mul(number_of_block, self._index(BLOCK)), last)
                own = self._at(builder, matrix, builder.mul(row, stride), self._byte)
                of_own = self._at(builder, numbers, builder.mul(row, groups), self._word)
                to = self._at(builder, own_product, row, self._half)
                own_bias = self._bias_of(builder, bias, row, Elements.BFLOAT16)
                part = [own, stride, of_own, groups, shift, own_rounded, length, columns, to, distance, own_bias]
                builder.call(block, [*part, own_count, widened])
        builder.ret_void()
        return self._module

    @contextlib.contextmanager
    def _taken(self, builder: ir.IRBuilder, taken: Any, rows: Any, matrices: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Write what is done for every run of blocks that the thread takes: by the number of the matrix, and by the
        run's first block and its end.

        taken: the address of how many runs of all matrices are taken, int64, 0 before and behind.
        """
        _, threads = self._threads(builder)
        one = self._index(1)
        blocks = builder.sdiv(builder.add(rows, self._index(BLOCK - 1)), self._index(BLOCK))
        length = builder.sdiv(blocks, builder.mul(threads, self._index(_RUNS)))
        length = builder.select(builder.icmp_signed("<", length, one), one, length)
        of_matrix = builder.sdiv(builder.add(blocks, builder.sub(length, one)), length)
        count = builder.mul(of_matrix, matrices)
        head, body, done = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        run = builder.atomic_rmw("add", taken, one, "monotonic")
        builder.cbranch(builder.icmp_signed("<", run, count), body, done)
        builder.position_at_end(body)
        first = builder.mul(builder.srem(run, of_matrix), length)
        yield builder.sdiv(run, of_matrix), first, self._least(builder, builder.add(first, length), blocks)
        builder.branch(head)
        builder.position_at_end(done)
        # Every thread finds once that there are no more; the last one of them is the last that looks.
        is_last = builder.icmp_signed("==", run, builder.add(count, builder.sub(threads, one)))
        with builder.if_then(is_last):
            builder.atomic_rmw("xchg", taken, self._index(0), "monotonic")

    # --- rounding
    def _rounding(self) -> ir.Function:
        """Return the function that rounds rows of activations.

        Its arguments: where activations begin, and where rounded rows do; how many columns a row has, how many groups,
        and the logarithm of a group's columns; how many bytes a rounded row takes; how many rows there are; and which
        of them is the first, and how far the next one is from it.
        """
        function = self._function("round_rows", [self._pointer] * 2 + [self._index] * 7)
        activations, rounded, columns, groups, shift, length, count, first_row, distance = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        with self._loop(builder, first_row, count, distance) as row:
            own = self._at(builder, activations, builder.mul(row, columns), self._half)
            numbers = self._at(builder, rounded, builder.mul(row, length), self._byte)
            sums, ones = self._behind(builder, numbers, columns, groups)
            with self._loop(builder, self._index(0), groups, 1) as group:
                builder.store(self._float(0.0), self._at(builder, sums, group, self._float)).align = 2
            with self._loop(builder, self._index(0), columns, SPAN) as first:
                end = self._least(builder, builder.add(first, self._index(SPAN)), columns)
                power, one = self._power(builder, self._largest(builder, own, first, end))
                place = builder.sdiv(first, self._index(SPAN))
                builder.store(one, self._at(builder, ones, place, self._float)).align = 2
                self._round_span(builder, (own, numbers, sums), (first, end, shift), power, one)
        builder.ret_void()
        return function

    def _largest(self, builder: ir.IRBuilder, row: Any, first: Any, end: Any) -> Any:
        """Return the largest of some activations of a row, without signs: bfloat16 as whole numbers of 16 bits, which
        have the same order."""
        larger = self._declared(f"llvm.umax.v{_PAIRS}i16", self._halves, [self._halves] * 2)
        largest = self._declared(f"llvm.vector.reduce.umax.v{_PAIRS}i16", self._half, [self._halves])
        unsigned = self._ir.Constant(self._halves, [0x7FFF] * _PAIRS)
        zeros = self._ir.Constant(self._halves, [0] * _PAIRS)
        with self._sums(builder, first, end, _PAIRS, [zeros]) as (column, found):
            seen = self._load(builder, self._at(builder, row, column, self._half), self._halves)
            found[0] = builder.call(larger, [found[0], builder.and_(seen, unsigned)])
        return builder.call(largest, found)

    def _power(self, builder: ir.IRBuilder, largest: Any) -> tuple[Any, Any]:
        """Return the power of two by which activations are multiplied whose largest one is this, and what a one stands
        for then, which is no number where an activation is infinite or none."""
        exponent = builder.lshr(builder.zext(largest, self._word), self._word(_BEFORE_EXPONENT))
        # Both powers are normal numbers.
        least = self._word(_LARGEST_POWER - 126)
        held = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)

        def power_of(biased: Any) -> Any:
            return builder.bitcast(builder.shl(biased, self._word(23)), self._float)

        # A float32 is 2**(b - 127) where b is its exponent as it is stored.
        power = power_of(builder.sub(self._word(_LARGEST_POWER + 127), held))
        one = power_of(builder.sub(held, self._word(_LARGEST_POWER - 127)))
        is_number = builder.icmp_unsigned("<", exponent, self._word(_INFINITE))
        return power, builder.select(is_number, one, self._ir.Constant(self._float, float("nan")))

    def _round_span(
        self, builder: ir.IRBuilder, where: tuple[Any, Any, Any], extents: tuple[Any, Any, Any], power: Any, one: Any
    ) -> None:
        """Write the rounded activations of a span in the order in which `_unpacked` gives codes, and add them to the
        sums of their groups.

        where: the row of activations, that of rounded ones, and the sums. extents: the span's first column and its end,
        and the logarithm of a group's columns.
        """
        (row, numbers, sums), (first, end, shift) = where, extents
        wide = self._ir.VectorType(self._half, _LANES)
        whole = self._declared(f"llvm.fptosi.sat.v{_LANES}i32.v{_LANES}f32", self._words, [self._vector])
        total_of = self._declared(f"llvm.vector.reduce.add.v{_LANES}i32", self._word, [self._words])
        powers = self._spread(builder, power)
        part = min(self._run, RUN)
        with self._loop(builder, first, end, RUN) as column:
            parts = []
            for begin in range(0, RUN, _LANES):
                place = builder.add(column, self._index(begin))
                seen = self._load(builder, self._at(builder, row, place, self._half), wide)
                scaled = builder.fmul(self._widened(builder, seen, Elements.BFLOAT16), powers)
                parts.append(builder.call(whole, [builder.call(self._round, [scaled])]))
            for begin in range(0, RUN, part):
                total = self._ir.Constant(self._words, [0] * _LANES)
                for vector in parts[begin // _LANES : (begin + part) // _LANES]:
                    total = builder.add(total, vector)
                value = builder.fmul(builder.sitofp(builder.call(total_of, [total]), self._float), one)
                group = builder.ashr(builder.add(column, self._index(begin)), shift)
                to = self._at(builder, sums, group, self._float)
                before = builder.load(to, typ=self._float)
                before.align = 2
                builder.store(builder.fadd(before, value), to).align = 2
            narrow = [builder.trunc(vector, wide) for vector in parts]
            halves = [self._joined(builder, *narrow[:2]), self._joined(builder, *narrow[2:])]
            for place, vector in self._ordered(builder, column, halves):
                self._store(builder, vector, self._at(builder, numbers, place, self._half))

    def _ordered(self, builder: ir.IRBuilder, column: Any, halves: list[Any]) -> list[tuple[Any, Any]]:
        """Return `RUN` rounded activations from a column on, given as two vectors, as the vectors that `_unpacked`
        gives codes in, and where in a row each of them stands."""
        if self._bits == 8:
            return [(builder.add(column, self._index(number * _PAIRS)), half) for number, half in enumerate(halves)]
        found = []
        for odd in range(2):
            order = self._ir.Constant(self._ir.VectorType(self._word, _PAIRS), list(range(odd, RUN, 2)))
            place = builder.add(column, self._index(odd * _PAIRS))
            found.append((place, builder.shuffle_vector(*halves, order)))
        return found

    def _joined(self, builder: ir.IRBuilder, one: Any, other: Any) -> Any:
        """Return two vectors as one."""
        both = self._ir.Constant(self._ir.VectorType(self._word, 2 * one.type.count), list(range(2 * one.type.count)))
        return builder.shuffle_vector(one, other, both)

    def _behind(self, builder: ir.IRBuilder, numbers: Any, columns: Any, groups: Any) -> tuple[Any, Any]:
        """Return where of a rounded row the sums of groups lie, and where what ones stand for."""
        sums = self._at(builder, numbers, columns, self._half)
        return sums, self._at(builder, sums, groups, self._float)

    # --- the product
    @property
    def _kinds(self) -> list[Any]:
        """The types of a tile's arguments: where its part of the matrix begins and the distance between the rows; where
        its scales and offsets begin, how many a row has, and the logarithm of the columns that have one; where rounded
        rows begin, how many bytes they take and how many columns they have; where the product begins and the distance
        between its rows; and where the bias begins."""
        pointer, index = self._pointer, self._index
        return [pointer, index, pointer, index, index, pointer, index, index, pointer, index, pointer]

    def _block(self) -> ir.Function:
        """Return the function that multiplies a block of the matrix by all rows of activations.

        Its arguments are those of a tile, how many rows of activations there are, and memory for `_height` rows.
        """
        function = self._function("block", [*self._kinds, self._index, self._pointer])
        matrix, stride, numbers, groups, shift, activations, length, columns, *others = function.args
        product, rows, bias, count, widened = others
        builder = self._ir.IRBuilder(function.append_basic_block())

        def part_of(above: int) -> tuple[Any, Any, Any, Any]:
            """Return where the block's rows begin from this one on, their scales, their part of the product, and their
            bias."""
            row = self._index(above)
            own = self._at(builder, matrix, builder.mul(row, stride), self._byte)
            of_own = self._at(builder, numbers, builder.mul(row, groups), self._word)
            to = self._at(builder, product, row, self._half)
            return own, of_own, to, self._bias_of(builder, bias, row, Elements.BFLOAT16)

        done = builder.append_basic_block()
        for few in _FEW:
            tile = self._tile(few, 1, widened=False)
            with builder.if_then(builder.icmp_signed("==", count, self._index(few))):
                for above in range(BLOCK):
                    own, of_own, to, own_bias = part_of(above)
                    part = [own, stride, of_own, groups, shift, activations, length, columns, to, rows, own_bias]
                    builder.call(tile, part)
                builder.branch(done)
        widen, tiles = self._widen(), {width: self._tile(width, self._height, widened=True) for width in _WIDTHS}
        for above in range(0, BLOCK, self._height):
            own, of_own, to, own_bias = part_of(above)
            builder.call(widen, [own, stride, widened, columns])
            first = self._index(0)
            for width, tile in tiles.items():
                end = builder.and_(count, self._index(-width))
                with self._loop(builder, first, end, width) as row:
                    rounded = self._at(builder, activations, builder.mul(row, length), self._byte)
                    place = self._at(builder, to, builder.mul(row, rows), self._half)
                    part = [widened, columns, of_own, groups, shift, rounded, length, columns, place, rows, own_bias]
                    builder.call(tile, part)
                first = end
        builder.branch(done)
        builder.position_at_end(done)
        builder.ret_void()
        return function

    def _widen(self) -> ir.Function:
        """Return the function that widens `_height` rows of the matrix.

        Its arguments: where they begin and the distance between them, the memory for them, and how long they are.
        """
        function = self._function("widen", [self._pointer, self._index] * 2)
        matrix, stride, widened, columns = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        lines = self._rows_of(builder, matrix, stride, self._byte, self._height)
        to = self._rows_of(builder, widened, columns, self._half, self._height)
        for line, own in zip(lines, to, strict=True):
            with self._loop(builder, self._index(0), columns, self._step) as column:
                for number, vector in enumerate(self._unpacked(builder, line, column, stride)):
                    place = builder.add(column, self._index(number * _PAIRS))
                    self._store(builder, vector, self._at(builder, own, place, self._half))
        builder.ret_void()
        return function

    def _tile(self, width: int, height: int, *, widened: bool) -> ir.Function:
        """Return the function that multiplies `height` rows of the matrix by `width` rows of activations.

        widened: whether `_widen` has written them.
        """
        function = self._function(f"tile_{width}{'_widened' if widened else ''}", self._kinds)
        matrix, stride, numbers, groups, shift, activations, length, columns, product, rows, bias = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        lines = self._rows_of(builder, matrix, stride, self._half if widened else self._byte, height)
        scales = self._rows_of(builder, numbers, groups, self._word, height)
        inputs = self._rows_of(builder, activations, length, self._byte, width)
        of_groups, ones = zip(*(self._behind(builder, row, columns, groups) for row in inputs), strict=True)
        zeros = [self._all_floats(0.0)] * (height * width)
        begun = self._offsets(builder, scales, of_groups, groups)
        with self._sums(builder, self._index(0), columns, SPAN, begun) as (first, totals):
            end = self._least(builder, builder.add(first, self._index(SPAN)), columns)
            step = self._summed if widened else self._step
            with self._sums(builder, first, end, step, zeros) as (column, of_span):
                if widened:
                    whole = self._sum_widened(builder, lines, inputs, column)
                    self._add_scaled(builder, whole, scales, column, shift, of_span)
                else:
                    codes = [self._unpacked(builder, line, column, stride) for line in lines]
                    for begin in range(0, step, self._summed):
                        whole = [self._all(0)] * len(zeros)
                        for vector in range(begin // _PAIRS, (begin + self._summed) // _PAIRS):
                            place = builder.add(column, self._index(vector * _PAIRS))
                            self._add_products(builder, [line[vector] for line in codes], inputs, place, whole)
                        own_column = builder.add(column, self._index(begin))
                        self._add_scaled(builder, whole, scales, own_column, shift, of_span)
            self._add_span(builder, of_span, ones, first, totals)
        for number, total in enumerate(totals):
            above, row = divmod(number, width)
            place = builder.add(builder.mul(rows, self._index(row)), self._index(above))
            own_bias = self._bias_of(builder, bias, self._index(above), Elements.BFLOAT16)
            found = self._biased(builder, self._total(builder, total), own_bias, Elements.BFLOAT16)
            to = self._at(builder, product, place, self._half)
            builder.store(self._narrowed(builder, found, Elements.BFLOAT16), to)
        builder.ret_void()
        return function

    def _sum_widened(self, builder: ir.IRBuilder, lines: list[Any], inputs: list[Any], column: Any) -> list[Any]:
        """Return the sums of products of `_summed` columns, whole numbers still."""
        whole = [self._all(0)] * (len(lines) * len(inputs))
        if self._summed <= RUN:
            for begin in range(0, self._summed, _PAIRS):
                place = builder.add(column, self._index(begin))
                codes = [self._halves_at(builder, line, place) for line in lines]
                self._add_products(builder, codes, inputs, place, whole)
            return whole
        # As a loop, since LLVM would hold more activations in registers than there are.
        end = builder.add(column, self._index(self._summed))
        with self._sums(builder, column, end, _PAIRS, whole) as (place, sums):
            codes = [self._halves_at(builder, line, place) for line in lines]
            self._add_products(builder, codes, inputs, place, sums)
        return sums

    @property
    def _height(self) -> int:
        """How many rows of the matrix are widened, and multiplied at a time by several rows of activations: where few
        columns are summed up more of them, as each scale serves for few products."""
        return 2 if self._summed > RUN else 4

    @property
    def _summed(self) -> int:
        """How many columns are summed up as whole numbers: a run, or where runs are short two beside each other, each
        in one half of a vector."""
        return max(self._run, RUN if self._bits == 4 else _PAIRS)

    def _offsets(self, builder: ir.IRBuilder, numbers: list[Any], sums: Any, groups: Any) -> list[Any]:
        """Return what codes of 0 add to products: of each row of the matrix, and each of activations, a vector.

        numbers: where each row's scales and offsets begin. sums: where the sums of each row of activations do.
        """
        ir = self._ir
        bits = ir.VectorType(ir.IntType(1), _LANES)
        some_words = self._declared(
            f"llvm.masked.load.v{_LANES}i32.p0", self._words, [self._pointer, self._word, bits, self._words]
        )
        none, upper = self._all(0), self._all(0xFFFF0000)
        order = ir.Constant(self._words, list(range(_LANES)))
        back = self._all_floats(-float(middle_of(self._bits)))
        found = [self._all_floats(0.0)] * (len(numbers) * len(sums))
        with self._sums(builder, self._index(0), groups, _LANES, found) as (group, found):
            left = self._spread(builder, builder.trunc(builder.sub(groups, group), self._word))
            there = builder.icmp_signed("<", order, left)

            def loaded(begin: Any, element: Any) -> Any:
                at = self._at(builder, begin, group, element)
                return builder.call(some_words, [at, self._word(2), there, none])

            totals = [builder.bitcast(loaded(own, self._float), self._vector) for own in sums]
            for above, own in enumerate(numbers):
                pairs = loaded(own, self._word)
                scale = builder.bitcast(builder.shl(pairs, self._all(_BEFORE_UPPER_HALF)), self._vector)
                offset = builder.bitcast(builder.and_(pairs, upper), self._vector)
                lowest = builder.call(self._multiply_add, [scale, back, offset])
                for row, total in enumerate(totals):
                    number = above * len(totals) + row
                    found[number] = builder.call(self._multiply_add, [lowest, total, found[number]])
        return found

    def _add_products(
        self, builder: ir.IRBuilder, codes: list[Any], inputs: list[Any], column: Any, sums: list[Any]
    ) -> None:
        """Add the products of a vector of each row of the matrix and one of each of activations, from a column on."""
        for row, own in enumerate(inputs):
            activations = self._halves_at(builder, own, column)
            for above, vector in enumerate(codes):
                number = above * len(inputs) + row
                sums[number] = builder.add(sums[number], self._products(builder, vector, activations))

    def _add_scaled(
        self, builder: ir.IRBuilder, whole: list[Any], numbers: list[Any], column: Any, shift: Any, sums: list[Any]
    ) -> None:
        """Add sums of whole numbers, each times the scale of its row of the matrix."""
        width = len(whole) // len(numbers)
        for above, own in enumerate(numbers):
            scale = self._scale(builder, own, column, shift)
            for number in range(above * width, (above + 1) * width):
                value = builder.sitofp(whole[number], self._vector)
                sums[number] = builder.call(self._multiply_add, [value, scale, sums[number]])

    def _add_span(self, builder: ir.IRBuilder, sums: list[Any], ones: Any, first: Any, totals: list[Any]) -> None:
        """Add a span's sums, each times what a one of its row of activations stands for."""
        place = builder.sdiv(first, self._index(SPAN))
        for row, own in enumerate(ones):
            one = builder.load(self._at(builder, own, place, self._float), typ=self._float)
            one.align = 2
            stands_for = self._spread(builder, one)
            for number in range(row, len(totals), len(ones)):
                totals[number] = builder.call(self._multiply_add, [sums[number], stands_for, totals[number]])

    def _halves_at(self, builder: ir.IRBuilder, row: Any, column: Any) -> Any:
        """Return a vector of a row of whole numbers of 16 bits."""
        return self._load(builder, self._at(builder, row, column, self._half), self._halves)

    def _scale(self, builder: ir.IRBuilder, numbers: Any, column: Any, shift: Any) -> Any:
        """Return the scale of `_summed` columns from one on as a vector, or those of two runs."""

        def scale_at(place: Any) -> Any:
            word = builder.load(self._at(builder, numbers, builder.ashr(place, shift), self._word), typ=self._word)
            word.align = 2
            return self._spread(builder, word)

        words = scale_at(column)
        if self._run < self._summed:
            other = scale_at(builder.add(column, self._index(self._run)))
            order = list(range(_LANES // 2)) + list(range(_LANES + _LANES // 2, 2 * _LANES))
            words = builder.shuffle_vector(words, other, self._ir.Constant(self._words, order))
        return builder.bitcast(builder.shl(words, self._all(_BEFORE_UPPER_HALF)), self._vector)

    def _unpacked(self, builder: ir.IRBuilder, line: Any, column: Any, stride: Any) -> list[Any]:
        """Return a step's codes of a row as whole numbers of 16 bits, a vector for each `_PAIRS` columns.

        Of 4 bits the even ones of `RUN` columns, the odd ones, and the same of the next columns.
        """
        place = builder.ashr(column, self._index(1)) if self._bits == 4 else column
        found, size = [], self._step * self._bits // 8
        for begin in range(0, size, _CACHE_LINE):
            self._bring(builder, line, builder.add(place, self._index(begin)), stride, self._byte)
        for begin in range(0, size, RUN):
            at = self._at(builder, line, builder.add(place, self._index(begin)), self._byte)
            if self._bits == 8:
                kind = self._ir.VectorType(self._byte, _PAIRS)
                for half in range(2):
                    behind = self._at(builder, at, self._index(half * _PAIRS), self._byte)
                    found.append(builder.zext(self._load(builder, behind, kind), self._halves))
                continue
            both = builder.bitcast(self._load(builder, at, self._bytes), self._halves)
            for shift in (0, 8, 4, 12):
                moved = builder.lshr(both, self._ir.Constant(self._halves, [shift] * _PAIRS)) if shift else both
                low = self._ir.Constant(self._halves, [15] * _PAIRS)
                found.append(moved if shift == 12 else builder.and_(moved, low))
        return found

    def _products(self, builder: ir.IRBuilder, codes: Any, activations: Any) -> Any:
        """Return the products of two vectors of whole numbers of 16 bits, neighbours summed up."""
        if native.multiplies_pairs():
            multiply = self._declared("llvm.x86.avx2.pmadd.wd", self._words, [self._halves] * 2)
            return builder.call(multiply, [codes, activations])
        wide = self._ir.VectorType(self._word, _PAIRS)
        products = builder.mul(builder.sext(codes, wide), builder.sext(activations, wide))
        undefined = self._ir.Constant(wide, self._ir.Undefined)
        order = [self._ir.Constant(self._words, list(range(odd, _PAIRS, 2))) for odd in range(2)]
        even, odd = (builder.shuffle_vector(products, undefined, one) for one in order)
        return builder.add(even, odd)
