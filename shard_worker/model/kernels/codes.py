"""Sums of products with packed matrices: how tiles of codes become operands of matrix instructions.

Codes are small whole numbers, or numbers of eight bits, which the activations' type holds exactly. They are multiplied
as they are; the sum over a group of columns, in float32, is then multiplied by the group's scale, and what the group
adds to each of its elements by the sum of the activations there. So no element is rounded before it is added up.

On NVIDIA's GPUs a thread reads neighbouring codes of a row. Which columns an instruction takes together is free as long
as both operands have them in the same order: a thread's codes are taken as those that its lane multiplies, and the
activations are read in that order. Codes then go from memory to registers without passing between threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shard_worker.device.devices import KernelTarget
from shard_worker.model.kernels.sums import row_sums
from shard_worker.weights.packed import BLOCK_COLUMNS, Codes, GroupNumbers, PackedWeight
from shard_worker.weights.weight import StackedWeight, Weight

_MOST_SPAN = 128
"""The most columns whose products are summed up before they are scaled."""

_SUMS = 32
"""Columns of a sum of the activations, but for offsets of smaller groups."""

_KINDS = {
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e8m0fnu: "e8m0",
}
"""Types of groups' numbers, as kernels name them."""

_WORDS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class Form(NamedTuple):
    """What a kernel is compiled with for packed matrices of one form.

    codes: as of `Codes`. halves: codes in a byte. origin: of codes. table: what codes of 4 bits stand for, four words
    of four bytes, the first one lowest; None where they stand for themselves. assembly: PTX that makes numbers of
    four bytes; "" where the compiler is to find out how. run: neighbouring columns that a lane holds of an instruction
    for 16 columns, 0 where the compiler is to bring codes to their lanes. group: columns of a group. span: columns
    whose products are summed up before they are scaled. bytes: of a row, which are multiplied at once. scale, offset:
    types of the groups' numbers, "" for no offsets. scale_span, offset_span: columns that share a factor of these, 0
    for no factors. sums: columns of a sum of the activations, which offsets are multiplied by. factor: what all scales
    are multiplied by.
    """

    codes: str
    halves: int
    origin: int
    table: tuple[int, ...] | None
    assembly: str
    run: int
    group: int
    span: int
    bytes: int
    scale: str
    scale_span: int
    offset: str
    offset_span: int
    sums: int
    factor: float

    def depths(self, columns: int) -> list[int]:
        """Return how many columns a tile may have: a group's numbers for it are one word, and share their factors."""
        bits = max(_bits(self.scale), _bits(self.offset))
        spans = [span for span in (self.scale_span, self.offset_span) if span]
        return [
            depth
            for depth in (256, 128, 64)
            if columns % depth == 0
            and depth % self.span == 0
            and (self.group % depth == 0 or depth % self.group == 0)
            and max(1, depth // self.group) * bits <= 64
            and all(span % depth == 0 or span >= columns for span in spans)
        ]


def _bits(kind: str) -> int:
    return {"": 0, "f32": 32, "f16": 16, "bf16": 16}.get(kind, 8)


def form_of(weight: PackedWeight, target: KernelTarget | None) -> Form:
    """Return what kernels are compiled with for a matrix. Raises ValueError, with the reason, where there are none."""
    packing, scales, offsets = weight.packing, weight.scales, weight.offsets
    table, factor = _table_words(packing.table)
    halves = 2 if packing.codes is Codes.BITS4 else 1
    if weight.columns % BLOCK_COLUMNS:
        raise ValueError(f"it has {weight.columns} columns, and {BLOCK_COLUMNS} must divide them")
    if not 0 <= packing.origin < 128:
        raise ValueError(f"its codes count from {packing.origin}, and 0 to 127 are known")
    group = _group(scales, weight.columns)
    if offsets is not None and _group(offsets, weight.columns) != group:
        raise ValueError(f"its offsets have groups of {offsets.group} columns, and its scales of {scales.group}")
    span = min(group, _MOST_SPAN if weight.columns % _MOST_SPAN == 0 else BLOCK_COLUMNS)
    exact = "bf16" if weight.dtype is torch.bfloat16 else "f16" if weight.dtype is torch.float16 else ""
    run = 0 if target is None else target.operand_run(16, 1)
    form = Form(
        codes=str(packing.codes),
        halves=halves,
        origin=packing.origin,
        table=table,
        assembly=_assembly(packing.codes, packing.origin, table, exact) if run and exact else "",
        run=run,
        group=group,
        span=span,
        bytes=min(64, span if halves == 1 or span <= 32 else span // 2),
        scale=_kind(scales),
        scale_span=_factor_span(scales, weight.columns),
        offset="" if offsets is None else _kind(offsets),
        offset_span=0 if offsets is None else _factor_span(offsets, weight.columns),
        sums=min(_SUMS, span),
        factor=factor,
    )
    if not form.depths(weight.columns):
        raise ValueError(f"no tile fits groups of {scales.group} of its {weight.columns} columns")
    return form


def _group(numbers: GroupNumbers, columns: int) -> int:
    """Return the columns of a group; of one that is a row, more than any tile has."""
    if numbers.group >= columns:
        return 1 << 20
    if numbers.group not in (16, 32, 64) and numbers.group % _MOST_SPAN:
        raise ValueError(f"it has groups of {numbers.group} columns, and 16, 32, 64 and multiples of 128 are known")
    return numbers.group


def _factor_span(numbers: GroupNumbers, columns: int) -> int:
    return 0 if numbers.factors is None else 1 << 20 if numbers.span >= columns else numbers.span


def _kind(numbers: GroupNumbers) -> str:
    if numbers.values.dtype not in _KINDS:
        raise ValueError(f"its groups' numbers are {numbers.values.dtype}")
    return _KINDS[numbers.values.dtype]


def _table_words(table: tuple[float, ...] | None) -> tuple[tuple[int, ...] | None, float]:
    """Return a table's numbers as whole ones of eight bits, in words, and what these are to be multiplied by."""
    if table is None:
        return None, 1.0
    for factor in (1.0, 0.5, 0.25):
        whole = [round(number / factor) for number in table]
        if all(number == one * factor and -128 <= one < 128 for number, one in zip(table, whole, strict=True)):
            bytes_of = [one & 255 for one in whole]
            return tuple(int.from_bytes(bytes(bytes_of[at : at + 4]), "little") for at in range(0, 16, 4)), factor
    raise ValueError(f"its table {table} is not one of whole numbers from -128 to 127, nor of halves or quarters")


_SPREAD = "prmt.b32 a, $IN, 0, 0x4140; prmt.b32 b, $IN, 0, 0x4342;"
"""Four bytes become the low bytes of four halves of words: bits of a number whose lowest place counts 1."""


def _assembly(codes: Codes, origin: int, table: tuple[int, ...] | None, exact: str) -> str:
    """Return PTX that makes pairs of numbers of four bytes: two words of low halves and two of high ones, or just two.

    exact: "bf16" or "f16". A number of 128 (1024 in float16) counts 1 in its lowest place, so that a code put there
    makes it 128 more than the code.
    """
    magic, one = {"bf16": (0x4300, 0x3F80), "f16": (0x6400, 0x3C00)}[exact]
    negative = magic | 0x8000

    def pair(number: int) -> str:
        return f"0x{number:04X}{number:04X}"

    def whole(out: int, word: str) -> str:
        """Signed bytes in a word's low bytes: their seven bits, less the eighth's place."""
        return (
            f"lop3.b32 c, {word}, 0x007F007F, {pair(magic)}, 0xEA; lop3.b32 d, {word}, 0x00800080, {pair(negative)}, "
            f"0xEA; fma.rn.{exact}x2 ${out}, c, one, d; "
        )

    def nibble(out: int, word: str) -> str:
        return f"lop3.b32 c, {word}, 0x000F000F, {pair(magic)}, 0xEA; fma.rn.{exact}x2 ${out}, c, one, bias; "

    if codes is Codes.BITS4 and table is not None:
        steps = ""
        for out in (0, 1):
            # Three bits of a code choose of either half of the table, the fourth one of both.
            steps += (
                f"and.b32 a, w, 0x77777777; prmt.b32 c, 0x{table[0]:08X}, 0x{table[1]:08X}, a; "
                f"prmt.b32 d, 0x{table[2]:08X}, 0x{table[3]:08X}, a; shr.b32 b, w, 1; "
                "lop3.b32 b, b, 0x44444444, 0x32103210, 0xEA; prmt.b32 e, c, d, b; "
                + whole(out, "e")
                + "shr.b32 e, e, 8; "
                + whole(out + 2, "e")
                + "shr.b32 w, w, 16; "
            )
        body = f"mov.b32 w, $IN; {steps}"
    elif codes is Codes.BITS4:
        high = "shr.b32 a, a, 4; shr.b32 b, b, 4; "
        body = (
            f"mov.b32 bias, {pair(negative | origin)}; {_SPREAD} "
            + (nibble(0, "a") + nibble(1, "b"))
            + (high + nibble(2, "a") + nibble(3, "b"))
        )
    elif codes is Codes.INT8 and origin == 0:
        body = f"{_SPREAD} " + whole(0, "a") + whole(1, "b")
    elif codes is Codes.FLOAT8:
        # Exponent and mantissa are put where the wider type has its own; what the exponents count from differs.
        shift, kept, factor = {"bf16": (4, 0x07F0, 0x7B80), "f16": (1, 0x3F80, 0x5C00)}[exact]
        body = f"mov.b32 one, {pair(factor)}; mov.b32 bias, 0x80008000; "
        for out, places in ((0, 0x1404), (1, 0x3424)):
            body += (
                f"prmt.b32 a, $IN, 0, 0x{places:X}; shr.b32 b, a, {shift}; and.b32 b, b, {pair(kept)}; "
                f"lop3.b32 a, a, 0x80008000, b, 0xEA; fma.rn.{exact}x2 ${out}, a, one, bias; "
            )
    else:
        return ""
    outputs = 4 if codes is Codes.BITS4 else 2
    registers = f".reg .b32 a, b, c, d, e, w, one, bias; mov.b32 one, {pair(one)}; "
    return "{ " + registers + body.replace("$IN", f"${outputs}") + "}"


@triton.jit
def _exactly(numbers, KIND: tl.constexpr):
    """Return whole numbers, of at most eight bits beside the sign, in a type that holds them."""
    wide = numbers.to(tl.float32)
    if tl.bfloat16 == KIND:
        # No bits are lost, and none need be rounded.
        return (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return wide.to(KIND)


@triton.jit
def _of_4_bits(codes, FORM: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers that codes 0 to 15, int32, stand for."""
    if FORM.table is not None:
        low = tl.where((codes & 4) != 0, FORM.table[1], FORM.table[0])
        high = tl.where((codes & 4) != 0, FORM.table[3], FORM.table[2])
        word = tl.where((codes & 8) != 0, high, low).to(tl.uint32)
        return _exactly((word >> ((codes & 3) * 8).to(tl.uint32)).to(tl.int8), KIND)
    return _exactly(codes - FORM.origin, KIND)


@triton.jit
def _widened(bits, KIND: tl.constexpr):
    """Return the numbers of float8_e4m3fn's bits, int32: those of float16 whose exponent counts from elsewhere."""
    numbers = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return (numbers.to(tl.float32) * 256.0).to(KIND)


@triton.jit
def _numbers(codes, FORM: tl.constexpr, KIND: tl.constexpr):
    """Return what bytes of codes [n, bytes] stand for: the first columns of each block, and the others, both [n, bytes]
    in the activations' type. Where a byte is one code both are the same."""
    if FORM.halves == 2:
        if FORM.assembly != "":
            low, high = tl.inline_asm_elementwise(
                FORM.assembly, "=r,=r,=r,=r,r", [codes], dtype=(KIND.value, KIND.value), is_pure=True, pack=4
            )
        else:
            wide = codes.to(tl.int32)
            low, high = _of_4_bits(wide & 15, FORM, KIND), _of_4_bits(wide >> 4, FORM, KIND)
        return low, high
    else:
        if FORM.assembly != "":
            numbers = tl.inline_asm_elementwise(
                FORM.assembly, "=r,=r,r", [codes], dtype=KIND.value, is_pure=True, pack=4
            )
        elif FORM.codes == "int8":
            numbers = _exactly(codes.to(tl.int8, bitcast=True).to(tl.int32) - FORM.origin, KIND)
        else:
            numbers = _widened(codes.to(tl.int32), KIND)
        return numbers, numbers


@triton.jit
def _at_lanes(tile, WIDTH: tl.constexpr, BYTES: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Return a tile [WIDTH, BYTES] in the order of rows and columns in which lanes multiply it, as `_orders` says."""
    if RUN == 0:
        return tile
    elif RUN == 4:
        tile = tl.reshape(tile, (WIDTH // (16 * WARPS), 2, WARPS, 8, 4, BYTES // 16, 4))
        return tl.reshape(tl.permute(tile, (0, 2, 1, 3, 5, 4, 6)), (WIDTH, BYTES))
    elif BYTES == 16:
        tile = tl.reshape(tile, (WIDTH // (16 * WARPS), 2, WARPS, 8, 4, 2, 2))
        return tl.reshape(tl.permute(tile, (0, 2, 1, 3, 5, 4, 6)), (WIDTH, BYTES))
    else:
        tile = tl.reshape(tile, (WIDTH // (16 * WARPS), 2, WARPS, 8, 4, BYTES // 32, 2, 2, 2))
        return tl.reshape(tl.permute(tile, (0, 2, 1, 3, 5, 7, 6, 4, 8)), (WIDTH, BYTES))


@triton.jit
def _orders(WIDTH: tl.constexpr, BYTES: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Return which row of a tile is read in each place, [WIDTH], and which byte of a row is multiplied there, [BYTES].

    A thread reads a quarter of a row's bytes. A lane multiplies two rows of each 16; of 16 columns it has two, and two
    more 8 further on. Where instructions take RUN = 4 bytes at a time, those two are of the next 16 columns. The other
    order is made such that an instruction has the same bytes in the same places.
    """
    rows, ks = tl.arange(0, WIDTH), tl.arange(0, BYTES)
    if RUN == 0:
        return rows, ks
    else:
        slab: tl.constexpr = 16 * WARPS
        rows = rows // slab * slab + rows // 8 % WARPS * 16 + rows // (8 * WARPS) % 2 * 8 + rows % 8
        if RUN == 4:
            ks = ks // 4 % 4 * (BYTES // 4) + ks // 16 * 4 + ks % 4
        elif BYTES == 16:
            ks = ks // 2 % 4 * 4 + ks // 8 * 2 + ks % 2
        else:
            ks = ks // 2 % 4 * (BYTES // 4) + ks // 32 * 8 + ks // 8 % 2 * 4 + ks // 16 % 2 * 2 + ks % 2
        return rows, ks


@triton.jit
def _number(word, index, KIND: tl.constexpr):
    """Return the number at an index of the numbers that a word holds, the first one lowest, in float32."""
    if KIND == "f32":
        return (word >> index * 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == "f16" or KIND == "bf16":
        bits = (word >> index * 16).to(tl.int16)
        return bits.to(tl.float16 if KIND == "f16" else tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        bits = (word >> index * 8).to(tl.int32)
        if KIND == "u8":
            return (bits & 255).to(tl.float32)
        elif KIND == "i8":
            return ((bits << 24) >> 24).to(tl.float32)
        elif KIND == "e4m3":
            return _widened(bits & 255, tl.float32)
        else:
            # float8_e8m0fnu is float32's exponent; its smallest number is a subnormal one there.
            exponent = bits & 255
            return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _words(numbers, ns, k, depth, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """Return the words of rows ns that hold the numbers of groups from column k on."""
    if DEPTH >= GROUP:
        return tl.load(numbers + ns * (depth // DEPTH) + k // DEPTH)
    else:
        return tl.load(numbers + ns * tl.cdiv(depth, GROUP) + k // GROUP)


@triton.jit
def _factors(factors, ns, k, depth, SPAN: tl.constexpr):
    """Return what the numbers of rows ns at column k are multiplied by."""
    return tl.load(factors + ns * tl.cdiv(depth, SPAN) + k // SPAN).to(tl.float32)


@triton.jit
def _group_numbers(values, factors, ns, k, depth, SPAN: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """Return the words and the factors of a tile; where there are none of either, something to stand for it."""
    word = ns
    if values is not None:
        word = _words(values, ns, k, depth, GROUP, DEPTH)
    factor = tl.full(ns.shape, 1.0, tl.float32)
    if SPAN > 0:
        factor = _factors(factors, ns, k, depth, SPAN)
    return word, factor


@triton.jit
def _scaled(
    total, product, words, factor, offset_words, offset_factor, x_sums, INDEX: tl.constexpr, FORM: tl.constexpr
):
    """Add the product of a span to the total: both float32 [width, rows]."""
    scale = _number(words, INDEX, FORM.scale) * factor
    total += product * scale[:, None]
    if FORM.offset != "":
        offset = _number(offset_words, INDEX, FORM.offset) * offset_factor
        total += offset[:, None] * x_sums[None, :]
    return total


@triton.jit
def _sums_of_span(sums, present, SPAN: tl.constexpr, SUMS: tl.constexpr):
    """Return the sums of a span of activations whose first ones are at `sums` [rows of ms], float32."""
    result = tl.load(sums, mask=present, other=0.0)
    for part in tl.static_range(1, SPAN // SUMS):
        result += tl.load(sums + part, mask=present, other=0.0)
    return result


@triton.constexpr_function
def _column(at: int, half: int, halves: int) -> int:
    """Return the column of the first code in the byte of a tile's row, or of the second one there (half 1)."""
    return at // 32 * 64 + at % 32 + 32 * half if halves == 2 else at


@triton.constexpr_function
def _ends_span(at: int, half: int, halves: int, size: int, span: int) -> bool:
    """Return whether a span ends with these codes of bytes `at` to `at + size`.

    Of 4-bit codes a span has both halves of its bytes, or one.
    """
    return span <= 32 or half == 1 if halves == 2 else (at + size) % span == 0


@triton.jit
def packed_sums(
    x, codes, scales, scale_factors, offsets, offset_factors, sums, ms, block, first, last, rows, width, depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, PAIRED: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return the sums over columns first to last of a tile's products, float32 [BLOCK_ROWS, BLOCK_WIDTH], and those
    with the rows `width` further down where the matrix is PAIRED.

    x: [rows, depth]. codes: uint8 [width, depth / halves]. scales, offsets: words, as `_words` reads them. sums: of
    activations, float32 [rows, depth / FORM.sums].
    """
    kind: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = FORM.bytes
    run: tl.constexpr = FORM.run
    halves: tl.constexpr = FORM.halves
    places, ks = tl.arange(0, BLOCK_WIDTH), tl.arange(0, size)
    read, order = _orders(BLOCK_WIDTH, size, run, WARPS)
    # The last block reads some rows twice rather than rows that are not there.
    read = tl.minimum(block * BLOCK_WIDTH + read, width - 1).to(tl.int64)
    ns = tl.minimum(block * BLOCK_WIDTH + places, width - 1)
    c_at = codes + read[:, None] * (depth // halves) + (first // halves + ks)[None, :]
    if run > 0:
        c_at = tl.max_contiguous(tl.multiple_of(c_at, (1, size // 4)), (1, size // 4))
    column = order // 32 * 64 + order % 32 if halves == 2 else order
    if run > 0:
        column = tl.max_contiguous(tl.multiple_of(column, run), run)
    present = (ms < rows)[None, :]
    x_at = x + ms[None, :] * depth + first + column[:, None]
    s_at = ms
    if FORM.offset != "":
        s_at = sums + ms * (depth // FORM.sums) + first // FORM.sums
    other_at = c_at + width.to(tl.int64) * (depth // halves)
    begin = tl.minimum(first, depth - BLOCK_DEPTH)
    words, factor = _group_numbers(scales, scale_factors, ns, begin, depth, FORM.scale_span, FORM.group, BLOCK_DEPTH)
    o_words, o_factor = _group_numbers(
        offsets, offset_factors, ns, begin, depth, FORM.offset_span, FORM.group, BLOCK_DEPTH
    )
    us = ns + width if PAIRED else ns
    u_words, u_factor, uo_words, uo_factor = words, factor, o_words, o_factor
    if PAIRED:
        u_words, u_factor = _group_numbers(
            scales, scale_factors, us, begin, depth, FORM.scale_span, FORM.group, BLOCK_DEPTH
        )
        uo_words, uo_factor = _group_numbers(
            offsets, offset_factors, us, begin, depth, FORM.offset_span, FORM.group, BLOCK_DEPTH
        )
    total = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
    other = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
    for k in tl.range(first, last, BLOCK_DEPTH, num_stages=STAGES):
        # The next tile's numbers are on their way while this one is multiplied; behind the last one, its own again.
        then = tl.minimum(k + BLOCK_DEPTH, last - BLOCK_DEPTH)
        next_words, next_factor = _group_numbers(
            scales, scale_factors, ns, then, depth, FORM.scale_span, FORM.group, BLOCK_DEPTH
        )
        next_o_words, next_o_factor = _group_numbers(
            offsets, offset_factors, ns, then, depth, FORM.offset_span, FORM.group, BLOCK_DEPTH
        )
        next_u_words, next_u_factor, next_uo_words, next_uo_factor = u_words, u_factor, uo_words, uo_factor
        if PAIRED:
            next_u_words, next_u_factor = _group_numbers(
                scales, scale_factors, us, then, depth, FORM.scale_span, FORM.group, BLOCK_DEPTH
            )
            next_uo_words, next_uo_factor = _group_numbers(
                offsets, offset_factors, us, then, depth, FORM.offset_span, FORM.group, BLOCK_DEPTH
            )
        product = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
        u_product = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
        for turn in tl.static_range(BLOCK_DEPTH // halves // size):
            low, high = _numbers(tl.load(c_at + turn * size), FORM, kind)
            u_low, u_high = low, high
            if PAIRED:
                u_low, u_high = _numbers(tl.load(other_at + turn * size), FORM, kind)
            for half in tl.static_range(halves):
                x_tile = tl.load(x_at + _column(turn * size, half, halves), mask=present, other=0.0)
                tile = _at_lanes(low if half == 0 else high, BLOCK_WIDTH, size, run, WARPS)
                product = tl.dot(tile, x_tile, product, input_precision=PRECISION)
                if PAIRED:
                    tile = _at_lanes(u_low if half == 0 else u_high, BLOCK_WIDTH, size, run, WARPS)
                    u_product = tl.dot(tile, x_tile, u_product, input_precision=PRECISION)
                if _ends_span(turn * size, half, halves, size, FORM.span):
                    x_sums = places
                    if FORM.offset != "":
                        start = _column(turn * size, half, halves) // FORM.span * (FORM.span // FORM.sums)
                        x_sums = _sums_of_span(s_at + start, ms < rows, FORM.span, FORM.sums)
                    total = _scaled(
                        total, product, words, factor, o_words, o_factor, x_sums,
                        _column(turn * size, half, halves) // FORM.group, FORM,
                    )  # fmt: skip
                    product = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
                    if PAIRED:
                        other = _scaled(
                            other, u_product, u_words, u_factor, uo_words, uo_factor, x_sums,
                            _column(turn * size, half, halves) // FORM.group, FORM,
                        )  # fmt: skip
                        u_product = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
        words, factor, o_words, o_factor = next_words, next_factor, next_o_words, next_o_factor
        u_words, u_factor, uo_words, uo_factor = next_u_words, next_u_factor, next_uo_words, next_uo_factor
        c_at += BLOCK_DEPTH // halves
        other_at += BLOCK_DEPTH // halves
        x_at += BLOCK_DEPTH
        if FORM.offset != "":
            s_at += BLOCK_DEPTH // FORM.sums
    if FORM.factor != 1.0:
        total *= FORM.factor
        other *= FORM.factor
    return tl.trans(total), tl.trans(other)


@triton.jit
def _sums(x, sums, depth, BLOCK: tl.constexpr, SUMS: tl.constexpr):
    row = tl.program_id(0)
    ks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + row * depth + ks, mask=ks < depth, other=0.0).to(tl.float32)
    each: tl.constexpr = BLOCK // SUMS
    groups = tl.program_id(1) * each + tl.arange(0, each)
    result = row_sums(tl.reshape(wide, (each, SUMS)), each, SUMS)
    tl.store(sums + row * (depth // SUMS) + groups, result, mask=groups * SUMS < depth)


def group_sums(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sums of every `width` columns of rows x [n, depth], float32 [n, depth / width]."""
    rows, depth = x.shape
    sums = torch.empty((rows, depth // width), dtype=torch.float32, device=x.device)
    _sums[(rows, triton.cdiv(depth, 1024))](x, sums, depth, BLOCK=1024, SUMS=width, num_warps=4)
    return sums


def wants_sums(weight: Weight) -> bool:
    """Return whether a matrix, or a part of it, is multiplied with the sums of every 32 columns of the activations."""
    if isinstance(weight, StackedWeight):
        return any(map(wants_sums, weight.parts))
    return isinstance(weight, PackedWeight) and weight.offsets is not None and weight.offsets.group % _SUMS == 0


def as_words(numbers: GroupNumbers | None, form: Form, depth: int) -> torch.Tensor | None:
    """Return groups' numbers as words, each of those of `depth` neighbouring columns."""
    if numbers is None:
        return None
    size = numbers.values.dtype.itemsize * 8 * max(1, depth // form.group)
    return numbers.values.view(_WORDS[size])
