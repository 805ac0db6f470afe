"""Packed matrices that are still where they are stored: their rows are read when they are brought to another form.

So no more of a matrix than some of its rows is in memory twice, and each byte of it is changed while it is in a CPU's
caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from shard_worker.weights.packed import PackedWeight, prepared
from shard_worker.weights.weight import StackedWeight, Weight, concatenate, runs_of_parts


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one stored matrix. count: how many. read: returns some of them, at a run of rows or at the indices int64
    [n], on the device where they are to be; it raises DataLoss for contents that cannot be."""

    count: int
    read: Callable[[slice | torch.Tensor], PackedWeight]

    def select(self, rows: slice | torch.Tensor) -> StoredRows:
        """Return some of them: a run, or those at the indices int64 [n]."""
        chosen = torch.arange(self.count)[rows.cpu() if isinstance(rows, torch.Tensor) else rows]
        if isinstance(rows, torch.Tensor) or len(chosen) == 0:
            return StoredRows(len(chosen), lambda own: self.read(chosen[own]))
        first = int(chosen[0])

        def read(own: slice | torch.Tensor) -> PackedWeight:
            if isinstance(own, torch.Tensor):
                return self.read(chosen[own])
            begin, end, _ = own.indices(len(chosen))
            return self.read(slice(first + begin, first + end))

        return StoredRows(len(chosen), read)


class UnreadWeight(Weight):
    """A matrix [rows, columns] to be read, of rows of one or several stored ones.

    sources: the stored ones, one below the other, read in one form. kind: equal for those whose rows can stand in one
    matrix.
    """

    __slots__ = ("__dict__", "columns", "device", "dtype", "kind", "rows", "sources")

    def __init__(
        self,
        sources: Sequence[StoredRows],
        columns: int,
        kind: Hashable,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the activations that it takes and gives. device: where it will be."""
        self.sources, self.columns, self.kind = tuple(sources), columns, kind
        self.rows, self.dtype, self.device = sum(source.count for source in sources), dtype, device

    @property
    def nbytes(self) -> int:
        """Memory that it will take, in bytes."""
        return self.rows * self.form.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a packed matrix has no dense form")

    @functools.cached_property
    def form(self) -> PackedWeight:
        """As of `PackedRows`."""
        return self.part(slice(0, 1))

    def part(self, rows: slice) -> PackedWeight:
        """As of `PackedRows`."""
        whole = concatenate([source.read(own) for source, own in self._of_each(rows)])
        assert isinstance(whole, PackedWeight)
        return whole

    def _of_each(self, rows: slice) -> list[tuple[StoredRows, slice]]:
        """Return the sources that a run of rows is of, and which of the rows of each."""
        runs = runs_of_parts(rows, [source.count for source in self.sources])
        return [(self.sources[index], own) for index, own in runs]

    @property
    def unsigned_bits(self) -> int | None:
        """As of `PackedRows`."""
        return self.form.unsigned_bits

    @property
    def group(self) -> int:
        """As of `PackedRows`."""
        return self.form.group

    def whole(self) -> PackedWeight:
        """Return the matrix in memory, packed."""
        return self.part(slice(None))

    def prepared(self, *, unpacked: bool = True) -> Weight:
        return prepared(self, unpacked=unpacked) or self.whole()

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        raise TypeError("a matrix that is not read yet is not multiplied by: ask for it `prepared` or `whole`")

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        raise TypeError("a matrix that is not read yet has no rows to look up: ask for it `whole`")

    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        if len(self.sources) == 1:
            return self._of([self.sources[0].select(rows)])
        if isinstance(rows, torch.Tensor):
            return self.whole().select_rows(rows)
        return self._of([source.select(own) for source, own in self._of_each(rows)])

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        """As `Weight.concatenated`; matrices of unlike forms stay beside each other."""
        alike = [other for other in others if isinstance(other, UnreadWeight) and other.kind == self.kind]
        if len(alike) < len(others):
            return StackedWeight((self, *others))
        return self._of([source for one in (self, *alike) for source in one.sources])

    def _of(self, sources: Sequence[StoredRows]) -> UnreadWeight:
        return UnreadWeight(sources, self.columns, self.kind, dtype=self.dtype, device=self.device)


def in_memory(weight: Weight) -> Weight:
    """Return a matrix in memory, as it is stored, that may be one to be read."""
    return weight.whole() if isinstance(weight, UnreadWeight) else weight
