"""The kernel of root-mean-square normalisation, in LLVM's language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_worker.cpu_kernels.kernel_writer import Elements, KernelWriter

if TYPE_CHECKING:
    from llvmlite import ir


def norm_module(elements: Elements, lanes: int, name: str) -> ir.Module:
    """Return the module with the kernel, by which each thread norms some of the rows.

    elements: of the rows and of what they become. lanes: how many float32 a vector has; they divide a row.

    The kernel's arguments: the addresses of the rows, of their weights, of what they become, and of epsilon; how many
    steps there are, and how many elements lie from one to the next; how many rows without gaps a step has, and how many
    elements a row; and how many rows of weights there are, which belong to the rows of a step in turn. Weights and
    epsilon are float32, weights and results have no gaps.
    """
    return NormWriter(lanes).module(elements, name)


class NormWriter(KernelWriter):
    """Writes the kernel."""

    def module(self, elements: Elements, name: str) -> ir.Module:
        """Return the module, as `norm_module` does."""
        builder, (rows, weights, results, epsilon), others = self._kernel(name, 4, 5)
        steps, stride, count, size, weight_rows = others
        thread, threads = self._threads(builder)
        stored = self._types[elements]
        with self._loop(builder, thread, builder.mul(steps, count), threads) as row:
            step, within = builder.sdiv(row, count), builder.srem(row, count)
            offset = builder.add(builder.mul(step, stride), builder.mul(within, size))
            own = self._at(builder, rows, offset, stored)
            to = self._at(builder, results, builder.mul(row, size), stored)
            weight = self._at(builder, weights, builder.mul(builder.srem(within, weight_rows), size), self._float)
            factors = self._factors(builder, own, size, epsilon, elements)
            with self._loop(builder, self._index(0), size, self._lanes) as place:
                seen = self._load_floats(builder, self._at(builder, own, place, stored), elements)
                scale = self._load(builder, self._at(builder, weight, place, self._float), self._vector)
                normed = builder.fmul(builder.fmul(seen, factors), scale)
                self._store_floats(builder, normed, self._at(builder, to, place, stored), elements)
        builder.ret_void()
        return self._module

    def _factors(self, builder: ir.IRBuilder, row: Any, size: Any, epsilon: Any, elements: Elements) -> Any:
        """Return the vector of what a row of so many elements is multiplied by. epsilon: where it lies."""
        root = self._declared("llvm.sqrt.f32", self._float, [self._float])
        stored, zeros = self._types[elements], [self._all_floats(0.0)]
        with self._sums(builder, self._index(0), size, self._lanes, zeros) as (place, squares):
            seen = self._load_floats(builder, self._at(builder, row, place, stored), elements)
            squares[0] = builder.call(self._multiply_add, [seen, seen, squares[0]])
        mean = builder.fdiv(self._total(builder, squares[0]), builder.sitofp(size, self._float))
        least = builder.load(epsilon, typ=self._float)
        return self._spread(builder, builder.fdiv(self._float(1.0), builder.call(root, [builder.fadd(mean, least)])))
