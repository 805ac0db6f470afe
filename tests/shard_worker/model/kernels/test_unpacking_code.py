"""The PTX that unpacks codes, instruction by instruction, for every byte: Triton's interpreter does not run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from shard_worker.weights.packed import LARGEST_POWER, Codes, GroupNumbers, PackedWeight
from shard_worker.weights.random_packed import random_packed
from shard_worker.weights.tiled import SHORT_ORIGIN, TiledWeight, tiling_of

MASK = 0xFFFFFFFF


def halves(word: int, dtype: torch.dtype) -> list[float]:
    """The two numbers in a word, the lower half first."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).double().tolist()


def as_word(numbers: list[float], dtype: torch.dtype) -> int:
    """A word of two numbers, which the type holds exactly."""
    made = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert made.double().tolist() == numbers
    low, high = (bits & 0xFFFF for bits in made.view(torch.int16).tolist())
    return low | high << 16


def permuted(first: int, second: int, selector: int) -> int:
    """As `prmt.b32`: each of four nibbles chooses one of eight bytes, its highest bit is not used here."""
    source, result = first | second << 32, 0
    for place in range(4):
        chosen = selector >> 4 * place & 15
        assert chosen < 8
        result |= (source >> 8 * chosen & 255) << 8 * place
    return result


def run(assembly: str, words: Sequence[int], outputs: int, dtype: torch.dtype) -> list[int]:
    """Return what the code writes to its outputs for a word of four bytes, and the words behind it."""
    registers = {f"${outputs + place}": word for place, word in enumerate(words)}

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    def fma(first: int, second: int, third: int) -> int:
        terms = zip(*(halves(one, dtype) for one in (first, second, third)), strict=True)
        return as_word([one * two + three for one, two, three in terms], dtype)

    def lop3(first: int, second: int, third: int, table: int) -> int:
        assert table == 0xEA
        return first & second | third

    operations: dict[str, Callable[..., int]] = {
        "mov": lambda first: first,
        "and": lambda first, second: first & second,
        "shr": lambda first, second: first >> second,
        "shl": lambda first, second: first << second,
        "prmt": lambda first, second, third: permuted(first, second, third & 0xFFFF),
        "lop3": lop3,
        "fma": fma,
    }
    for line in assembly.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, target, arguments = re.fullmatch(r"\s*(\w+)[\w.]* (\S+), (.*)", line).groups()  # type: ignore[union-attr]
        registers[target] = operations[name](*(value(text.strip()) for text in arguments.split(","))) & MASK
    return [registers[f"${index}"] for index in range(outputs)]


def numbers_of(weight: PackedWeight, codes: torch.Tensor) -> list[float]:
    """What codes of 0 to 15 or of eight bits stand for, without their scales."""
    if weight.packing.codes is not Codes.BITS4:
        held = codes.to(torch.uint8).view(weight.codes.dtype).double()
        return (held - SHORT_ORIGIN if weight.packing.short else held).tolist()
    table = weight.packing.table
    return [code - weight.packing.origin if table is None else table[code] for code in codes.tolist()]


def two_scales(scale: float) -> int:
    """What kernels make of a scale in bfloat16 for the PTX."""
    from shard_worker.model.kernels.codes import _RAISED

    return as_word([scale] * 2, torch.bfloat16) + _RAISED.value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int4", "q4_k", "awq", "iq4_xs", "mxfp4", "q8_0", "q6_k", "q5_k", "fp8"])
def test_bytes_become_what_they_stand_for(kind: str, dtype: torch.dtype) -> None:
    """Every byte, in every place of a word: first the low halves of all, then the high ones."""
    from shard_worker.model.kernels.codes import form_of

    weight = random_packed(kind, 1, 256, dtype, torch.device("cpu"))
    form = form_of(TiledWeight(weight, tiling_of(weight, lane_columns=2)))
    for first in range(256):
        # NaN is no number that a matrix holds.
        places = ((first + 67 * place) % 256 for place in range(4))
        chosen = [0 if kind == "fp8" and byte & 127 == 127 else byte for byte in places]
        if weight.packing.short:
            chosen = [byte & 127 for byte in chosen]
        words = [int.from_bytes(bytes(chosen), "little")]
        if form.scaled:
            # What makes up for the scales being halved, and the numbers too small.
            words += [two_scales(form.factor)] * 2
        written = run(form.assembly, words, 2 * form.halves, dtype)
        found = [number for word in written for number in halves(word, dtype)]
        held = torch.tensor(chosen)[[0, 2, 1, 3] if form.swapped else [0, 1, 2, 3]]
        expected = numbers_of(weight, torch.cat([held & 15, held >> 4]) if form.halves == 2 else held)
        assert found == [number + form.excess for number in expected]


@pytest.mark.parametrize("exponent", [-90, -9, 0, 15, 16])
def test_codes_are_multiplied_by_powers_of_two(exponent: int) -> None:
    """Exactly, up to the largest scale there may be; the low halves of bytes by one, the high ones by another."""
    from shard_worker.model.kernels.codes import form_of

    assert LARGEST_POWER == 2.0**16
    weight = random_packed("mxfp4", 1, 256, torch.bfloat16, torch.device("cpu"))
    form = form_of(TiledWeight(weight, tiling_of(weight, lane_columns=2)))
    assert form.scaled
    low, high = 2.0**exponent, 2.0 ** (exponent - 2)
    for byte in range(256):
        word = int.from_bytes(bytes([byte] * 4), "little")
        written = run(form.assembly, [word, two_scales(low), two_scales(high)], 4, torch.bfloat16)
        found = [number * form.factor for word in written for number in halves(word, torch.bfloat16)]
        table = weight.packing.table
        assert table is not None
        assert found == [table[byte & 15] * low] * 4 + [table[byte >> 4] * high] * 4


@pytest.mark.parametrize("change", ["dtype", "scales", "group"])
def test_other_numbers_are_scaled_behind_their_products(change: str) -> None:
    """Where an element would be rounded: by another type, scales that are no powers of two, or other groups."""
    kind = {"dtype": "mxfp4", "scales": "nvfp4", "group": "mxfp4"}[change]
    dtype = torch.float16 if change == "dtype" else torch.bfloat16
    weight = random_packed(kind, 1, 256, dtype, torch.device("cpu"))
    if change == "group":
        scales = GroupNumbers(weight.scales.values[:, ::2], 64)
        weight = PackedWeight(weight.packing, weight.codes, scales, dtype=dtype)
    assert not tiling_of(weight, lane_columns=2).scaled
