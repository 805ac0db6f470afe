"""A matrix that rows of activations are multiplied by, whatever form it is held in.

Layers only use what `Weight` offers, so that a packed form can take a dense one's place.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from shard_worker.cpu_kernels import native
from shard_worker.cpu_kernels.products import Product

_WIDENED_FROM = 4
"""From so many rows on a matrix is widened where `multiplied_dtype` says so; fewer rows read it as it is."""

_WIDENED_IN_MEMORY_FROM = 64
"""The same, where fewer rows are multiplied by a kernel that widens it in registers."""

_WIDENED_AT_A_TIME = 1 << 20
"""How many elements are widened at a time: few enough for a CPU's caches, and enough for all its threads."""

BLOCKED_FOR = 16
"""The number of rows that oneDNN's blocks are chosen for; all other numbers of rows take them too."""


def rows_at_a_time(columns: int, device: torch.device) -> int:
    """Return how many rows of a matrix are brought to another form at a time on a device: on a CPU so many that what is
    made of them on the way stays within its caches."""
    return max(1, (1 << 18 if device.type == "cpu" else 1 << 24) // columns)


def multiplied_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the element type that a device multiplies several rows by, of a dense matrix of another one maybe: float32
    for 16 bits on a CPU that has no instructions for them, where torch takes four to eight times as long."""
    if (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float16)
        and _has_onednn()
        and not native.multiplies(dtype)
    ):
        return torch.float32
    return dtype


def _has_onednn() -> bool:
    """Return whether this build of torch multiplies by oneDNN on CPUs."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def multiply_dense(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [n, columns] times the transposed matrix [rows, columns], plus bias [rows]: [n, rows].

    Where `multiplied_dtype` is a wider type, some of the matrix's rows are widened at a time; results are rounded once.
    """
    wide = multiplied_dtype(x.dtype, x.device)
    if wide is x.dtype or len(x) < _WIDENED_FROM:
        return F.linear(x, matrix, bias)
    product = x.new_empty(len(x), len(matrix))
    widened, wide_bias = _padded(x.to(wide), _multiplied_rows(len(x))), None if bias is None else bias.to(wide)
    step = max(1, _WIDENED_AT_A_TIME // matrix.shape[1])
    for first in range(0, len(matrix), step):
        part = slice(first, first + step)
        added = None if wide_bias is None else wide_bias[part]
        # torch's own product of eight rows takes three times as long as oneDNN's.
        made = torch.ops.mkldnn._linear_pointwise(widened, matrix[part].to(wide), added, "none", [], "")
        product[:, part] = made[: len(x)]
    return product


class RowLookup(Protocol):
    """A matrix whose rows are looked up, as those of an embedding are."""

    @property
    def device(self) -> torch.device:
        """Where the rows come from."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        """As `Weight.lookup`."""


class Weight(abc.ABC):
    """A matrix [rows, columns]. dtype: of the activations that it takes and gives. device: where it is."""

    __slots__ = ()

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""

    @property
    @abc.abstractmethod
    def tensor(self) -> torch.Tensor:
        """The matrix [rows, columns] as one dense tensor. Raises TypeError where there is none."""

    @abc.abstractmethod
    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        """Return x [n, columns] times the transposed matrix, plus bias [rows]: [n, rows].

        batch_invariant_rows: multiply so many rows at a time in any case. How a row is rounded depends on their number,
        because libraries have different loops for different ones, and not on what or where the others are.
        """

    @abc.abstractmethod
    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        """Return the matrix of some of the rows: of a slice of them, or of those at the indices int64 [n]."""

    @abc.abstractmethod
    def concatenated(self, others: Sequence[Weight]) -> Weight:
        """Return the matrix of these rows and then those of the others, which have as many columns and take activations
        of the same dtype."""

    def room_for(self, count: int) -> Weight | None:
        """Return memory for so many matrices of this one's shape and form, one below the other, as one matrix; None for
        a form that does not lie so. Nothing is written yet."""
        return None

    def moved_into(self, room: Weight, index: int) -> Weight | None:
        """Copy the matrix to its place in memory of `room_for`, and return it there; None where its form is another."""
        return None

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at the indices int64 [n] as one dense tensor, [n, columns], as an embedding is looked up.

        Raises TypeError for a form that is only multiplied by.
        """
        raise TypeError(f"rows of a {type(self).__name__} cannot be looked up: look them up before `prepared`")

    def prepared(self, *, unpacked: bool = True) -> Weight:
        """Return the form that multiplies fastest on its device, for a matrix that is complete.

        unpacked: whether that may be a dense one of a packed matrix, which takes more memory.
        """
        return self


class DenseWeight(Weight):
    """A matrix as one dense tensor."""

    __slots__ = ("_tensor", "columns", "device", "dtype", "rows")

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: [rows, columns]; it is kept, not copied."""
        self._tensor = tensor
        self.rows, self.columns = tensor.shape
        self.dtype, self.device = tensor.dtype, tensor.device

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        if batch_invariant_rows is None or len(x) == batch_invariant_rows:
            return multiply_dense(x, self._tensor, bias)
        return by_parts(self, x, bias, batch_invariant_rows)

    def select_rows(self, rows: slice | torch.Tensor) -> DenseWeight:
        return DenseWeight(self._tensor[rows])

    def room_for(self, count: int) -> DenseWeight:
        return DenseWeight(self._tensor.new_empty(count * self.rows, self.columns))

    def moved_into(self, room: Weight, index: int) -> DenseWeight | None:
        if not isinstance(room, DenseWeight):
            return None
        moved = room.tensor[index * self.rows :][: self.rows]
        return DenseWeight(moved.copy_(self._tensor))

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices.to(self.device), self._tensor)

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        if all(isinstance(other, DenseWeight) for other in others):
            return DenseWeight(torch.cat([self._tensor, *(other.tensor for other in others)]))
        return StackedWeight((self, *others))

    def prepared(self, *, unpacked: bool = True) -> Weight:
        """On the CPU, where it is faster, a copy in the blocks that oneDNN reads: one row then costs half of what it
        costs from a dense matrix, sixteen float32 rows a third."""
        if self.device.type != "cpu" or not _has_onednn():
            return self
        if self.dtype is torch.float32 or (self.dtype is torch.bfloat16 and native.multiplies(self.dtype)):
            return BlockedWeight(self._tensor)
        if multiplied_dtype(self.dtype, self.device) is not self.dtype and Product.takes(self._tensor):
            return WidenedWeight(self._tensor)
        return self


class WidenedWeight(DenseWeight):
    """A dense matrix of 16-bit floats on a CPU without instructions for them: a kernel widens it in registers."""

    __slots__ = ("_product",)

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: one that `Product` takes; it is kept, not copied."""
        super().__init__(tensor)
        self._product = Product(tensor)

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        """As `Weight.matmul`. The kernel gives a row the same bits among any number of rows."""
        if batch_invariant_rows is None and len(x) >= _WIDENED_IN_MEMORY_FROM:
            return multiply_dense(x, self._tensor, bias)
        return self._product.multiply(x, bias)

    def moved_into(self, room: Weight, index: int) -> DenseWeight | None:
        moved = super().moved_into(room, index)
        return None if moved is None else WidenedWeight(moved.tensor)

    def prepared(self, *, unpacked: bool = True) -> Weight:
        return self


class BlockedWeight(Weight):
    """A matrix on the CPU in the blocks that oneDNN reads."""

    __slots__ = ("_blocks", "columns", "device", "dtype", "rows")

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: [rows, columns], which is copied."""
        self._blocks: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(tensor.contiguous(), BLOCKED_FOR)
        self.rows, self.columns = tensor.shape
        self.dtype, self.device = tensor.dtype, tensor.device

    @property
    def nbytes(self) -> int:
        """Memory that its elements take; blocks may be padded by a few more."""
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a matrix in oneDNN's blocks has no dense form")

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        if batch_invariant_rows is not None and len(x) != batch_invariant_rows:
            return by_parts(self, x, bias, batch_invariant_rows)
        rows = _multiplied_rows(len(x))
        if rows > len(x):
            return self.matmul(_padded(x, rows), bias)[: len(x)]
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        return product

    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        raise TypeError("rows cannot be taken out of oneDNN's blocks: select them before `prepared`")

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        raise TypeError("oneDNN's blocks cannot be concatenated: concatenate matrices before `prepared`")


class StackedWeight(Weight):
    """Matrices of unlike forms, one below the other.

    parts: each of as many columns, for activations of one dtype on one device.
    """

    __slots__ = ("columns", "device", "dtype", "parts", "rows")

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        self.rows, self.columns = sum(part.rows for part in self.parts), first.columns
        self.dtype, self.device = first.dtype, first.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("matrices of unlike forms have no dense form together")

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        products, first = [], 0
        for part in self.parts:
            own = None if bias is None else bias[first : first + part.rows]
            products.append(part.matmul(x, own, batch_invariant_rows))
            first += part.rows
        return torch.cat(products, 1)

    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        """As `Weight.select_rows`, for a run of rows."""
        if isinstance(rows, torch.Tensor):
            raise TypeError("single rows cannot be taken out of matrices of unlike forms: select them before")
        runs = runs_of_parts(rows, [part.rows for part in self.parts])
        return concatenate([self.parts[index].select_rows(own) for index, own in runs])

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        return StackedWeight((*self.parts, *others))

    def prepared(self, *, unpacked: bool = True) -> Weight:
        return StackedWeight([part.prepared(unpacked=unpacked) for part in self.parts])


class ReorderedWeight(Weight):
    """A matrix that is held with its columns in another order: rows of activations are brought to it first.

    weight: the matrix as it is held. order: which column of the whole each of its columns is, int32 [columns].
    """

    __slots__ = ("columns", "device", "dtype", "order", "rows", "weight")

    def __init__(self, weight: Weight, order: torch.Tensor) -> None:
        self.weight, self.order = weight, order
        self.rows, self.columns, self.dtype, self.device = weight.rows, weight.columns, weight.dtype, weight.device

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.order.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a matrix whose columns stand in another order has no dense form in their own")

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        return self.weight.matmul(x.index_select(1, self.order), bias, batch_invariant_rows)

    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        return ReorderedWeight(self.weight.select_rows(rows), self.order)

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        held = self.weight.lookup(indices)
        return torch.empty_like(held).index_copy_(1, self.order.long(), held)

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        """As `Weight.concatenated`; matrices in unlike orders stay beside each other."""
        alike = [
            other.weight
            for other in others
            if isinstance(other, ReorderedWeight) and torch.equal(other.order, self.order)
        ]
        if len(alike) < len(others):
            return StackedWeight((self, *others))
        return ReorderedWeight(self.weight.concatenated(alike), self.order)

    def prepared(self, *, unpacked: bool = True) -> Weight:
        return ReorderedWeight(self.weight.prepared(unpacked=unpacked), self.order)


def runs_of_parts(rows: slice, counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return which parts a run of rows is of, in order, and which of each one's own rows.

    rows: without a step, of all parts' rows below each other. counts: how many rows each part has.
    """
    first, last, step = rows.indices(sum(counts))
    assert step == 1
    found, begin = [], 0
    for index, count in enumerate(counts):
        own = slice(max(first - begin, 0), min(last - begin, count))
        if own.start < own.stop:
            found.append((index, own))
        begin += count
    return found


def concatenate(parts: Sequence[Weight]) -> Weight:
    """Return the matrix of all the parts' rows, in order. Of a single part it is that part, and no copy.

    Where not all have one form, neighbours that have become one.
    """
    first, *others = parts
    whole = first.concatenated(others) if others else first
    if not isinstance(whole, StackedWeight):
        return whole
    runs = [first]
    for part in others:
        both = runs[-1].concatenated([part])
        if isinstance(both, StackedWeight):
            runs.append(part)
        else:
            runs[-1] = both
    return StackedWeight(runs)


def _multiplied_rows(rows: int) -> int:
    """Return how many rows are multiplied in place of so many: beyond the largest block of a draft, the next power of
    two, or what lies halfway to it.

    For every number of rows oneDNN writes code of its own, half a MiB for each shape of a matrix, and keeps it: prompts
    of all lengths would take hundreds of MiB, and wait for the code.
    """
    if rows <= BLOCKED_FOR:
        return rows
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return between if rows <= between else power


def by_parts(weight: Weight, x: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Multiply x [n, columns] as products of so many rows each, the last one filled up with zeros."""
    parts = [x[first : first + rows] for first in range(0, len(x), rows)]
    products = [weight.matmul(_padded(part, rows), bias, rows)[: len(part)] for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [n, columns] with zeros behind it, [rows, columns]."""
    return F.pad(x, (0, 0, 0, rows - len(x)))
