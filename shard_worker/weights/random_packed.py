"""Matrices of random codes in the forms that published checkpoints have: they take the time that real ones take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shard_worker.weights.packed import E2M1_DOUBLED, Codes, GroupNumbers, PackedWeight, Packing

IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
E2M1 = tuple(map(float, E2M1_DOUBLED))


class _Maker:
    """Makes the parts of a matrix [rows, columns] on a device, always the same ones."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._rows, self.columns, self._device = rows, columns, device
        self._generator = torch.Generator(device).manual_seed(rows * columns)

    def _whole(self, columns: int, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (self._rows, columns)
        return torch.randint(first, last, shape, dtype=dtype, device=self._device, generator=self._generator)

    def nibbles(self) -> torch.Tensor:
        return self._whole(self.columns // 2, 0, 256, torch.uint8)

    def integers(self, first: int, last: int) -> torch.Tensor:
        return self._whole(self.columns, first, last, torch.int8)

    def floats(self, group: int, dtype: torch.dtype, size: float) -> torch.Tensor:
        shape = (self._rows, -(-self.columns // group))
        spread = torch.rand(shape, device=self._device, generator=self._generator)
        return ((spread + 0.5) * size).to(dtype)

    def numbers(self, group: int, size: float, dtype: torch.dtype = torch.float16) -> GroupNumbers:
        return GroupNumbers(self.floats(group, dtype, size), group)

    def powers(self, group: int, first: int, last: int) -> GroupNumbers:
        exponents = self._whole(self.columns // group, first, last, torch.int32)
        return GroupNumbers(torch.exp2(exponents.float()).bfloat16(), group)

    def factored(
        self, group: int, first: int, last: int, size: float, dtype: torch.dtype = torch.uint8
    ) -> GroupNumbers:
        """Whole numbers for groups, and a factor for 256 columns, which has 9 bits or more from a size of 5e-5 on."""
        values = self._whole(self.columns // group, first, last, dtype)
        return GroupNumbers(values, group, self.floats(256, torch.float16, size), 256)


_Parts = tuple[Packing, torch.Tensor, GroupNumbers, GroupNumbers | None]


def _int4(maker: _Maker, group: int = 128) -> _Parts:
    return Packing(Codes.BITS4, origin=8), maker.nibbles(), maker.numbers(group, 4e-3, torch.bfloat16), None


def _awq(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4), maker.nibbles(), maker.numbers(128, 4e-3), maker.numbers(128, -3e-2)


def _q4_0(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4, origin=8), maker.nibbles(), maker.numbers(32, 4e-3), None


def _q4_1(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4), maker.nibbles(), maker.numbers(64, 4e-3), maker.numbers(64, -3e-2)


def _q4_k(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4), maker.nibbles(), maker.factored(32, 0, 64, 1e-4), maker.factored(32, 0, 64, -1e-3)


def _iq4_xs(maker: _Maker) -> _Parts:
    scales = maker.factored(32, -32, 32, 5e-5, torch.int8)
    return Packing(Codes.BITS4, table=IQ4), maker.nibbles(), scales, None


def _mxfp4(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4, table=E2M1, powers=True), maker.nibbles(), maker.powers(32, -9, -6), None


def _nvfp4(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4, table=E2M1), maker.nibbles(), maker.numbers(16, 4e-3), None


def _q8_0(maker: _Maker) -> _Parts:
    return Packing(Codes.INT8), maker.integers(-128, 128), maker.numbers(32, 2e-4), None


def _q6_k(maker: _Maker) -> _Parts:
    scales = maker.factored(16, -128, 128, 5e-5, torch.int8)
    return Packing(Codes.INT8, short=True), maker.integers(-32, 32), scales, None


def _q5_k(maker: _Maker) -> _Parts:
    scales, offsets = maker.factored(32, 0, 64, 5e-5), maker.factored(32, 0, 64, -1e-3)
    return Packing(Codes.INT8, short=True), maker.integers(0, 32), scales, offsets


def _q2_k(maker: _Maker) -> _Parts:
    return Packing(Codes.BITS4), maker.nibbles(), maker.factored(16, 0, 16, 4e-4), maker.factored(16, 0, 16, -3e-3)


def _int8(maker: _Maker) -> _Parts:
    return Packing(Codes.INT8), maker.integers(-128, 128), maker.numbers(maker.columns, 2e-4, torch.float32), None


def _fp8(maker: _Maker) -> _Parts:
    codes = maker.floats(1, torch.float32, 1.0) * maker.integers(-99, 100)
    return Packing(Codes.FLOAT8), codes.to(torch.float8_e4m3fn), maker.numbers(128, 4e-4, torch.float32), None


KINDS: dict[str, Callable[[_Maker], _Parts]] = {
    "int4": _int4,
    "awq": _awq,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "q8_0": _q8_0,
    "q6_k": _q6_k,
    "q5_k": _q5_k,
    "q2_k": _q2_k,
    "int8": _int8,
    "fp8": _fp8,
}
"""What is known by the names of formats; int4 has groups of 128, int8 one scale a row, fp8 one for 128 columns."""


def random_packed(kind: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Return a matrix of one of KINDS, whose elements are about 0.02. dtype: of the activations that it takes."""
    return PackedWeight(*KINDS[kind](_Maker(rows, columns, device)), dtype=dtype)
