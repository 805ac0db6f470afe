"""Matrices of codes with scales: what quantised checkpoints hold, kept packed in memory.

An element is `scale * (code - origin) + offset`, or `scale * table[code] + offset`, where scale and offset belong to a
group of neighbouring columns of its row. Formats of files differ in how they store codes and scales, and are brought
to this form when they are loaded; a kernel or library that multiplies by packed matrices knows this form alone.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shard_worker.device import devices
from shard_worker.weights.cpu_codes import CpuCodesWeight
from shard_worker.weights.cpu_int4 import CpuInt4Weight
from shard_worker.weights.tiled import TiledWeight, multiplied_in_parts, tiling_of
from shard_worker.weights.weight import DenseWeight, StackedWeight, Weight, rows_at_a_time

BLOCK_COLUMNS = 64
"""Columns whose 4-bit codes lie together: byte j of 32 has column j in its low half, and column j + 32 in its high
half. Both halves of a tile of bytes are then runs of columns."""

LARGEST_POWER = 2.0**16
"""Of the scales of `Packing.powers`. No model has weights near that."""

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what the codes of MXFP4 and NVFP4 stand for, as `Packing.table`; scales are halved instead."""

_FLOAT16_INFINITE = 1 << 14
"""The bit of float16 that numbers from 2 on have, and those that are none."""

_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""The bits of numbers of 16 bits that all are 1 in those that are not finite."""

_SIGN = 128
"""What makes a signed byte an unsigned one."""


class Codes(enum.StrEnum):
    """How the code of an element is stored."""

    BITS4 = "4 bits"
    """uint8 [rows, columns / 2], in the order of `BLOCK_COLUMNS`; codes 0 to 15."""

    INT8 = "int8"
    """int8 [rows, columns]."""

    FLOAT8 = "float8_e4m3fn"
    """float8_e4m3fn [rows, columns]; the code is the number itself."""


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """One number for every group of columns of every row: `values`, times `factors` where there are such.

    values: [rows, columns / group], floating point or integers. factors: floating point [rows, columns / span], of
    groups that `group` divides, or None.
    """

    values: torch.Tensor
    group: int
    factors: torch.Tensor | None = None
    span: int = 0

    @property
    def nbytes(self) -> int:
        """Memory that they take, in bytes."""
        return self.values.nbytes + (0 if self.factors is None else self.factors.nbytes)

    @property
    def are_finite(self) -> bool:
        """Whether none of them is NaN or infinite."""
        return are_finite(self.values) and (self.factors is None or are_finite(self.factors))

    def numbers(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the numbers of some rows, float32 [rows, columns / group]."""
        numbers = self.values[rows].float()
        if self.factors is None:
            return numbers
        factors = self.factors[rows].float().repeat_interleave(self.span // self.group, 1)
        return numbers * factors[:, : numbers.shape[1]]

    def select_rows(self, rows: slice | torch.Tensor) -> GroupNumbers:
        """Return those of some rows."""
        return replace(self, values=self.values[rows], factors=None if self.factors is None else self.factors[rows])

    def with_columns(self, order: torch.Tensor, run: int) -> GroupNumbers:
        """Return those of columns in another order, as `PackedWeight.with_columns` says."""
        group = math.gcd(self.group, run)
        values = _in_order(self.values.repeat_interleave(self.group // group, 1), order, run // group)
        if self.factors is None:
            return GroupNumbers(values, group)
        span = math.gcd(self.span, run)
        factors = _in_order(self.factors.repeat_interleave(self.span // span, 1), order, run // span)
        return GroupNumbers(values, group, factors, span)

    def is_like(self, other: GroupNumbers | None) -> bool:
        """Return whether rows of both can stand in one tensor."""
        return (
            other is not None
            and (self.group, self.span, self.values.dtype) == (other.group, other.span, other.values.dtype)
            and (None if self.factors is None else self.factors.dtype)
            == (None if other.factors is None else other.factors.dtype)
        )

    def concatenated(self, others: Sequence[GroupNumbers]) -> GroupNumbers:
        """Return those of these rows and then of the others', which are like these."""
        values = torch.cat([self.values, *(other.values for other in others)])
        factors = [one.factors for one in (self, *others) if one.factors is not None]
        return replace(self, values=values, factors=torch.cat(factors) if factors else None)


@dataclass(frozen=True, slots=True)
class Packing:
    """What packed matrices have in common whose rows can stand in one matrix.

    codes: how they are stored. origin: the code of zero, subtracted from every code. table: what each 4-bit code
    stands for, 16 numbers, or None where it stands for itself; then `origin` is 0. short: codes of `Codes.INT8` are all
    from -64 to 63. powers: the table is E2M1_DOUBLED, and scales are powers of two up to LARGEST_POWER.
    """

    codes: Codes
    origin: int = 0
    table: tuple[float, ...] | None = None
    short: bool = False
    powers: bool = False


class PackedWeight(Weight):
    """A matrix [rows, columns] of codes with scales.

    packing: how codes are read. codes: as `Codes` says. scales, offsets: those of groups of columns; None for no
    offsets. Nothing of it is written behind its making.
    """

    __slots__ = ("codes", "columns", "device", "dtype", "offsets", "packing", "rows", "scales")

    def __init__(
        self,
        packing: Packing,
        codes: torch.Tensor,
        scales: GroupNumbers,
        offsets: GroupNumbers | None = None,
        *,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of the activations that it takes and gives. All tensors are kept, not copied."""
        self.packing, self.codes, self.scales, self.offsets, self.dtype = packing, codes, scales, offsets, dtype
        self.rows, held = codes.shape
        self.columns = held * 2 if packing.codes is Codes.BITS4 else held
        self.device = codes.device
        for numbers in (scales, offsets):
            assert numbers is None or numbers.values.shape == (self.rows, math.ceil(self.columns / numbers.group))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        raise TypeError("a packed matrix has no dense form")

    def unpacked(self, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the elements of some rows, [rows, columns], computed in float32 and then rounded to `dtype`."""
        if _unpacks_by_kernel(self.device) and self._numbers_are_plain:
            return self._unpacked_by_kernel(rows, dtype)
        return self._elements(rows).to(dtype)

    def _elements(self, rows: slice) -> torch.Tensor:
        """Return the elements of some rows in float32, by plain torch."""
        codes, packing = self.codes[rows], self.packing
        if packing.codes is Codes.BITS4:
            codes = unpack_4_bits(codes)
        if packing.table:
            elements = torch.tensor(packing.table, device=self.device)[codes.int()]
        elif packing.codes is Codes.FLOAT8 and self.device.type == "cpu":
            elements = _float8_numbers(codes)
        else:
            elements = codes.float()
        if packing.origin:
            elements -= packing.origin
        _each_group(elements, self.scales, rows, torch.Tensor.mul_)
        if self.offsets is not None:
            _each_group(elements, self.offsets, rows, torch.Tensor.add_)
        return elements

    @property
    def _numbers_are_plain(self) -> bool:
        """Whether a kernel knows the types of all groups' numbers."""
        from shard_worker.ops.unpacking import KINDS

        return all(numbers is None or numbers.values.dtype in KINDS for numbers in (self.scales, self.offsets))

    def _unpacked_by_kernel(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """As `unpacked`, in one pass over memory."""
        from shard_worker.ops.unpacking import unpack

        scales, offsets = self.scales.select_rows(rows), None
        if self.offsets is not None:
            own = self.offsets.select_rows(rows)
            offsets = (own.values, own.group, own.factors, own.span)
        held = (scales.values, scales.group, scales.factors, scales.span)
        table = None if self.packing.table is None else _table_on(self.device, self.packing.table)
        return unpack(self.codes[rows], self.columns, self.packing.origin, table, held, offsets, dtype)

    @property
    def group(self) -> int:
        """How many neighbouring columns of a row have one scale, and one offset."""
        return self.scales.group if self.offsets is None else math.gcd(self.scales.group, self.offsets.group)

    @property
    def unsigned_bits(self) -> int | None:
        """As of `WholeCodes`: None where codes are numbers of floating point, or stand for such."""
        table = self.packing.table
        if self.packing.codes is Codes.BITS4 and table is None:
            return 4
        whole = table is not None and all(number.is_integer() and abs(number) < _SIGN for number in table)
        return 8 if whole or self.packing.codes is Codes.INT8 else None

    def unsigned(self) -> torch.Tensor:
        """As of `CodesOfRows`."""
        table = self.packing.table
        if self.packing.codes is Codes.INT8:
            return self.codes.view(torch.uint8) ^ _SIGN
        if table is None:
            return self.codes
        words = self.codes.reshape(-1).view(torch.int16).long().add_(1 << 15)
        low_halves, high_halves = _unsigned_pairs(table)
        both = torch.empty(self.rows, self.columns // BLOCK_COLUMNS, 2, BLOCK_COLUMNS // 4, dtype=torch.int16)
        for half, numbers in enumerate((low_halves, high_halves)):
            both[:, :, half] = numbers.take(words).view(self.rows, -1, BLOCK_COLUMNS // 4)
        return both.view(torch.uint8).view(self.rows, self.columns)

    def unsigned_numbers(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `CodesOfRows`."""
        scales = self.scales.numbers()
        if group < self.scales.group:
            scales = scales.repeat_interleave(self.scales.group // group, 1)
        offsets = scales * -(self.packing.origin if self.unsigned_bits == 4 else self.packing.origin + _SIGN)
        if self.offsets is not None:
            own = self.offsets.numbers()
            offsets += own if group == self.offsets.group else own.repeat_interleave(self.offsets.group // group, 1)
        return scales, offsets

    @property
    def form(self) -> PackedWeight:
        """As of `PackedRows`: itself."""
        return self

    def part(self, rows: slice) -> PackedWeight:
        """As of `PackedRows`."""
        return self.select_rows(rows)

    def prepared(self, *, unpacked: bool = True) -> Weight:
        """As `prepared`, of this module."""
        return prepared(self, unpacked=unpacked) or self

    def put_elements(self, out: torch.Tensor) -> None:
        """Write the elements to a tensor [rows, columns] of any floating point type on the CPU, rounded to that."""
        out.copy_(self._elements(slice(None)))

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant_rows: int | None = None
    ) -> torch.Tensor:
        """As `Weight.matmul`, in plain torch."""
        return multiplied_in_parts(self, self.unpacked, x, bias, batch_invariant_rows)

    def select_rows(self, rows: slice | torch.Tensor) -> PackedWeight:
        offsets = None if self.offsets is None else self.offsets.select_rows(rows)
        return PackedWeight(self.packing, self.codes[rows], self.scales.select_rows(rows), offsets, dtype=self.dtype)

    def with_rows(self, codes: torch.Tensor, scales: GroupNumbers, offsets: GroupNumbers | None) -> PackedWeight:
        """Return a matrix of other rows in the same form."""
        return PackedWeight(self.packing, codes, scales, offsets, dtype=self.dtype)

    def with_columns(self, order: torch.Tensor, run: int) -> PackedWeight:
        """Return the matrix whose columns stand in another order, run by run, and are the same numbers.

        order: which run of this matrix comes first, second and so on, int64 [columns / run]. run: how many neighbouring
        columns stay beside each other. Groups that are no part of a run become smaller.
        """
        packed = self.packing.codes is Codes.BITS4
        codes = _in_order(unpack_4_bits(self.codes) if packed else self.codes, order, run)
        return PackedWeight(
            self.packing,
            pack_4_bits(codes) if packed else codes,
            self.scales.with_columns(order, run),
            None if self.offsets is None else self.offsets.with_columns(order, run),
            dtype=self.dtype,
        )

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        return self.select_rows(indices.to(self.device)).unpacked(dtype=self.dtype)

    def concatenated(self, others: Sequence[Weight]) -> Weight:
        """As `Weight.concatenated`; matrices of unlike forms stay beside each other."""
        alike = [other for other in others if isinstance(other, PackedWeight) and self.is_like(other)]
        if len(alike) < len(others):
            return StackedWeight((self, *others))
        offsets = None
        if self.offsets is not None:
            offsets = self.offsets.concatenated([other.offsets for other in alike if other.offsets is not None])
        return PackedWeight(
            self.packing,
            torch.cat([self.codes, *(other.codes for other in alike)]),
            self.scales.concatenated([other.scales for other in alike]),
            offsets,
            dtype=self.dtype,
        )

    def is_like(self, other: PackedWeight) -> bool:
        """Return whether rows of both can stand in one matrix."""
        offsets = other.offsets is None if self.offsets is None else self.offsets.is_like(other.offsets)
        return self.packing == other.packing and self.scales.is_like(other.scales) and offsets


class PackedRows(Protocol):
    """A packed matrix [rows, columns] whose rows can be had some at a time: in memory, or in a file.

    dtype, device: as of `Weight`.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def form(self) -> PackedWeight:
        """A matrix in the same form, of some of the rows."""

    def part(self, rows: slice) -> PackedWeight:
        """Return some of the rows, on the device."""

    @property
    def unsigned_bits(self) -> int | None:
        """As of `WholeCodes`."""

    @property
    def group(self) -> int:
        """How many neighbouring columns of a row have one scale, and one offset."""


def prepared(packed: PackedRows, *, unpacked: bool) -> Weight | None:
    """Return what multiplies fastest on the device: on a GPU, tiles that kernels read; on the CPU, the form that a
    kernel or torch has a fast product for, or where there is none, a dense matrix. None where that is the packed matrix
    itself.

    Of the rows some are brought to that form at a time. unpacked: as of `Weight.prepared`.
    """
    if packed.device.type != "cpu":
        return _tiled(packed)
    if CpuCodesWeight.takes(packed):
        return CpuCodesWeight(packed)
    if CpuInt4Weight.takes(packed):
        return CpuInt4Weight(packed)
    if not unpacked:
        return None
    dense = torch.empty(packed.rows, packed.columns, dtype=packed.dtype)
    step = rows_at_a_time(packed.columns, packed.device)
    for first in range(0, packed.rows, step):
        some = slice(first, min(first + step, packed.rows))
        packed.part(some).put_elements(dense[some])
    return DenseWeight(dense).prepared()


def _tiled(packed: PackedRows) -> TiledWeight | None:
    target = devices.kernel_target(packed.device)
    if target is None or not _unpacks_by_kernel(packed.device):
        return None
    try:
        return TiledWeight(packed, tiling_of(packed.form, lane_columns=target.lane_columns))
    except ValueError:
        # Plain torch multiplies by it, and says why.
        return None


def _each_group(
    elements: torch.Tensor,
    numbers: GroupNumbers,
    rows: slice,
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Change elements [n, columns] in place by the number of their group. rows: which of the matrix's they are."""
    count, columns = elements.shape
    own = numbers.numbers(rows)
    if columns % numbers.group:
        change(elements, own.repeat_interleave(numbers.group, 1)[:, :columns])
    else:
        change(elements.view(count, columns // numbers.group, numbers.group), own.unsqueeze(2))


def _float8_numbers(codes: torch.Tensor) -> torch.Tensor:
    """Return what codes of float8_e4m3fn stand for, float32, on the CPU: by their bits, as torch takes ten times as
    long to convert them."""
    whole = codes.view(torch.int8)
    # Those of float16, whose exponent counts from elsewhere; what has all bits but the sign is no number.
    bits = whole.short().bitwise_left_shift_(7).bitwise_and_(~_FLOAT16_INFINITE)
    numbers = bits.view(torch.float16).float().mul_(256)
    magnitudes = whole & 127
    if bool((magnitudes.amax() if len(whole) else 0) == 127):
        numbers[magnitudes == 127] = torch.nan
    return numbers


@functools.cache
def _unsigned_pairs(table: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the low halves of two bytes stand for, and the high ones, each plus `_SIGN`: two bytes, int16
    [65536] by the two as a signed word, the least one first."""
    words = torch.arange(-1 << 15, 1 << 15)
    numbers = (torch.tensor(table) + _SIGN).long()
    low, high = (numbers[words >> shift & 15] | numbers[words >> shift + 8 & 15] << 8 for shift in (0, 4))
    return low.short(), high.short()


@functools.cache
def _unpacks_by_kernel(device: torch.device) -> bool:
    """Return whether Triton compiles kernels for a device."""
    target = devices.kernel_target(device)
    return target is not None and target.lack is None and importlib.util.find_spec("triton") is not None


@functools.cache
def _table_on(device: torch.device, table: tuple[float, ...]) -> torch.Tensor:
    """Return a table on a device: it is sent there once."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def _in_order(numbers: torch.Tensor, order: torch.Tensor, run: int) -> torch.Tensor:
    """Return [rows, columns] with its runs of columns in another order."""
    return numbers.view(len(numbers), -1, run)[:, order].flatten(1)


def are_finite(numbers: torch.Tensor) -> bool:
    """Return whether none of some numbers is NaN or infinite; whole numbers never are."""
    if not numbers.is_floating_point() or not numbers.numel():
        return True
    exponent = _EXPONENTS.get(numbers.dtype)
    if exponent is None:
        return bool(torch.isfinite(numbers.float()).all())
    # By their bits, which takes a CPU a tenth of the time.
    return bool((numbers.view(torch.int16) & exponent).amax() < exponent)


def pack_4_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes 0 to 15, integers [rows, columns], as bytes, uint8 [rows, columns / 2] in the order of
    `BLOCK_COLUMNS`, which divides the columns."""
    low, high = codes.to(torch.uint8).view(len(codes), -1, 2, BLOCK_COLUMNS // 2).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_4_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes in bytes of `pack_4_bits`, uint8 [rows, columns]."""
    halves = packed.view(len(packed), packed.shape[1] * 2 // BLOCK_COLUMNS, BLOCK_COLUMNS // 2)
    codes = halves.new_empty(*halves.shape[:2], 2, BLOCK_COLUMNS // 2)
    torch.bitwise_and(halves, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(halves, 4, out=codes[:, :, 1])
    return codes.flatten(1)
