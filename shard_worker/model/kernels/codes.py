"""Sums of products with packed matrices: how tiles of codes become operands of matrix instructions.

Codes are small whole numbers, or numbers of eight bits, which the activations' type holds exactly. They are multiplied
as they are; the sum over a group of columns, in float32, is then multiplied by the group's scale, and what the group
adds to each of its elements by the sum of the activations there. So no element is rounded before it is added up. Codes
of MXFP4 are multiplied by their scales before, which are powers of two, so that nothing is rounded either. Where groups
have offsets, what is multiplied may be a code and a number beside it, if that takes fewer instructions to make: the
offsets take it off again.

Codes are read a tile ahead, from memory to registers: no two warps multiply by the same ones, so that nothing is won
by bringing them to where others see them. On NVIDIA's GPUs they lie in memory as `weights.tiled` says, so that a thread
reads those that its lane multiplies, 16 bytes at a time.

A matrix instruction of theirs sums up the products of 16 columns at once, whatever their order. Which 16 they are is
the same for any number of rows, so that a row's bits are too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shard_worker.device.devices import KernelTarget
from shard_worker.model.kernels.sums import row_sums
from shard_worker.weights.packed import Codes
from shard_worker.weights.tiled import SHORT_ORIGIN, TiledNumbers, TiledWeight
from shard_worker.weights.weight import StackedWeight, Weight

_APART = tl.constexpr(8)
"""Columns of the smallest tile of activations, in which the groups of a single row stand apart."""

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


class Form(NamedTuple):
    """What a kernel is compiled with for packed matrices of one form.

    codes: as of `Codes`. halves: codes in a byte. origin: of codes. table: what codes of 4 bits stand for, four
    words of four bytes, the first one lowest; None where they stand for themselves. assembly: PTX that makes
    numbers of four bytes; "" where the compiler is to find out how. lane_columns, swapped: as of `Tiling`.
    chunk: bytes of a row in a tile. columns: of the one or two tiles that are multiplied in a turn, whose groups'
    numbers are one word. group: columns of a group. span: columns whose products are summed up before they are
    scaled. bytes: of them, in a row. scale, offset: types of the groups' numbers, "" for no offsets. scale_span,
    offset_span: columns that share a factor of these, 0 for no factors. sums: columns of a sum of the activations,
    which offsets are multiplied by. factor: what all scales are multiplied by. excess: how much more the numbers are
    that `assembly` makes than what codes stand for, which offsets make up for. scaled: as of `Tiling`; then `assembly`
    takes what numbers are multiplied by too.
    """

    codes: str
    halves: int
    origin: int
    table: tuple[int, ...] | None
    assembly: str
    lane_columns: int
    swapped: bool
    chunk: int
    columns: int
    group: int
    span: int
    bytes: int
    scale: str
    scale_span: int
    offset: str
    offset_span: int
    sums: int
    factor: float
    excess: int
    scaled: bool


def form_of(weight: TiledWeight) -> Form:
    """Return what kernels are compiled with for a matrix. Raises ValueError, with the reason, where there are none."""
    packing, tiling, scales, offsets = weight.packing, weight.tiling, weight.scales, weight.offsets
    origin = packing.origin + SHORT_ORIGIN if packing.short else packing.origin
    table, factor = _table_words(packing.table)
    halves = 2 if packing.codes is Codes.BITS4 else 1
    span = min(tiling.group, tiling.columns, _MOST_SPAN)
    exact = "bf16" if weight.dtype is torch.bfloat16 else "f16" if weight.dtype is torch.float16 else ""
    assembly, excess = "", 0
    if tiling.scaled:
        assembly, factor = _SCALED_ASSEMBLY, 2.0**_LOWERED
    elif tiling.lane_columns and exact:
        assembly, excess = _assembly(
            packing.codes, origin, table, exact, short=packing.short, exceeds=offsets is not None
        )
    return Form(
        codes=str(packing.codes),
        halves=halves,
        origin=origin,
        table=table,
        assembly=assembly,
        lane_columns=tiling.lane_columns,
        swapped=tiling.swapped,
        chunk=tiling.chunk,
        columns=tiling.columns,
        group=tiling.group,
        span=span,
        bytes=min(tiling.chunk, span if halves == 1 or span <= 32 else span // 2),
        scale=_kind(scales),
        scale_span=scales.span,
        offset="" if offsets is None else _kind(offsets),
        offset_span=0 if offsets is None else offsets.span,
        sums=min(_SUMS, span),
        factor=factor,
        excess=excess,
        scaled=tiling.scaled,
    )


def _kind(numbers: TiledNumbers) -> str:
    if numbers.dtype not in _KINDS:
        raise ValueError(f"its groups' numbers are {numbers.dtype}")
    return _KINDS[numbers.dtype]


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


def multiplies_apart(form: Form) -> bool:
    """Return whether the groups of a single row are multiplied as if they were rows of their own.

    A matrix instruction takes 8 rows of activations at least. In each of them stands one group of the only row, and
    zeros in place of the others, so that a turn's products are in one place when they are to be scaled: by a thread for
    each row of weights, rather than by four that scale zeros too, group after group.
    """
    return form.lane_columns > 0 and not form.scaled and 4 <= form.columns // form.span <= 8


def multiplies_together(target: KernelTarget | None, width: int, height: int, warps: int) -> bool:
    """Return whether a tile [width, columns] is multiplied by so many rows of activations with Hopper's instructions
    for four warps, where Triton chooses them."""
    return target is not None and target.tensor_engine and warps % 4 == 0 and width % 64 == 0 and height >= 16


_LOWERED = 16
"""Numbers that are scaled are made 2**16 times too small, so that the largest are none that bfloat16 does not hold."""

_RAISED = tl.constexpr((111 << 7) * 0x10001)
"""What is added to the bits of two scales, which are half of what they stand for in bfloat16, to make of them what the
numbers are multiplied by that `_SCALED_ASSEMBLY` makes at first: it makes up for 2**-126, and leaves 2**-_LOWERED."""

_SCALED_ASSEMBLY = (
    "{ .reg .b32 a, b, zero; mov.b32 zero, 0x80008000; "
    + "".join(
        f"{field} and.b32 a, a, 0x01C001C0; {sign} lop3.b32 a, b, 0x80008000, a, 0xEA; "
        f"fma.rn.bf16x2 ${out}, a, ${5 + out // 2}, zero; "
        for out, field, sign in (
            (0, "shl.b32 a, $4, 6;", "shl.b32 b, $4, 12;"),
            (1, "shr.u32 a, $4, 2;", "shl.b32 b, $4, 4;"),
            (2, "shl.b32 a, $4, 2;", "shl.b32 b, $4, 8;"),
            (3, "shr.u32 a, $4, 6;", "mov.b32 b, $4;"),
        )
    )
    + "}"
)
"""PTX that makes numbers of 8 codes of 4 bits (a sign, two bits of an exponent and one of a mantissa), times what two
words say: of the low half of each byte, and of the high one. Exponent and mantissa are put where bfloat16 has the
lowest bits of its exponent and the highest one of its mantissa, as of numbers 2**126 times smaller, whose smallest are
subnormal as well."""

_SPREAD = "prmt.b32 a, $IN, 0, 0x4140; prmt.b32 b, $IN, 0, 0x4342;"
"""Four bytes become the low bytes of four halves of words: bits of a number whose lowest place counts 1."""


def _assembly(
    codes: Codes, origin: int, table: tuple[int, ...] | None, exact: str, *, short: bool, exceeds: bool
) -> tuple[str, int]:
    """Return PTX that makes pairs of numbers of four bytes: two words of low halves and two of high ones, or just two;
    and how much more these are than what the codes stand for.

    exact: "bf16" or "f16". short: as of `Packing`, with the codes held as `TiledWeight` holds them. exceeds: whether
    they may be more. A number of 128 (1024 in float16) counts 1 in its lowest place, so that a code put there
    makes it 128 more than the code.
    """
    magic, one, most = {"bf16": (0x4300, 0x3F80, 128), "f16": (0x6400, 0x3C00, 1024)}[exact]
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
        if exceeds:
            return f"lop3.b32 ${out}, {word}, 0x000F000F, {pair(magic)}, 0xEA; "
        return f"lop3.b32 c, {word}, 0x000F000F, {pair(magic)}, 0xEA; fma.rn.{exact}x2 ${out}, c, one, bias; "

    excess = 0
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
        excess = most + origin if exceeds else 0
        body = f"mov.b32 w, $IN; mov.b32 bias, {pair(negative | origin)}; " + nibble(0, "w")
        for out, shift in ((1, 8), (2, 4), (3, 12)):
            body += f"shr.b32 a, w, {shift}; " + nibble(out, "a")
    elif short:
        excess = most + origin if exceeds else 0
        body = f"mov.b32 bias, {pair(negative | origin)}; mov.b32 d, {pair(magic)}; "
        for out, places in ((0, 0x5150), (1, 0x5352)):
            made = f"${out}" if exceeds else "c"
            body += f"prmt.b32 {made}, $IN, d, 0x{places:X}; "
            body += "" if exceeds else f"fma.rn.{exact}x2 ${out}, c, one, bias; "
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
        return "", 0
    outputs = 4 if codes is Codes.BITS4 else 2
    registers = f".reg .b32 a, b, c, d, e, w, one, bias; mov.b32 one, {pair(one)}; "
    return "{ " + registers + body.replace("$IN", f"${outputs}") + "}", excess


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
    return _exactly(codes - FORM.origin + FORM.excess, KIND)


@triton.jit
def _widened(bits, KIND: tl.constexpr):
    """Return the numbers of float8_e4m3fn's bits, int32: those of float16 whose exponent counts from elsewhere."""
    numbers = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return (numbers.to(tl.float32) * 256.0).to(KIND)


@triton.jit
def _two_scales(words, INDEX: tl.constexpr, KIND: tl.constexpr):
    """Return what numbers are multiplied by that `_SCALED_ASSEMBLY` makes, for two of them each: the bfloat16 at an
    index of those that words hold."""
    bits = _half(words, INDEX, KIND).to(tl.int32)
    if INDEX % 2:
        bits = bits >> 16
    return (bits & 0xFFFF) * 0x10001 + _RAISED


@triton.jit
def _scaled_numbers(
    words, scales, AT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr,
    TOGETHER: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return what `_numbers` does, times scales: those of a turn, words [WIDTH], of whose bytes `words` are those from
    AT on."""
    scale_kind: tl.constexpr = FORM.scale
    of_low = _two_scales(scales, _index(AT, 0, FORM.halves, FORM.group), scale_kind)
    of_high = _two_scales(scales, _index(AT, 1, FORM.halves, FORM.group), scale_kind)
    low, more_low, high, more_high = tl.inline_asm_elementwise(
        FORM.assembly, "=r,=r,=r,=r,r,r,r", [words, of_low[:, None], of_high[:, None]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    lows = _placed(_pairs(low, more_low, KIND), WIDTH, SIZE, WARPS, TOGETHER, FORM)
    return lows, _placed(_pairs(high, more_high, KIND), WIDTH, SIZE, WARPS, TOGETHER, FORM)


@triton.jit
def _numbers(
    words, WIDTH: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr, TOGETHER: tl.constexpr, FORM: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Return what codes in words [WIDTH, SIZE / 4] stand for, in rows and columns as they are multiplied: the first
    columns of each block, and the others, both [WIDTH, SIZE] in the activations' type. Where a byte is one code both
    are the same."""
    if FORM.assembly != "":
        if FORM.halves == 2:
            low, more_low, high, more_high = tl.inline_asm_elementwise(
                FORM.assembly, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True,
                pack=1,
            )  # fmt: skip
            lows = _placed(_pairs(low, more_low, KIND), WIDTH, SIZE, WARPS, TOGETHER, FORM)
            return lows, _placed(_pairs(high, more_high, KIND), WIDTH, SIZE, WARPS, TOGETHER, FORM)
        else:
            low, more_low = tl.inline_asm_elementwise(
                FORM.assembly, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
            numbers = _placed(_pairs(low, more_low, KIND), WIDTH, SIZE, WARPS, TOGETHER, FORM)
            return numbers, numbers
    else:
        first, second = tl.join(words & 255, (words >> 16) & 255), tl.join((words >> 8) & 255, (words >> 24) & 255)
        if FORM.swapped:
            first, second = tl.join(words & 255, (words >> 8) & 255), tl.join((words >> 16) & 255, (words >> 24) & 255)
        codes = _placed(tl.join(first, second), WIDTH, SIZE, WARPS, TOGETHER, FORM)
        if FORM.halves == 2:
            return _of_4_bits(codes & 15, FORM, KIND), _of_4_bits(codes >> 4, FORM, KIND)
        elif FORM.codes == "int8":
            numbers = _exactly(((codes << 24) >> 24) - FORM.origin + FORM.excess, KIND)
            return numbers, numbers
        else:
            numbers = _widened(codes, KIND)
            return numbers, numbers


@triton.jit
def _pairs(first, second, KIND: tl.constexpr):
    """Return the numbers in words [n, m] of two, those of `second` behind those of `first`: [n, m, 2, 2]."""
    low = tl.join(first.to(tl.int16), second.to(tl.int16))
    high = tl.join((first >> 16).to(tl.int16), (second >> 16).to(tl.int16))
    return tl.join(low, high).to(KIND, bitcast=True)


@triton.jit
def _placed(
    numbers, WIDTH: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr, TOGETHER: tl.constexpr, FORM: tl.constexpr
):
    """Return numbers [WIDTH, SIZE] as they are multiplied, which come in words as they are read: rows in order, and
    columns in that of `_columns`."""
    if FORM.lane_columns == 0:
        return tl.reshape(numbers, (WIDTH, SIZE))
    else:
        # The rows of a warp are 16 in a row, of which a lane reads two; of columns it reads words, with two halves.
        pair: tl.constexpr = 2 if SIZE >= 32 else 1
        numbers = tl.reshape(numbers, (WIDTH // (16 * WARPS), 2, WARPS, 8, 4, SIZE // 16 // pair, pair, 2, 2))
        if FORM.lane_columns == 2:
            numbers = tl.permute(numbers, (0, 2, 1, 3, 5, 6, 7, 4, 8))
        elif TOGETHER:
            numbers = tl.permute(numbers, (0, 2, 1, 3, 5, 7, 6, 4, 8))
        else:
            numbers = tl.permute(numbers, (0, 2, 1, 3, 5, 6, 4, 7, 8))
        return tl.reshape(numbers, (WIDTH, SIZE))


@triton.jit
def _columns(SIZE: tl.constexpr, FORM: tl.constexpr):
    """Return the columns of the first numbers in bytes, in the order in which `_placed` has them: [SIZE]."""
    places = tl.arange(0, SIZE)
    return places // 32 * 64 + places % 32 if FORM.halves == 2 else places


@triton.jit
def _exchanged(places, SIZE: tl.constexpr):
    """Return the columns that stand in places of `exchange_columns`."""
    if SIZE >= 32:
        return places // 32 * 32 + places // 8 % 2 * 16 + places // 2 % 4 * 4 + places // 16 % 2 * 2 + places % 2
    else:
        return places // 16 * 16 + places // 2 % 4 * 4 + places // 8 % 2 * 2 + places % 2


@triton.jit
def _parts(words, WIDTH: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Return the parts of a tile's words [WIDTH, CHUNK / 4] that are multiplied at once, [WIDTH, SIZE / 4] each: four,
    of which only CHUNK / SIZE are different."""
    if CHUNK == SIZE:
        return words, words, words, words
    elif CHUNK == 2 * SIZE:
        if LANES:
            apart = tl.permute(tl.reshape(words, (WIDTH, 4, 2, SIZE // 16)), (0, 1, 3, 2))
        else:
            apart = tl.permute(tl.reshape(words, (WIDTH, 2, 4, SIZE // 16)), (0, 2, 3, 1))
        first, second = tl.split(apart)
        first, second = tl.reshape(first, (WIDTH, SIZE // 4)), tl.reshape(second, (WIDTH, SIZE // 4))
        return first, second, second, second
    else:
        if LANES:
            apart = tl.reshape(words, (WIDTH, 4, 2, 2))
        else:
            apart = tl.permute(tl.reshape(words, (WIDTH, 2, 2, 4)), (0, 3, 1, 2))
        even, odd = tl.split(apart)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _read_rows(WIDTH: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Return which row of a tile is read in each place, [WIDTH]: a lane multiplies two rows of each 16."""
    rows = tl.arange(0, WIDTH)
    if LANES:
        slab: tl.constexpr = 16 * WARPS
        rows = rows // slab * slab + rows // 8 % WARPS * 16 + rows // (8 * WARPS) % 2 * 8 + rows % 8
    return rows


@triton.constexpr_function
def _column(at: int, half: int, halves: int) -> int:
    """Return the column of the first code in the byte of a tile's row, or of the second one there (half 1)."""
    return at // 32 * 64 + at % 32 + 32 * half if halves == 2 else at


@triton.constexpr_function
def _index(at: int, half: int, halves: int, group: int) -> int:
    """Return the index of the group of `_column`, of groups of so many columns."""
    return (at // 32 * 64 + at % 32 + 32 * half if halves == 2 else at) // group


@triton.constexpr_function
def _shift(index: int, kind: str) -> int:
    """Return at which bit of a word the number at an index begins."""
    return index * (32 if kind == "f32" else 16 if kind in ("f16", "bf16") else 8)


@triton.constexpr_function
def _ends_span(at: int, half: int, halves: int, size: int, span: int) -> bool:
    """Return whether a span ends with these codes of bytes `at` to `at + size`.

    Of 4-bit codes a span has both halves of its bytes, or one.
    """
    return span <= 32 or half == 1 if halves == 2 else (at + size) % span == 0


@triton.constexpr_function
def _span_that_ends(place: int, halves: int, size: int, span: int) -> int:
    """Return the index of the span of a turn that ends in a place of the order in which `size` bytes of both tiles
    after each other end them."""
    ends = [
        _index(at, half, halves, span)
        for at in range(0, (place + 2) * span, size)
        for half in range(halves)
        if _ends_span(at, half, halves, size, span)
    ]
    return ends[place]


@triton.constexpr_function
def _byte_of_float(index: int) -> str:
    """Return PTX that makes 2**23 and a byte of a word a float32: at that exponent the lowest place counts 1."""
    return f"prmt.b32 $0, $1, 0x4B000000, 0x754{index % 4};"


@triton.jit
def _half(word, INDEX: tl.constexpr, KIND: tl.constexpr):
    """Return the half of a long word that holds the number at an index: instructions for 64 bits are slow."""
    if word.dtype.primitive_bitwidth == 64:
        return (word >> 32 if _shift(INDEX, KIND) >= 32 else word).to(tl.int32)
    else:
        return word


@triton.jit
def _multiple(word, factor, INDEX: tl.constexpr, KIND: tl.constexpr, BY_FMA: tl.constexpr):
    """Return `_number` times a factor, rounded once. BY_FMA: without a conversion of bytes, which GPUs do at an eighth
    of the rate at which they multiply."""
    if BY_FMA and (KIND == "u8" or KIND == "i8"):
        bits = _half(word, INDEX, KIND).to(tl.int32)
        if KIND == "i8":
            bits ^= -0x7F7F7F80
        raised = tl.inline_asm_elementwise(
            _byte_of_float(INDEX), "=r,r", [bits], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
        if KIND == "i8":
            # A product of what was added has too many places: 2**23, and 128 where the sign was turned over.
            return (raised - 8388736.0) * factor
        return tl.fma(raised, factor, -8388608.0 * factor)
    else:
        return _number(word, INDEX, KIND) * factor


@triton.jit
def _number(word, INDEX: tl.constexpr, KIND: tl.constexpr):
    """Return the number at an index of the numbers that a word holds, the first one lowest, in float32."""
    bits = _half(word, INDEX, KIND)
    if _shift(INDEX, KIND) % 32 > 0:
        bits = bits >> (_shift(INDEX, KIND) % 32)
    if KIND == "f32":
        return bits.to(tl.float32, bitcast=True)
    elif KIND == "f16" or KIND == "bf16":
        return bits.to(tl.int16).to(tl.float16 if KIND == "f16" else tl.bfloat16, bitcast=True).to(tl.float32)
    elif KIND == "u8":
        return (bits.to(tl.int32) & 255).to(tl.float32)
    elif KIND == "i8":
        return bits.to(tl.int8).to(tl.float32)
    elif KIND == "e4m3":
        return _widened(bits.to(tl.int32) & 255, tl.float32)
    else:
        # float8_e8m0fnu is float32's exponent; its smallest number is a subnormal one there.
        exponent = bits.to(tl.int32) & 255
        return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _group_numbers(values, factors, ns, k, height, SPAN: tl.constexpr, WORD: tl.constexpr):
    """Return the words and the factors of rows ns at column k; where there are none of either, something for it.

    height: rows of the matrix. WORD: columns of a word.
    """
    word = ns
    if values is not None:
        word = tl.load(values + k // WORD * height + ns)
    factor = tl.full(ns.shape, 1.0, tl.float32)
    if SPAN > 0:
        factor = tl.load(factors + k // SPAN * height + ns).to(tl.float32)
    return word, factor


@triton.jit
def _scaled(
    total, product, words, factor, offset_words, offset_factor, x_sums, INDEX: tl.constexpr, BY_FMA: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Add the product of a span to the total: both float32 [width, rows]. Offsets take off what `Form.excess` adds."""
    # Triton 3.6 takes strings of a tuple for constants only by a name of their own.
    scale_kind: tl.constexpr = FORM.scale
    scale = _multiple(words, factor, INDEX, scale_kind, BY_FMA)
    total += product * scale[:, None]
    if FORM.offset != "":
        offset_kind: tl.constexpr = FORM.offset
        offset = _multiple(offset_words, offset_factor, INDEX, offset_kind, BY_FMA)
        if FORM.excess:
            offset = tl.fma(scale, -1.0 * FORM.excess, offset)
        total += offset[:, None] * x_sums[None, :]
    return total


@triton.jit
def _column_of(tile, AT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a column of a tile [ROWS, COLUMNS], whose numbers of columns is a power of two: [ROWS]."""
    if COLUMNS == 1:
        return tl.reshape(tile, (ROWS,))
    else:
        half: tl.constexpr = COLUMNS // 2
        first, second = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, half)), (0, 2, 1)))
        if half > AT:
            return _column_of(first, AT, ROWS, half)
        else:
            return _column_of(second, AT - half, ROWS, half)


@triton.jit
def _sums_of_span(
    sums, tile, present, AT: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
    BY_TURN: tl.constexpr,
):  # fmt: skip
    """Return the sums of a span of activations, float32 [ROWS]: of COUNT columns of those of a turn, which are at
    `sums` [ROWS], and where they are read BY_TURN in a tile [ROWS, SUMS]."""
    result = _column_of(tile, AT, ROWS, SUMS) if BY_TURN else tl.load(sums + AT, mask=present, other=0.0)
    for at in tl.static_range(AT + 1, AT + COUNT):
        result += _column_of(tile, at, ROWS, SUMS) if BY_TURN else tl.load(sums + at, mask=present, other=0.0)
    return result


@triton.jit
def _scaled_apart(
    total, products, words, factor, offset_words, offset_factor, sums, sums_tile, present, AT: tl.constexpr,
    WIDTH: tl.constexpr, SUMS: tl.constexpr, BY_TURN: tl.constexpr, BY_FMA: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """As `_scaled`, of a single row: total is [width, 1], and products are those of all spans of a turn."""
    x_sums = sums
    if FORM.offset != "":
        each: tl.constexpr = FORM.span // FORM.sums
        x_sums = _sums_of_span(sums, sums_tile, present, AT * each, each, 1, SUMS, BY_TURN)
    return _scaled(
        total, _column_of(products, AT, WIDTH, _APART)[:, None], words, factor, offset_words, offset_factor, x_sums,
        AT * FORM.span // FORM.group, BY_FMA, FORM,
    )  # fmt: skip


@triton.jit
def _tile_at(codes, rows, held, chunk: tl.constexpr):
    """Return where rows begin in a matrix of tiles whose rows have `held` bytes, in words."""
    return codes + rows // 16 * (4 * held) + rows % 16 * (chunk // 4)


@triton.jit
def _present(columns, ms, rows, APART: tl.constexpr, SPAN: tl.constexpr):
    """Return which elements of a tile of activations there are, [columns, rows], or one of these for all of either.

    columns: of the turn. APART: as of `multiplies_apart`; else rows ms of the activations are in the tile.
    """
    present = (ms < rows)[None, :]
    if APART > 0:
        # Said to the compiler, which otherwise copies activations one by one.
        spans = tl.max_constancy(columns // SPAN, SPAN)
        present = present & (tl.arange(0, APART)[None, :] == spans[:, None])
    return present


@triton.jit
def _read_turn(
    c_at, o_at, at, scales, scale_factors, offsets, offset_factors, ns, us, height,
    BLOCK_DEPTH: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Read a turn, the columns from `at` on: the codes of one or two tiles, and of the ups where the matrix is PAIRED;
    then the scales and offsets of rows ns, and those of the ups' rows us, as `_group_numbers` has them.

    c_at, o_at: where the codes begin, and those of the ups.
    """
    chunks: tl.constexpr = BLOCK_DEPTH // (FORM.halves * FORM.chunk)
    each: tl.constexpr = 4 * FORM.chunk
    word: tl.constexpr = max(FORM.group, BLOCK_DEPTH)
    words, factor = _group_numbers(scales, scale_factors, ns, at, height, FORM.scale_span, word)
    o_words, o_factor = _group_numbers(offsets, offset_factors, ns, at, height, FORM.offset_span, word)
    u_words, u_factor, uo_words, uo_factor = words, factor, o_words, o_factor
    if PAIRED:
        u_words, u_factor = _group_numbers(scales, scale_factors, us, at, height, FORM.scale_span, word)
        uo_words, uo_factor = _group_numbers(offsets, offset_factors, us, at, height, FORM.offset_span, word)
    first = tl.load(c_at)
    second, first_ups, second_ups = first, first, first
    if chunks == 2:
        second = tl.load(c_at + each)
    if PAIRED:
        first_ups = tl.load(o_at)
        if chunks == 2:
            second_ups = tl.load(o_at + each)
    codes = first, second, first_ups, second_ups
    return codes, words, factor, o_words, o_factor, u_words, u_factor, uo_words, uo_factor


@triton.jit
def _add_turn(
    total, other, held, x_at, s_at, ms, rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, WARPS: tl.constexpr,
    TOGETHER: tl.constexpr, PAIRED: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return the sums of `packed_sums` with those of a turn, which is `held` as `_read_turn` has read it.

    x_at: the activations of its first columns. s_at: their sums, of rows ms.
    """
    kind: tl.constexpr = x_at.dtype.element_ty
    apart: tl.constexpr = BLOCK_ROWS == 1
    wide: tl.constexpr = _APART if apart else BLOCK_ROWS
    size: tl.constexpr = FORM.chunk if apart and FORM.span >= 32 else FORM.bytes
    halves: tl.constexpr = FORM.halves
    chunk: tl.constexpr = FORM.chunk
    chunks: tl.constexpr = BLOCK_DEPTH // (halves * chunk)
    turn_sums: tl.constexpr = BLOCK_DEPTH // FORM.sums
    span_sums: tl.constexpr = FORM.span // FORM.sums
    spans: tl.constexpr = BLOCK_DEPTH // FORM.span
    # Either costs registers that few rows' programs, which are small, have better uses for. Tried on an H200.
    by_turn: tl.constexpr = FORM.offset != "" and (BLOCK_ROWS > 8 or not PAIRED or apart)
    by_fma: tl.constexpr = FORM.assembly != "" and not apart and (BLOCK_ROWS > 8 or not by_turn)
    places = tl.arange(0, BLOCK_WIDTH)
    column = _columns(size, FORM)
    codes, words, factor, o_words, o_factor, u_words, u_factor, uo_words, uo_factor = held
    first, second, ups, more_ups = codes
    sums_tile = places
    if by_turn:
        sums_tile = tl.load(s_at[:, None] + tl.arange(0, turn_sums)[None, :], mask=(ms < rows)[:, None], other=0.0)
    product = total if FORM.scaled else tl.zeros((BLOCK_WIDTH, wide), tl.float32)
    u_product = other if FORM.scaled else tl.zeros((BLOCK_WIDTH, wide), tl.float32)
    lanes: tl.constexpr = FORM.lane_columns > 0
    firsts, first_ups = _parts(first, BLOCK_WIDTH, chunk, size, lanes), _parts(ups, BLOCK_WIDTH, chunk, size, lanes)
    seconds, second_ups = firsts, first_ups
    if chunks == 2:
        seconds = _parts(second, BLOCK_WIDTH, chunk, size, lanes)
        second_ups = _parts(more_ups, BLOCK_WIDTH, chunk, size, lanes)
    for at in tl.static_range(0, chunks * chunk, size):
        # Bytes from `at` on of a row of the turn.
        own = (firsts if at < chunk else seconds)[at % chunk // size]
        u_own = (first_ups if at < chunk else second_ups)[at % chunk // size]
        if FORM.scaled:
            low, high = _scaled_numbers(own, words, at, BLOCK_WIDTH, size, WARPS, TOGETHER, FORM, kind)
        else:
            low, high = _numbers(own, BLOCK_WIDTH, size, WARPS, TOGETHER, FORM, kind)
        u_low, u_high = low, high
        if PAIRED and FORM.scaled:
            u_low, u_high = _scaled_numbers(u_own, u_words, at, BLOCK_WIDTH, size, WARPS, TOGETHER, FORM, kind)
        elif PAIRED:
            u_low, u_high = _numbers(u_own, BLOCK_WIDTH, size, WARPS, TOGETHER, FORM, kind)
        for half in tl.static_range(halves):
            present = _present(_column(at, half, halves) + column, ms, rows, wide if apart else 0, FORM.span)
            x_tile = tl.load(x_at + _column(at, half, halves), mask=present, other=0.0)
            product = tl.dot(low if half == 0 else high, x_tile, product, input_precision=PRECISION)
            if PAIRED:
                u_product = tl.dot(u_low if half == 0 else u_high, x_tile, u_product, input_precision=PRECISION)
            if not apart and not FORM.scaled and _ends_span(at, half, halves, size, FORM.span):
                x_sums = places
                if FORM.offset != "":
                    x_sums = _sums_of_span(
                        s_at, sums_tile, ms < rows, _index(at, half, halves, FORM.span) * span_sums, span_sums,
                        BLOCK_ROWS, turn_sums, by_turn,
                    )  # fmt: skip
                total = _scaled(
                    total, product, words, factor, o_words, o_factor, x_sums, _index(at, half, halves, FORM.group),
                    by_fma, FORM,
                )  # fmt: skip
                product = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
                if PAIRED:
                    other = _scaled(
                        other, u_product, u_words, u_factor, uo_words, uo_factor, x_sums,
                        _index(at, half, halves, FORM.group), by_fma, FORM,
                    )  # fmt: skip
                    u_product = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
    if apart:
        for place in tl.static_range(spans):
            total = _scaled_apart(
                total, product, words, factor, o_words, o_factor, s_at, sums_tile, ms < rows,
                _span_that_ends(place, halves, FORM.bytes, FORM.span), BLOCK_WIDTH, turn_sums, by_turn, by_fma,
                FORM,
            )  # fmt: skip
            if PAIRED:
                other = _scaled_apart(
                    other, u_product, u_words, u_factor, uo_words, uo_factor, s_at, sums_tile, ms < rows,
                    _span_that_ends(place, halves, FORM.bytes, FORM.span), BLOCK_WIDTH, turn_sums, by_turn, by_fma,
                    FORM,
                )  # fmt: skip
    if FORM.scaled:
        total, other = product, u_product
    return total, other


@triton.jit
def packed_sums(
    x, codes, scales, scale_factors, offsets, offset_factors, sums, ms, block, first, last, rows, origin, height, width,
    depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, TOGETHER: tl.constexpr, PAIRED: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return the sums over columns first to last of a tile's products, float32 [BLOCK_ROWS, BLOCK_WIDTH], and those
    with the rows `width` further down where the matrix is PAIRED.

    x: [rows, depth]. codes: of `TiledWeight`, in words of four bytes. scales, offsets: words. sums: of activations,
    float32 [rows, depth / FORM.sums]. origin: the row of `codes` that the matrix begins with. height: how many rows
    these are. BLOCK_DEPTH: FORM.columns. TOGETHER: as of `multiplies_together`.
    """
    apart: tl.constexpr = BLOCK_ROWS == 1
    wide: tl.constexpr = _APART if apart else BLOCK_ROWS
    size: tl.constexpr = FORM.chunk if apart and FORM.span >= 32 else FORM.bytes
    halves: tl.constexpr = FORM.halves
    chunk: tl.constexpr = FORM.chunk
    places = tl.arange(0, BLOCK_WIDTH)
    read = _read_rows(BLOCK_WIDTH, FORM.lane_columns > 0, WARPS)
    # The last block reads some rows twice rather than rows that are not there.
    read = (origin + tl.minimum(block * BLOCK_WIDTH + read, width - 1)).to(tl.int64)
    ns = origin + tl.minimum(block * BLOCK_WIDTH + places, width - 1)
    begin = tl.minimum(first, depth - BLOCK_DEPTH)
    c_at = _tile_at(codes, read, depth // halves, chunk)[:, None] + begin // halves * 4
    c_at += tl.arange(0, chunk // 4)[None, :]
    o_at = c_at
    if PAIRED:
        o_at = _tile_at(codes, read + width, depth // halves, chunk)[:, None] + begin // halves * 4
        o_at += tl.arange(0, chunk // 4)[None, :]
    column = _columns(size, FORM)
    if FORM.lane_columns > 0:
        c_at = tl.max_contiguous(tl.multiple_of(c_at, (1, chunk // 4)), (1, chunk // 16))
        o_at = tl.max_contiguous(tl.multiple_of(o_at, (1, chunk // 4)), (1, chunk // 16))
    x_at = tl.broadcast_to(x + ms[None, :] * depth + first + column[:, None], (size, wide))
    s_at = ms
    if FORM.offset != "":
        s_at = sums + ms * (depth // FORM.sums) + first // FORM.sums
    if FORM.scaled:
        # Scales meet the codes as these are read, and not what comes of the products.
        ns = read.to(tl.int32)
    us = ns + width if PAIRED else ns
    held = _read_turn(
        c_at, o_at, begin, scales, scale_factors, offsets, offset_factors, ns, us, height, BLOCK_DEPTH, PAIRED, FORM
    )
    total = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
    other = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
    for k in tl.range(first, last, BLOCK_DEPTH, num_stages=STAGES):
        # The next turn is on its way while this one is multiplied; behind the last one, itself.
        ahead = tl.where(k + BLOCK_DEPTH < last, BLOCK_DEPTH, 0)
        c_at += ahead // halves * 4
        if PAIRED:
            o_at += ahead // halves * 4
        following = _read_turn(
            c_at, o_at, k + ahead, scales, scale_factors, offsets, offset_factors, ns, us, height, BLOCK_DEPTH, PAIRED,
            FORM,
        )  # fmt: skip
        total, other = _add_turn(
            total, other, held, x_at, s_at, ms, rows, BLOCK_ROWS, BLOCK_WIDTH, BLOCK_DEPTH, WARPS, TOGETHER, PAIRED,
            PRECISION, FORM,
        )  # fmt: skip
        held = following
        x_at += BLOCK_DEPTH
        if FORM.offset != "":
            s_at += BLOCK_DEPTH // FORM.sums
    if FORM.factor != 1.0:
        total *= FORM.factor
        other *= FORM.factor
    return tl.trans(total), tl.trans(other)


@triton.jit
def _exchange(x, exchanged, depth, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(x + row * depth + _exchanged(ks, SIZE), mask=ks < depth)
    tl.store(exchanged + row * depth + ks, columns, mask=ks < depth)


def exchange_columns(x: torch.Tensor, form: Form, *, together: bool) -> torch.Tensor:
    """Return rows x [n, depth] with their columns in the order in which a matrix of a form is multiplied by them.

    together: as of `multiplies_together`. Where a lane then reads 4 neighbouring columns, the 16 that are summed up at
    once are those that they are elsewhere: the first or the last two of each four columns, of 32. Otherwise columns
    stay as they are.
    """
    if not together or form.lane_columns != 4:
        return x
    rows, depth = x.shape
    exchanged = torch.empty_like(x)
    _exchange[(rows, triton.cdiv(depth, 1024))](x, exchanged, depth, BLOCK=1024, SIZE=form.bytes, num_warps=4)
    return exchanged


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
    return isinstance(weight, TiledWeight) and weight.offsets is not None and weight.tiling.group % _SUMS == 0
