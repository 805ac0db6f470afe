"""The kernel between an attention's projection and its scores, in LLVM's language: norms, RoPE and the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.kernel_writer import Elements
from shard_worker.cpu_kernels.norm_kernel import NormWriter

if TYPE_CHECKING:
    from llvmlite import ir


def heads_module(elements: Elements, lanes: int, name: str, *, normed: bool) -> ir.Module:
    """Return the module with the kernel, by which each thread finishes some rows' heads of queries and of keys, and
    stores values.

    elements: of all but norms' weights. lanes: how many float32 a vector has; they divide the elements of a head that
    do not turn, and half of those that do. normed: whether heads are normed before they turn.

    The kernel's arguments: the addresses of the projected rows, of norms' weights, of cosines, of sines, of the
    queries, of the keys, of the values, and of the norms' epsilon; how many rows there are, and how many elements lie
    from one to the next; how many heads queries have, how many keys have, and which head of a row is that of the first
    values; how many elements a head has, and how many of them turn, the first ones; and how many elements lie from one
    head of keys to the next, and from one row of them to the next, which values are like. Weights are those of queries'
    heads and of keys', and they and epsilon are float32; cosines and sines are those of each row's elements that turn,
    the sines of the first half negative. Weights, cosines, sines and queries have no gaps.
    """
    return _HeadsWriter(lanes).finishing(elements, name, normed=normed)


class _HeadsWriter(NormWriter):
    """Writes the kernel."""

    def finishing(self, elements: Elements, name: str, *, normed: bool) -> ir.Module:
        """Return the module, as `heads_module` does."""
        builder, addresses, others = self._kernel(name, 8, 9)
        projected, weights, cosines, sines, queries, keys, values, epsilon = addresses
        count, stride, heads, kv_heads, first_value, size, turning, key_head, key_step = others
        stored, (thread, threads) = self._types[elements], self._threads(builder)
        finished = builder.add(heads, kv_heads)
        with self._loop(builder, thread, builder.mul(count, finished), threads) as number:
            row, head = builder.sdiv(number, finished), builder.srem(number, finished)
            own_row = self._at(builder, projected, builder.mul(row, stride), stored)
            own = self._at(builder, own_row, builder.mul(head, size), stored)
            key = builder.sub(head, heads)
            is_key = builder.icmp_signed(">=", key, self._index(0))
            kept = builder.add(builder.mul(key, key_head), builder.mul(row, key_step))
            query = builder.mul(builder.add(builder.mul(row, heads), head), size)
            to_key, to_query = self._at(builder, keys, kept, stored), self._at(builder, queries, query, stored)
            to = builder.select(is_key, to_key, to_query)
            weight = factors = None
            if normed:
                weight = self._at(builder, weights, builder.mul(head, size), self._float)
                factors = self._factors(builder, own, size, epsilon, elements)

            def seen(place: Any, of: tuple[Any, Any, Any] = (own, weight, factors)) -> Any:
                """Return elements of the head from a place on, as float32: normed, and rounded as they would be if that
                were done by itself."""
                head, weight, factors = of
                found = self._load_floats(builder, self._at(builder, head, place, stored), elements)
                if weight is None:
                    return found
                scale = self._load(builder, self._at(builder, weight, place, self._float), self._vector)
                found = builder.fmul(builder.fmul(found, factors), scale)
                return self._widened(builder, self._narrowed(builder, found, elements), elements)

            before = builder.mul(row, turning)
            tables = tuple(self._at(builder, table, before, stored) for table in (cosines, sines))
            half = builder.ashr(turning, self._index(1))
            with self._loop(builder, self._index(0), half, self._lanes) as place:
                other = builder.add(place, half)
                both = seen(place), seen(other)
                for at, mine, others_own in ((place, *both), (other, *reversed(both))):
                    cosine, sine = (
                        self._load_floats(builder, self._at(builder, table, at, stored), elements) for table in tables
                    )
                    turned = builder.call(self._multiply_add, [others_own, sine, builder.fmul(mine, cosine)])
                    self._store_floats(builder, turned, self._at(builder, to, at, stored), elements)
            with self._loop(builder, turning, size, self._lanes) as place:
                self._store_floats(builder, seen(place), self._at(builder, to, place, stored), elements)
            with builder.if_then(is_key):
                value = self._at(builder, own_row, builder.mul(builder.add(first_value, key), size), stored)
                to_value = self._at(builder, values, kept, stored)
                with self._loop(builder, self._index(0), size, self._lanes) as place:
                    loaded = self._load(builder, self._at(builder, value, place, stored), self._vector_of(elements))
                    self._store(builder, loaded, self._at(builder, to_value, place, stored))
        builder.ret_void()
        return self._module
