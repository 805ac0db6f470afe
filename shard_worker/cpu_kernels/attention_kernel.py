"""The kernel of attention over cached keys and values, in LLVM's language."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.kernel_writer import BLOCK, Elements
from shard_worker.cpu_kernels.product_kernel import ProductWriter

if TYPE_CHECKING:
    from llvmlite import ir

ROWS = 4
"""How many queries of a head read its keys and values at a time, at most."""

_HEIGHTS = {4: 2, 2: 4, 1: BLOCK}
"""How many keys so many queries are multiplied by at a time."""

_SUMS = 8
"""How many vectors of sums are in registers while values are summed up."""


def attention_module(elements: Elements, lanes: int, head_dim: int, group: int, name: str) -> ir.Module:
    """Return the module with the kernel, by which each thread takes some of the heads of keys of some rows.

    elements: of queries, keys, values and results, 16-bit floats. lanes: how many float32 a vector has; they divide
    head_dim. group: how many queries each head of keys has.

    The kernel's arguments: the addresses of keys, values, queries, results and scores; how many heads keys have, how
    many rows there are, how many positions there are for the first of them, each later row having one more, and how
    many of its last positions a row sees at most; the elements from one head of keys to the next, and from one position
    to the next, and the same of values; and the float32 from one line of scores to the next. Queries [rows, heads of
    keys, group, head_dim] and results like them have no gaps. Scores are float32 and have `ROWS` lines for each thread.
    """
    return _AttentionWriter(elements, lanes, head_dim, group).module(name)


class _AttentionWriter(ProductWriter):
    """Writes the kernel for heads of one size."""

    def __init__(self, elements: Elements, lanes: int, head_dim: int, group: int) -> None:
        super().__init__(elements, lanes)
        self._head_dim, self._group = head_dim, group
        self._larger = self._declared(f"llvm.maxnum.v{lanes}f32", self._vector, [self._vector] * 2)
        self._largest = self._declared(f"llvm.vector.reduce.fmax.v{lanes}f32", self._float, [self._vector])

    def module(self, name: str) -> ir.Module:
        """Return the module, as `attention_module` does."""
        builder, (keys, values, queries, results, scores), others = self._kernel(name, 5, 9)
        heads, rows, positions, window, key_head, key_step, value_head, value_step, line = others
        thread, threads = self._threads(builder)
        own_scores = self._at(builder, scores, builder.mul(thread, builder.mul(line, self._index(ROWS))), self._float)
        functions: dict[int, ir.Function] = {}
        scale = self._scale()
        scaled = builder.alloca(self._float, self._index(self._group * self._head_dim))
        scaled.align = 64
        with self._loop(builder, thread, builder.mul(rows, heads), threads) as number:
            row, head = builder.sdiv(number, heads), builder.srem(number, heads)
            first = builder.mul(number, self._index(self._group * self._head_dim))
            builder.call(scale, [self._at(builder, queries, first, self._stored), scaled])
            end = builder.add(positions, row)
            span = self._least(builder, end, window)
            begin = builder.sub(end, span)
            from_key = builder.add(builder.mul(head, key_head), builder.mul(begin, key_step))
            from_value = builder.add(builder.mul(head, value_head), builder.mul(begin, value_step))
            own_keys = self._at(builder, keys, from_key, self._stored)
            own_values = self._at(builder, values, from_value, self._stored)
            done = 0
            while done < self._group:
                width = next(width for width in _HEIGHTS if width <= self._group - done)
                if width not in functions:
                    functions[width] = self._rows(width)
                before = self._index(done * self._head_dim)
                own_queries = self._at(builder, scaled, before, self._float)
                to = self._at(builder, results, builder.add(first, before), self._stored)
                arguments = [own_keys, key_step, own_values, value_step, own_queries, to, own_scores, line, span]
                builder.call(functions[width], arguments)
                done += width
        builder.ret_void()
        return self._module

    def _scale(self) -> ir.Function:
        """Return the function that writes a head's queries as float32, divided by the square root of their size. Its
        arguments: where they begin, and where results go."""
        function = self._function("scale", [self._pointer, self._pointer])
        queries, scaled = function.args
        builder, scale = self._ir.IRBuilder(function.append_basic_block()), self._all_floats(self._head_dim**-0.5)
        with self._loop(builder, self._index(0), self._index(self._group * self._head_dim), self._lanes) as place:
            query = self._load_floats(builder, self._at(builder, queries, place, self._stored), self._elements)
            self._store(builder, builder.fmul(query, scale), self._at(builder, scaled, place, self._float))
        builder.ret_void()
        return function

    def _rows(self, width: int) -> ir.Function:
        """Return the function that makes the results of `width` queries of a head.

        Its arguments: where the head's keys begin and the distance between them, the same of its values, the queries,
        where results go, memory for scores and the distance between its lines, and how many keys there are.
        """
        pointer, index = self._pointer, self._index
        kinds = [pointer, index, pointer, index, pointer, pointer, pointer, index, index]
        function = self._function(f"rows_{width}", kinds)
        keys, key_step, values, value_step, queries, results, scores, line, span = function.args
        builder = self._ir.IRBuilder(function.append_basic_block())
        self._score(builder, width, (keys, key_step, queries, scores, line, span))
        lines = self._rows_of(builder, scores, line, self._float, width)
        totals = [self._softmax(builder, one, span) for one in lines]
        self._sum_values(builder, (values, value_step, results, span), lines, totals)
        builder.ret_void()
        return function

    def _score(self, builder: ir.IRBuilder, width: int, where: tuple[Any, ...]) -> None:
        """Write the products of queries with all keys: a line of scores for each query."""
        keys, key_step, queries, scores, line, span = where
        height, zero = _HEIGHTS[width], self._index(0)
        tile = self._tile(self._elements, width, height)
        last, none = builder.sub(span, self._index(height)), self._ir.Constant(self._pointer, None)

        def at(key: Any) -> None:
            own = self._at(builder, keys, builder.mul(key, key_step), self._stored)
            to = self._at(builder, scores, key, self._float)
            builder.call(tile, [own, key_step, queries, self._index(self._head_dim), to, line, none])

        with self._loop(builder, zero, last, height) as key:
            at(key)
        # The last keys, some of which may have been taken before.
        at(last)

    def _put(self, builder: ir.IRBuilder, total: Any, product: Any, place: Any, bias: Any) -> None:
        """Write a score, which stays float32."""
        builder.store(total, self._at(builder, product, place, self._float))

    def _softmax(self, builder: ir.IRBuilder, scores: Any, span: Any) -> Any:
        """Write exponentials in place of a query's scores, and return their sum. A line has room for whole vectors:
        behind the scores zeros are written."""
        ir, zero = self._ir, self._index(0)
        hidden = self._all_floats(-math.inf)
        numbers = ir.Constant(self._words, list(range(self._lanes)))
        count = self._spread(builder, builder.trunc(span, self._word))
        with self._sums(builder, zero, span, self._lanes, [hidden]) as (position, top):
            place = self._at(builder, scores, position, self._float)
            numbered = builder.add(self._spread(builder, builder.trunc(position, self._word)), numbers)
            is_score = builder.icmp_signed("<", numbered, count)
            shown = builder.select(is_score, self._load(builder, place, self._vector), hidden)
            self._store(builder, shown, place)
            top[0] = builder.call(self._larger, [top[0], shown])
        largest = self._spread(builder, builder.call(self._largest, top))
        with self._sums(builder, zero, span, self._lanes, [self._all_floats(0.0)]) as (position, total):
            place = self._at(builder, scores, position, self._float)
            made = self._exp(builder, builder.fsub(self._load(builder, place, self._vector), largest))
            self._store(builder, made, place)
            total[0] = builder.fadd(total[0], made)
        return self._total(builder, total[0])

    def _sum_values(self, builder: ir.IRBuilder, where: tuple[Any, ...], lines: list[Any], totals: list[Any]) -> None:
        """Write for each query the sum of all values, each times what has become of its score, over their total.

        lines: where these are, of each query. totals: of each query their sum.
        """
        values, value_step, results, span = where
        width, vectors = len(totals), self._head_dim // self._lanes
        at_once = next(some for some in range(_SUMS // width, 0, -1) if vectors % some == 0)
        zeros = [self._all_floats(0.0)] * (width * at_once)
        for first in range(0, vectors, at_once):
            places = [self._index(number * self._lanes) for number in range(first, first + at_once)]
            with self._sums(builder, self._index(0), span, 1, zeros) as (position, sums):
                value = self._at(builder, values, builder.mul(position, value_step), self._stored)
                self._bring(builder, value, places[0], value_step, self._stored)
                at = [self._at(builder, value, place, self._stored) for place in places]
                loaded = [self._load_floats(builder, one, self._elements) for one in at]
                for row, own in enumerate(lines):
                    score = builder.load(self._at(builder, own, position, self._float), typ=self._float)
                    share = self._spread(builder, score)
                    for number, one in enumerate(loaded, row * at_once):
                        sums[number] = builder.call(self._multiply_add, [share, one, sums[number]])
            for number, total in enumerate(sums):
                row, vector = divmod(number, at_once)
                whole = builder.fdiv(total, self._spread(builder, totals[row]))
                to = builder.add(self._index(row * self._head_dim), places[vector])
                self._store_floats(builder, whole, self._at(builder, results, to, self._stored), self._elements)
