"""What all kernels for CPUs are written with: functions, loops and vectors in LLVM's language."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from shard_worker.cpu_kernels.native import THREAD_COUNT, THREAD_NUMBER

if TYPE_CHECKING:
    from llvmlite import ir

BLOCK = 8
"""How many of a matrix's rows are multiplied by all rows of activations before the next ones are read. A thread's share
is made of such blocks."""

_AHEAD = 2
"""How many blocks ahead a matrix is brought into the caches: short rows end before a CPU's own prefetching begins."""

_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""The polynomial of `exp(r) = 1 + r + r² p(r)` for |r| <= ln(2) / 2, highest power first (Cephes, `expf`)."""

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""The logarithm of 2 as the sum of two float32, of which the first times a small whole number is exact."""

_LEAST_EXPONENT = -87.0
"""What is less than this has an exponential of 0: it would be no normal float32."""


class Elements(Enum):
    """What tensors are made of that kernels read and write."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


ELEMENTS = {torch.float32: Elements.FLOAT32, torch.bfloat16: Elements.BFLOAT16, torch.float16: Elements.FLOAT16}
"""By torch's dtypes."""


class KernelWriter:
    """Writes a module of one kernel. lanes: how many float32 its vectors have."""

    def __init__(self, lanes: int) -> None:
        from llvmlite import ir

        self._ir, self._lanes, self._module = ir, lanes, ir.Module()
        self._index, self._pointer, self._float = ir.IntType(64), ir.PointerType(), ir.FloatType()
        self._word, self._vector = ir.IntType(32), ir.VectorType(self._float, lanes)
        self._words = ir.VectorType(self._word, lanes)
        self._multiply_add = self._declared(f"llvm.fma.v{lanes}f32", self._vector, [self._vector] * 3)
        self._sum = self._declared(f"llvm.vector.reduce.fadd.v{lanes}f32", self._float, [self._float, self._vector])
        self._round = self._declared(f"llvm.roundeven.v{lanes}f32", self._vector, [self._vector])
        kinds = [self._pointer] + [self._word] * 3
        self._prefetch = self._declared("llvm.prefetch.p0", ir.VoidType(), kinds)
        halves = {Elements.FLOAT32: self._float, Elements.FLOAT16: ir.HalfType(), Elements.BFLOAT16: ir.IntType(16)}
        self._types: dict[Elements, Any] = halves

    # --- functions
    def _declared(self, name: str, result: Any, kinds: Sequence[Any]) -> ir.Function:
        """Return a function that is not the module's own."""
        declared = self._module.globals.get(name)
        return declared or self._ir.Function(self._module, self._ir.FunctionType(result, kinds), name)

    def _function(self, name: str, kinds: Sequence[Any]) -> ir.Function:
        return self._ir.Function(self._module, self._ir.FunctionType(self._ir.VoidType(), kinds), name)

    def _kernel(self, name: str, addresses: int, numbers: int) -> tuple[ir.IRBuilder, list[Any], list[Any]]:
        """Begin the kernel, and return what it is told: so many addresses, and behind them so many numbers."""
        kernel = self._function(name, [self._pointer])
        builder = self._ir.IRBuilder(kernel.append_basic_block())
        places = [self._index(number) for number in range(addresses + numbers)]
        at = [self._at(builder, kernel.args[0], place, self._index) for place in places]
        loaded = [builder.load(place, typ=self._index) for place in at]
        return builder, [builder.inttoptr(one, self._pointer) for one in loaded[:addresses]], loaded[addresses:]

    def _threads(self, builder: ir.IRBuilder) -> list[Any]:
        """Return the number of the thread, from 0 on, and how many there are."""
        functions = (self._declared(name, self._word, []) for name in (THREAD_NUMBER, THREAD_COUNT))
        return [builder.sext(builder.call(function, []), self._index) for function in functions]

    # --- loops
    @contextlib.contextmanager
    def _blocks(self, builder: ir.IRBuilder, rows: Any) -> Iterator[Any]:
        """Write what is done for every block of the thread's share of a matrix of so many rows, by its first row."""
        thread, threads = self._threads(builder)
        # The last block reaches back into the one before it, to have all its rows: they come out the same again.
        blocks = builder.sdiv(builder.add(rows, self._index(BLOCK - 1)), self._index(BLOCK))
        share = builder.sdiv(builder.add(blocks, builder.sub(threads, self._index(1))), threads)
        first = builder.mul(thread, share)
        end = self._least(builder, builder.add(first, share), blocks)
        with self._loop(builder, first, end, 1) as block:
            last = builder.sub(rows, self._index(BLOCK))
            yield self._least(builder, builder.mul(block, self._index(BLOCK)), last)

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

    @contextlib.contextmanager
    def _sums(
        self, builder: ir.IRBuilder, first: Any, end: Any, step: int, values: list[Any]
    ) -> Iterator[tuple[Any, list[Any]]]:
        """As `_loop`, where there is at least one index, with values in registers that every turn changes in the list
        that it is given; behind the loop the list has what the last turn left there."""
        before, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(self._index)
        index.add_incoming(first, before)
        begun = [builder.phi(value.type) for value in values]
        for phi, value in zip(begun, values, strict=True):
            phi.add_incoming(value, before)
        changed = [*begun]
        yield index, changed
        for phi, value in zip(begun, changed, strict=True):
            phi.add_incoming(value, builder.block)
        following = builder.add(index, self._index(step))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), body, done)
        builder.position_at_end(done)

    # --- numbers, vectors and addresses
    def _all(self, number: int) -> Any:
        return self._ir.Constant(self._words, [number] * self._lanes)

    def _all_floats(self, number: float) -> Any:
        return self._ir.Constant(self._vector, [number] * self._lanes)

    def _spread(self, builder: ir.IRBuilder, number: Any) -> Any:
        """Return a vector of one number, a float32 or a whole one."""
        undefined = self._ir.Constant(self._ir.VectorType(number.type, self._lanes), self._ir.Undefined)
        return builder.shuffle_vector(builder.insert_element(undefined, number, self._word(0)), undefined, self._all(0))

    def _total(self, builder: ir.IRBuilder, vector: Any) -> Any:
        """Return the sum of a vector of float32."""
        return builder.call(self._sum, [self._ir.Constant(self._float, -0.0), vector], fastmath=("reassoc",))

    def _exp(self, builder: ir.IRBuilder, x: Any) -> Any:
        """Return the exponentials of numbers that are not positive."""
        all_of = self._all_floats
        power = builder.call(self._round, [builder.fmul(x, all_of(1 / math.log(2)))])
        rest = builder.call(self._multiply_add, [power, all_of(-_LN2_HIGH), x])
        rest = builder.call(self._multiply_add, [power, all_of(-_LN2_LOW), rest])
        made = all_of(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            made = builder.call(self._multiply_add, [made, rest, all_of(term)])
        made = builder.call(self._multiply_add, [builder.fmul(made, rest), rest, rest])
        made = builder.fadd(made, all_of(1.0))
        exponent = builder.shl(builder.add(builder.fptosi(power, self._words), self._all(127)), self._all(23))
        made = builder.fmul(made, builder.bitcast(exponent, self._vector))
        return builder.select(builder.fcmp_ordered("<", x, all_of(_LEAST_EXPONENT)), all_of(0.0), made)

    def _load_floats(self, builder: ir.IRBuilder, pointer: Any, elements: Elements) -> Any:
        """Load a vector of elements as float32."""
        return self._widened(builder, self._load(builder, pointer, self._vector_of(elements)), elements)

    def _store_floats(self, builder: ir.IRBuilder, vector: Any, pointer: Any, elements: Elements) -> None:
        """Store a vector of float32 as elements, rounded to the nearest."""
        self._store(builder, self._narrowed(builder, vector, elements), pointer)

    def _widened(self, builder: ir.IRBuilder, stored: Any, elements: Elements) -> Any:
        """Return elements as float32: one of them, or a vector."""
        wide, words = self._like(stored, self._float), self._like(stored, self._word)
        if elements is Elements.FLOAT32:
            return stored
        if elements is Elements.FLOAT16:
            return builder.fpext(stored, wide)
        # A bfloat16 is the upper half of a float32.
        return builder.bitcast(builder.shl(builder.zext(stored, words), self._number(words, 16)), wide)

    def _narrowed(self, builder: ir.IRBuilder, wide: Any, elements: Elements) -> Any:
        """Return float32 as elements, rounded to the nearest: one number, or a vector."""
        if elements is Elements.FLOAT32:
            return wide
        stored, words = self._like(wide, self._types[elements]), self._like(wide, self._word)
        if elements is Elements.FLOAT16:
            return builder.fptrunc(wide, stored)

        def all_of(number: int) -> Any:
            return self._number(words, number)

        bits = builder.bitcast(wide, words)
        # Half of the last bit that stays is added, a little less where that bit is 0: what lies halfway becomes even.
        last = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
        rounded = builder.lshr(builder.add(builder.add(bits, all_of(0x7FFF)), last), all_of(16))
        is_number = builder.fcmp_ordered("ord", wide, wide)
        return builder.trunc(builder.select(is_number, rounded, all_of(0x7FC0)), stored)

    def _vector_of(self, elements: Elements) -> Any:
        return self._ir.VectorType(self._types[elements], self._lanes)

    def _like(self, value: Any, kind: Any) -> Any:
        """Return a kind of number, or a vector of as many of them as a value has."""
        return self._ir.VectorType(kind, value.type.count) if isinstance(value.type, self._ir.VectorType) else kind

    def _number(self, kind: Any, number: int) -> Any:
        """Return a number as a constant, or a vector of it."""
        return self._ir.Constant(kind, [number] * kind.count if isinstance(kind, self._ir.VectorType) else number)

    def _bias_of(self, builder: ir.IRBuilder, bias: Any, row: Any, elements: Elements) -> Any:
        """Return the address of what is added to a row's products; where there is no bias, whose address is 0, that
        too."""
        own = self._at(builder, bias, row, self._types[elements])
        return builder.select(self._is_null(builder, bias), bias, own)

    def _biased(self, builder: ir.IRBuilder, number: Any, bias: Any, elements: Elements) -> Any:
        """Return a number with the element added that is at an address, where that is not 0."""
        before = builder.block
        with builder.if_then(builder.not_(self._is_null(builder, bias))):
            own = builder.load(bias, typ=self._types[elements])
            sum_of_both, inside = builder.fadd(number, self._widened(builder, own, elements)), builder.block
        found = builder.phi(self._float)
        found.add_incoming(number, before)
        found.add_incoming(sum_of_both, inside)
        return found

    def _is_null(self, builder: ir.IRBuilder, address: Any) -> Any:
        return builder.icmp_unsigned("==", builder.ptrtoint(address, self._index), self._index(0))

    def _load(self, builder: ir.IRBuilder, pointer: Any, kind: Any) -> Any:
        """Load a vector that lies anywhere."""
        loaded = builder.load(pointer, typ=kind)
        loaded.align = 1
        return loaded

    def _store(self, builder: ir.IRBuilder, vector: Any, pointer: Any) -> None:
        """Store a vector anywhere."""
        builder.store(vector, pointer).align = 1

    def _at(self, builder: ir.IRBuilder, pointer: Any, index: Any, element: Any) -> Any:
        """Return the address of an element."""
        return builder.gep(pointer, [index], source_etype=element)

    def _rows_of(self, builder: ir.IRBuilder, pointer: Any, distance: Any, element: Any, count: int) -> list[Any]:
        """Return where rows begin that lie so far apart."""
        return [self._at(builder, pointer, builder.mul(distance, self._index(row)), element) for row in range(count)]

    def _least(self, builder: ir.IRBuilder, one: Any, other: Any) -> Any:
        return builder.select(builder.icmp_signed("<", one, other), one, other)

    def _bring(self, builder: ir.IRBuilder, row: Any, place: Any, distance: Any, element: Any) -> None:
        """Have brought into the caches what lies so far, times `BLOCK` and some, behind an element of a row; beyond the
        end of memory it does nothing."""
        ahead = builder.mul(distance, self._index(_AHEAD * BLOCK))
        address = self._at(builder, row, builder.add(place, ahead), element)
        # To be read, soon and again.
        builder.call(self._prefetch, [address, *(self._word(hint) for hint in (0, 3, 1))])
