"""Packed matrices on x86 CPUs, in the tiles that torch's int4 product reads.

torch multiplies bfloat16 rows by 4-bit codes with a scale and an offset for every group of columns, summed in float32
and in one order whatever the number of rows. Codes of 8 bits are two of 4 bits each: `16 * high + low` is a matrix of
twice the columns, [high | low], which multiplies the same activations twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from services.model.target_tensors import CPU_ROWS_MULTIPLE
from shard_worker.cpu_kernels.codes_kernel import RUN
from shard_worker.weights.weight import Weight, multiplied_dtype
from shard_worker.weights.whole_codes import WholeCodes, group_of

_TILE_ROWS = {"AVX512": 64, "AVX2": 32}
"""Rows of a tile, by torch's name for what the CPU can do; on others the product is slow. A tile has one half of its
rows in the low halves of bytes and the other in the high ones, column after column."""

_UNPACKED_FROM_CODES = 128
"""From so many codes for each column on, the activations' rows times one or two, unpacking tiles and multiplying by
them is faster than torch's int4 product."""

_AT_A_TIME = 1 << 21
"""How many elements are unpacked from tiles at a time."""

_BROUGHT_AT_A_TIME = 1 << 19
"""How many elements are brought into tiles at a time: what is made of them on the way stays within caches."""

_LOWER = 0xFFFF
"""The lower half of a word."""

_LOW_HALVES, _EVEN_BYTES = 0x0F0F0F0F, 0x00FF00FF
"""Of four bytes."""


class CpuInt4Weight(Weight):
    """A matrix on the CPU for bfloat16 activations, in tiles of 4-bit codes."""

    __slots__ = ("_codes", "_group", "_halves", "_numbers", "columns", "device", "dtype", "rows")

    def __init__(self, packed: WholeCodes) -> None:
        """packed: a matrix that `takes` says yes to; it is copied. Scales and offsets are rounded to bfloat16."""
        self.rows, self.columns = packed.rows, packed.columns
        self.dtype, self.device = packed.dtype, packed.device
        self._group, self._halves = group_of(packed), 1 if packed.unsigned_bits == 4 else 2
        self._codes = torch.empty(self.rows, self.columns * self._halves // 2, dtype=torch.uint8)
        # Of every group and row the scale and the offset in `scale * (code - 8) + offset`.
        groups = self.columns // self._group
        self._numbers = torch.empty(groups * self._halves, self.rows, 2, dtype=self.dtype)
        step = max(1, _BROUGHT_AT_A_TIME // self.columns // _tile_rows()) * _tile_rows()
        # Rows behind the last whole tile lie in another order, which torch alone knows.
        whole = self.rows // _tile_rows() * _tile_rows() if _are_tiles_known() else 0
        bounds = [*range(0, whole, step), *range(whole, self.rows, step), self.rows]
        for some in map(slice, bounds[:-1], bounds[1:]):
            part = packed.part(some)
            self._bring_numbers(some, *part.unsigned_numbers(self._group))
            self._bring_codes(some, part.unsigned(), known=some.stop <= whole)

    def _bring_numbers(self, rows: slice, scales: torch.Tensor, offsets: torch.Tensor) -> None:
        """Take the scales and offsets of some rows, [rows, groups] both, which are changed."""
        groups = scales.shape[1]
        # A scale and its offset are moved as one word, the scale in its lower half.
        words = self._numbers.view(torch.int32).squeeze(2)
        if self._halves == 2:
            words[:groups, rows] = self._bits(16 * scales).bitwise_and_(_LOWER).T
            offsets.add_(scales, alpha=128)
        both = self._bits(offsets.add_(scales, alpha=8)).bitwise_left_shift_(16)
        words[-groups:, rows] = both.bitwise_or_(self._bits(scales).bitwise_and_(_LOWER)).T

    def _bits(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the bits of numbers that are rounded, int32, of which the upper ones are those of a signed word."""
        return numbers.to(self.dtype).view(torch.int16).int()

    def _bring_codes(self, rows: slice, codes: torch.Tensor, *, known: bool) -> None:
        """Take the codes of some rows, as `CodesOfRows.unsigned` gives them. known: whether the rows are whole tiles
        whose order is known; torch's own function for it takes many times as long."""
        count, columns = len(codes), self.columns
        if not known:
            if self._halves == 1:
                runs = codes.view(count, -1, RUN)
                single = torch.stack([runs & 15, runs >> 4], 2).flatten(1)
            else:
                single = torch.cat([codes >> 4, codes & 15], 1)
            tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(single.int(), 1)
            self._codes[rows] = tiles.view(count, -1)
            return
        # Two rows whose codes share the bytes of a tile; of each of them four codes are changed at once.
        lower, upper = codes.view(torch.int32).view(-1, 2, _tile_rows() // 2, codes.shape[1] // 4).unbind(1)
        low_halves = (lower & _LOW_HALVES).bitwise_or_((upper & _LOW_HALVES) << 4)
        high_halves = ((lower >> 4) & _LOW_HALVES).bitwise_or_(upper & ~_LOW_HALVES)
        tiles = self._codes[rows].view(len(lower), columns * self._halves, -1)
        if self._halves == 1:
            blocks = tiles.view(len(lower), columns // (2 * RUN), 2, RUN, -1).unbind(2)
            for held, halves in zip(blocks, (low_halves, high_halves), strict=True):
                _turn(halves, held)
        else:
            _turn(high_halves, tiles[:, :columns].unsqueeze(1))
            _turn(low_halves, tiles[:, columns:].unsqueeze(1))

    @staticmethod
    def takes(packed: WholeCodes) -> bool:
        """Return whether a packed matrix can be held so, and is multiplied faster than a dense one then."""
        return (
            packed.device.type == "cpu"
            and packed.dtype is torch.bfloat16
            and packed.unsigned_bits is not None
            and packed.rows % CPU_ROWS_MULTIPLE == 0
            and group_of(packed) > 0
            and _tile_rows() > 0
        )

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._numbers.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a matrix in tiles of 4-bit codes has no dense form")

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        """As `Weight.matmul`. A row's result does not depend on how many rows there are, except for so many that tiles
        are unpacked, which they are not where batch-invariant rows are asked for."""
        many = len(x) * self._halves >= _UNPACKED_FROM_CODES
        if many and batch_invariant_rows is None and self.rows % _tile_rows() == 0 and _are_tiles_known():
            product = self._multiplied_unpacked(x)
        else:
            rows = x.contiguous() if self._halves == 1 else torch.cat([x] * self._halves, 1)
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._codes, self._group, self._numbers)
        return product if bias is None else product + bias

    def select_rows(self, rows: slice | torch.Tensor) -> Weight:
        raise TypeError("rows cannot be taken out of tiles of 4-bit codes: select them before `prepared`")

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        raise TypeError("tiles of 4-bit codes cannot be concatenated: concatenate matrices before `prepared`")

    def _multiplied_unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [n, columns] times the transposed matrix, some tiles of which are unpacked at a time."""
        tile, groups = _tile_rows(), self.columns // self._group
        step = max(1, _AT_A_TIME // self.columns // tile)
        tiles = self._codes.view(-1, self.columns * self._halves, tile // 2).transpose(0, 1)
        scales, offsets = self._numbers[-groups:].movedim(2, 0).unsqueeze(2)
        multiplied, products = x.to(multiplied_dtype(x.dtype, x.device)), []
        for first in range(0, tiles.shape[1], step):
            some = tiles[:, first : first + step]
            rows = slice(first * tile, (first + step) * tile)
            if self._halves == 1:
                codes, middle = torch.cat([some & 15, some >> 4], 2), 8
            else:
                high, low = some.chunk(2)
                codes, middle = torch.cat([high << 4 | low & 15, high & 0xF0 | low >> 4], 2), 136
            elements = codes.to(self.dtype).sub_(middle).view(groups, self._group, -1)
            elements = torch.addcmul(offsets[..., rows], elements, scales[..., rows])
            products.append((multiplied @ elements.flatten(0, 1).to(multiplied.dtype)).to(self.dtype))
        return torch.cat(products, 1)


@functools.cache
def _tile_rows() -> int:
    """Return the rows of a tile on this CPU, 0 where the product is slow."""
    return _TILE_ROWS.get(torch.backends.cpu.get_cpu_capability(), 0)


def _turn(words: torch.Tensor, out: torch.Tensor) -> None:
    """Bring bytes from the order of rows to that of columns.

    words: int32 [tiles, rows, bytes of a row / 4], which is changed. out: uint8 [tiles, runs, bytes of a run, rows].
    """
    # Two rows are turned byte by byte, pairs of them word by word: torch moves words four times as fast as bytes.
    first, second = words[:, ::2], words[:, 1::2]
    even = (first & _EVEN_BYTES).bitwise_or_((second & _EVEN_BYTES) << 8)
    odd = ((first >> 8) & _EVEN_BYTES).bitwise_or_(second & ~_EVEN_BYTES)
    tiles, runs, run, rows = out.shape
    held = out.view(torch.int16).view(tiles, runs, run // 2, 2, rows // 2).unbind(3)
    for there, here in zip(held, (even, odd), strict=True):
        there.copy_(here.view(torch.int16).view(tiles, rows // 2, runs, run // 2).permute(0, 2, 3, 1))


@functools.cache
def _are_tiles_known() -> bool:
    """Return whether tiles are as `_TILE_ROWS` says: torch does not promise it."""
    tile = _tile_rows()
    codes = torch.randint(16, (2 * tile, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).view(2, 4, tile // 2)
    return torch.equal(torch.cat([tiles & 15, tiles >> 4], 2).transpose(1, 2).flatten(0, 1).int(), codes)
