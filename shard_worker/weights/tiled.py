"""Packed matrices on GPUs, in the order in which the threads of a kernel read them.

A tile has 16 rows and up to 64 bytes of each. Its rows lie side by side, so that a warp reads a run of memory, and what
follows in a row is the next tile. Where it is known which columns a lane multiplies, 16 bytes of a row that a lane
reads at once are four words, each of another run of 16 bytes. Of such a run word t, which lane t reads, has bytes
4 * t and on where a lane multiplies 4 neighbouring columns, and bytes 2 * t, 2 * t + 1, 2 * t + 8 and 2 * t + 9 where
it multiplies 2. Where a byte is two codes that no table is looked up for, the second and the third byte of a word are
swapped: codes of neighbouring columns are then 16 bits apart, as the halves are that a lane multiplies together.
Codes from -64 to 63 are held as 0 to 127, which are mantissas of bfloat16.
Groups' numbers are transposed, those of as many columns as kernels multiply at a time in one word.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F

from shard_worker.weights.weight import Weight, by_parts, multiply_dense

TILE_ROWS = 16

_COLUMNS_MULTIPLE = 64
"""Kernels know matrices of so many columns or a multiple."""

_UNPACKED_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}
"""How many elements are unpacked at a time where nothing multiplies by the packed form."""

_WORDS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

_MOST_SPAN = 128
"""Groups of more columns are multiples of this."""

_COPIED_BYTES = 1 << 26
"""How many bytes of codes are brought into tiles at a time."""

SHORT_ORIGIN = 64
"""What `packed.Packing.short` codes are held more by than they are."""

ALL_COLUMNS = 1 << 20
"""Stands for a group, or a span of groups, that is a whole row."""


class Numbers(Protocol):
    """Groups' numbers as of `packed.GroupNumbers`, a dataclass."""

    @property
    def values(self) -> torch.Tensor: ...
    @property
    def group(self) -> int: ...
    @property
    def factors(self) -> torch.Tensor | None: ...
    @property
    def span(self) -> int: ...


class Packed(Protocol):
    """A matrix of codes with scales, as of `packed.PackedWeight`."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device
    packing: Any
    codes: torch.Tensor
    scales: Any
    offsets: Any

    def select_rows(self, rows: slice | torch.Tensor) -> Self: ...

    def with_rows(self, codes: torch.Tensor, scales: Any, offsets: Any) -> Any:
        """Return a matrix of other rows in the same form."""


class PackedRows(Protocol):
    """A packed matrix whose rows can be had some at a time, as of `packed.PackedRows`."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def form(self) -> Packed:
        """A matrix in the same form, of some of the rows."""

    def part(self, rows: slice) -> Packed:
        """Return some of the rows, on the device."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix is cut.

    chunk: bytes of a row in a tile. columns: of a row whose groups' numbers are one word, one or two tiles. group: its
    columns, `ALL_COLUMNS` for one that is a row. lane_columns: of how many neighbouring
    columns a lane reads the codes together, 0 where bytes are not in the order of lanes. swapped: the second and third
    byte of each word are. scaled: kernels multiply codes by their groups' scales before they multiply activations by
    them, which rounds nothing: scales are powers of two.
    """

    chunk: int
    columns: int
    group: int
    lane_columns: int
    swapped: bool
    scaled: bool


@dataclass(frozen=True, slots=True)
class TiledNumbers:
    """`GroupNumbers` transposed.

    words: integers [columns / group or Tiling.columns, rows], each of the numbers of that many columns, the first one
    lowest. dtype: of the numbers. factors: [columns / span, rows], or None. span: of columns, 0 without factors.
    """

    words: torch.Tensor
    dtype: torch.dtype
    factors: torch.Tensor | None
    span: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Words, and factors where there are such."""
        return [self.words] if self.factors is None else [self.words, self.factors]

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TiledNumbers:
        """Return what `change` makes of each tensor."""
        factors = None if self.factors is None else change(self.factors)
        return dataclasses.replace(self, words=change(self.words), factors=factors)


def tiling_of(packed: Packed, *, lane_columns: int) -> Tiling:
    """Return how a matrix is cut for kernels. Raises ValueError, with the reason, where they do not know its form."""
    columns, scales, offsets = packed.columns, packed.scales, packed.offsets
    halves = columns // packed.codes.shape[1]
    if columns % _COLUMNS_MULTIPLE:
        raise ValueError(f"it has {columns} columns, and {_COLUMNS_MULTIPLE} must divide them")
    if not 0 <= packed.packing.origin < 128:
        raise ValueError(f"its codes count from {packed.packing.origin}, and 0 to 127 are known")
    group = _group(scales, columns)
    if offsets is not None and _group(offsets, columns) != group:
        raise ValueError(f"its offsets have groups of {offsets.group} columns, and its scales of {scales.group}")
    numbers = [scales] if offsets is None else [scales, offsets]
    bits = max(8 * one.values.dtype.itemsize for one in numbers)
    spans = [span for one in numbers if (span := factor_span(one, columns))]
    cuts = ((256, 64), (128, 64), (64, 32)) if halves == 2 else ((128, 64), (64, 64))
    # Two tiles in a turn are more than RDNA's registers hold.
    for wide, chunk in cuts if lane_columns else cuts[1:]:
        divides = columns % wide == 0 and (group % wide == 0 or wide % group == 0)
        if divides and max(1, wide // group) * bits <= 64 and all(span % wide == 0 for span in spans):
            powers = packed.packing.powers and scales.factors is None and group == 32
            scaled = powers and lane_columns > 0 and packed.dtype is torch.bfloat16
            swapped = lane_columns > 0 and halves == 2 and (packed.packing.table is None or scaled)
            return Tiling(chunk, wide, group, lane_columns, swapped, scaled)
    raise ValueError(f"no tile fits groups of {scales.group} of its {columns} columns")


def _group(numbers: Numbers, columns: int) -> int:
    if numbers.group >= columns:
        return ALL_COLUMNS
    if numbers.group not in (16, 32, 64) and numbers.group % _MOST_SPAN:
        raise ValueError(f"it has groups of {numbers.group} columns, and 16, 32, 64 and multiples of 128 are known")
    return numbers.group


def factor_span(numbers: Numbers, columns: int) -> int:
    """Return how many columns share a factor, `ALL_COLUMNS` for all of a row, 0 where there are none."""
    return 0 if numbers.factors is None else ALL_COLUMNS if numbers.span >= columns else numbers.span


def multiplied_in_parts(
    weight: Weight,
    unpacked: Callable[[slice, torch.dtype], torch.Tensor],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    batch_invariant_rows: int | None,
) -> torch.Tensor:
    """Return what `Weight.matmul` does, in plain torch: a part of the rows is unpacked at a time, and forgotten.

    unpacked: returns the elements of some rows of the matrix, of a dtype.
    """
    if batch_invariant_rows is not None and len(x) != batch_invariant_rows:
        return by_parts(weight, x, bias, batch_invariant_rows)
    step = max(1, _UNPACKED_ELEMENTS[weight.device.type] // weight.columns // TILE_ROWS) * TILE_ROWS
    firsts = range(0, weight.rows, step)
    parts = [multiply_dense(x, unpacked(slice(first, first + step), weight.dtype)) for first in firsts]
    product = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return product if bias is None else product + bias


class TiledWeight(Weight):
    """A packed matrix [rows, columns] on a GPU, in tiles.

    codes: uint8 [rows / TILE_ROWS rounded up, TILE_ROWS * bytes of a row]. tiling, scales, offsets: as said there.
    """

    __slots__ = ("_empty", "codes", "columns", "device", "dtype", "offsets", "packing", "rows", "scales", "tiling")

    def __init__(self, packed: PackedRows, tiling: Tiling) -> None:
        """packed: of which all is copied, some rows at a time."""
        # A copy of no rows: a view of them would keep all of the matrix in memory.
        self._empty = packed.form.select_rows(torch.empty(0, dtype=torch.int64, device=packed.device))
        self.rows, self.columns, self.dtype, self.device = packed.rows, packed.columns, packed.dtype, packed.device
        self.packing, self.tiling = self._empty.packing, tiling
        blocks, held = -(-self.rows // TILE_ROWS), self._empty.codes.shape[1]
        self.codes = torch.empty(blocks, TILE_ROWS * held, dtype=torch.uint8, device=self.device)
        self.scales = self._room_for(self._empty.scales)
        self.offsets = None if self._empty.offsets is None else self._room_for(self._empty.offsets)
        step = max(1, _COPIED_BYTES // (TILE_ROWS * held))
        for first in range(0, blocks, step):
            some = slice(first * TILE_ROWS, min((first + step) * TILE_ROWS, self.rows))
            part = packed.part(some)
            self._bring_codes(first, part.codes.view(torch.uint8))
            self._bring_numbers(self.scales, some, part.scales)
            if self.offsets is not None:
                self._bring_numbers(self.offsets, some, part.offsets)

    def _bring_codes(self, block: int, codes: torch.Tensor) -> None:
        """Take the codes of some rows, uint8 [rows, bytes of a row], into the tiles from a block of rows on."""
        held = codes.shape[1]
        if self.packing.short:
            codes = codes + SHORT_ORIGIN
        if len(codes) % TILE_ROWS:
            codes = F.pad(codes, (0, 0, 0, -len(codes) % TILE_ROWS))
        tiles = codes.view(-1, TILE_ROWS, held // self.tiling.chunk, *self._plain_shape)
        order = (0, 2, 1, *(3 + place for place in self._held_order))
        there = self.codes[block : block + len(tiles)]
        there.view(len(tiles), held // self.tiling.chunk, TILE_ROWS, *self._held_shape).copy_(tiles.permute(order))

    @property
    def _plain_shape(self) -> tuple[int, ...]:
        """A tile's row as it stands in the matrix: words, parts of a word, lanes, and pairs of bytes of a part."""
        chunk, part = self.tiling.chunk, self.tiling.lane_columns
        return (chunk // 16, 4 // part, 4, part // 2, 2) if part else (chunk,)

    @property
    def _held_order(self) -> tuple[int, ...]:
        """Which of these dimensions is where a row is held: lanes, words, and then the bytes of a word."""
        if not self.tiling.lane_columns:
            return (0,)
        return (2, 0, 4, 1, 3) if self.tiling.swapped else (2, 0, 1, 3, 4)

    @property
    def _held_shape(self) -> tuple[int, ...]:
        return tuple(self._plain_shape[place] for place in self._held_order)

    def _in_plain_order(self, tiles: torch.Tensor, rows: int) -> torch.Tensor:
        """Return tiles' rows [..., *_held_shape] with their bytes as in the matrix. rows: how many dimensions come
        before these."""
        order = [rows + self._held_order.index(place) for place in range(len(self._held_order))]
        return tiles.permute(*range(rows), *order)

    @property
    def _numbers_in_word(self) -> int:
        return max(1, self.tiling.columns // self.tiling.group)

    def _room_for(self, numbers: Numbers) -> TiledNumbers:
        """Return memory for the numbers of all rows. numbers: of any of them."""
        values, factors, each = numbers.values, numbers.factors, self._numbers_in_word
        dtype = _WORDS[values.dtype.itemsize * 8 * each]
        words = torch.empty(values.shape[1] // each, self.rows, dtype=dtype, device=self.device)
        if factors is not None:
            factors = factors.new_empty(factors.shape[1], self.rows)
        return TiledNumbers(words, values.dtype, factors, factor_span(numbers, self.columns))

    @staticmethod
    def _bring_numbers(held: TiledNumbers, rows: slice, numbers: Numbers) -> None:
        """Take the numbers of some rows."""
        held.words[:, rows] = numbers.values.contiguous().view(held.words.dtype).T
        if held.factors is not None and numbers.factors is not None:
            held.factors[:, rows] = numbers.factors.T

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _numbers(self) -> list[TiledNumbers]:
        return [self.scales] if self.offsets is None else [self.scales, self.offsets]

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [self.codes, *(tensor for numbers in self._numbers for tensor in numbers.tensors)]

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a matrix in tiles of codes has no dense form")

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        """As `Weight.matmul`, in plain torch."""
        return multiplied_in_parts(self, self.unpacked, x, bias, batch_invariant_rows)

    def room_for(self, count: int) -> TiledWeight:
        """As `Weight.room_for`; each matrix begins with a tile, so that what is behind its last row may be empty."""
        blocks, held = self.codes.shape
        rows = count * blocks * TILE_ROWS
        codes = self.codes.new_empty(count * blocks, held)
        return self._with_rows(rows, codes, lambda tensor: tensor.new_empty(len(tensor), rows))

    def moved_into(self, room: Weight, index: int) -> TiledWeight | None:
        if not isinstance(room, TiledWeight) or room._form != self._form:
            return None
        blocks, rows = len(self.codes), self.rows
        first = index * blocks * TILE_ROWS
        codes = room.codes[index * blocks :][:blocks]
        moved = room._with_rows(rows, codes, lambda tensor: tensor[:, first : first + rows])
        for there, here in zip(moved._tensors, self._tensors, strict=True):
            there.copy_(here)
        return moved

    @property
    def _form(self) -> tuple[Any, ...]:
        """What matrices have in common whose rows can stand in one."""
        numbers = [(one.dtype, one.span, *(tensor.dtype for tensor in one.tensors)) for one in self._numbers]
        return self.packing, self.tiling, self.columns, self.dtype, numbers

    def _with_rows(self, rows: int, codes: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> TiledWeight:
        """Return a matrix of other rows in the same form. change: returns theirs for a tensor of groups' numbers."""
        other = copy.copy(self)
        other.rows, other.codes, other.scales = rows, codes, self.scales.changed(change)
        other.offsets = None if self.offsets is None else self.offsets.changed(change)
        return other

    def unpacked(self, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the elements of some rows, as `PackedWeight.unpacked`."""
        elements: torch.Tensor = self.select_rows(rows).unpacked(dtype=dtype)
        return elements

    def select_rows(self, rows: slice | torch.Tensor) -> Any:
        """Return the matrix of some rows in the order of files again."""
        if isinstance(rows, slice):
            first, last, _ = rows.indices(self.rows)
            blocks = self._rows_in_order(self.codes[first // TILE_ROWS : -(-last // TILE_ROWS)])
            codes = blocks.flatten(0, 1)[first % TILE_ROWS :][: last - first].flatten(1)
        else:
            tiles = self.codes.view(len(self.codes), -1, TILE_ROWS, *self._held_shape)
            chosen = tiles[rows // TILE_ROWS, :, rows % TILE_ROWS]
            codes = self._in_plain_order(chosen, 2).flatten(1)
        if self.packing.short:
            codes = codes - SHORT_ORIGIN
        empty = self._empty
        offsets = None if self.offsets is None else self._selected(self.offsets, empty.offsets, rows)
        return empty.with_rows(codes.view(empty.codes.dtype), self._selected(self.scales, empty.scales, rows), offsets)

    def _rows_in_order(self, codes: torch.Tensor) -> torch.Tensor:
        """Return blocks of rows [n, TILE_ROWS, tiles, chunk] with their bytes as in the matrix."""
        tiles = codes.view(len(codes), -1, TILE_ROWS, *self._held_shape).transpose(1, 2)
        return self._in_plain_order(tiles, 3).flatten(3)

    @staticmethod
    def _selected(numbers: TiledNumbers, like: Any, rows: slice | torch.Tensor) -> Any:
        # A copy in any case: strides of a single column may be others.
        values = numbers.words[:, rows].T.clone(memory_format=torch.contiguous_format).view(numbers.dtype)
        factors = None if numbers.factors is None else numbers.factors[:, rows].T.contiguous()
        return dataclasses.replace(like, values=values, factors=factors)

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.select_rows(indices.to(self.device)).unpacked(dtype=self.dtype)
        return rows

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        raise TypeError("tiles of codes cannot be concatenated: concatenate matrices before `prepared`")
