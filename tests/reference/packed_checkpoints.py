"""Writers of packed checkpoints beside the dense ones that they stand for, restated from the formats' descriptions.

A packer takes a matrix, float32 [rows, columns], and returns the tensors that a file stores in its place, by what
follows the module's name and a dot, and the matrix that these stand for, unpacked by other code than the engine's.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.reference import storage

Tensors = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def is_projection(name: str) -> bool:
    """Whether quantisers pack a matrix as a rule: the large projections of layers."""
    return "layers." in name and name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))


def write_packed(
    source: Path, folder: Path, settings: dict[str, Any], pack: Packer, which: Callable[[str], bool] = is_projection
) -> tuple[Path, Path]:
    """Write a packed copy of a dense checkpoint and the dense one that it stands for, and return their folders.

    settings: the packed one's quantization_config. which: says by name which matrices are packed.
    """
    packed, dense = folder / "packed", folder / "dense"
    for path in (packed, dense):
        shutil.copytree(source, path)
    stands_for: Tensors = {}

    def replace(tensors: Tensors) -> None:
        for name in [name for name in tensors if which(name)]:
            parts, stands_for[name] = pack(tensors.pop(name).float())
            module = name.removesuffix("weight")
            tensors.update({module + suffix: part for suffix, part in parts.items()})

    storage.edit_tensors(packed, replace)
    storage.edit_config(packed, lambda config: config.update(quantization_config=settings))
    storage.edit_tensors(dense, lambda tensors: tensors.update(stands_for))
    return packed, dense


def float8_blocks(rows: int, columns: int, scale_dtype: torch.dtype, name: str = "weight_scale_inv") -> Packer:
    """Blocks of rows and columns with the largest number at 448, block after block."""

    def pack(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, unpacked = torch.empty_like(matrix, dtype=torch.float8_e4m3fn), torch.empty_like(matrix)
        scales = torch.empty(math.ceil(len(matrix) / rows), math.ceil(matrix.shape[1] / columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale = matrix[place].abs().max() / 448
                if scale_dtype is torch.float8_e8m0fnu:
                    scale = scale.log2().ceil().exp2()
                scale = scale.to(scale_dtype).float()
                scales[i, j], codes[place] = scale, (matrix[place] / scale).to(torch.float8_e4m3fn)
                unpacked[place] = codes[place].float() * scale
        return {"weight": codes, name: scales.to(scale_dtype)}, unpacked

    return pack


def float8_whole(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for a matrix, without an extent."""
    scale = matrix.abs().max() / 448
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * scale


def compressed(name: str, **weights: Any) -> Packer:
    """What compressed-tensors makes of a matrix, packed and unpacked by itself.

    name: the format. weights: arguments of its QuantizationArgs.
    """

    def pack(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        # Where it is not installed, tests without such checkpoints run all the same.
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(name)
        state: Tensors = {"weight": matrix}
        if args.strategy == "block":
            rows, columns = args.block_structure
            grouped = matrix.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
        elif args.strategy == "tensor":
            grouped = matrix.flatten()[None]
        else:
            grouped = matrix.unflatten(1, (-1, args.group_size or matrix.shape[1]))
        whole = None
        if args.strategy == "tensor_group":
            whole = state["weight_global_scale"] = generate_gparam(matrix.min(), matrix.max())
        scale, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, whole)
        state |= {"weight_scale": scale, "weight_zero_point": zeros}
        parts = {key: tensor.contiguous() for key, tensor in compressor.compress(state, scheme).items()}
        if whole is None:
            return parts, compressor.decompress(parts, scheme)["weight"].float()
        # Its own way back rounds to bfloat16.
        codes = unpack_fp4_from_uint8(parts["weight_packed"], *matrix.shape, dtype=torch.float32)
        return parts, dequantize(codes, parts["weight_scale"].float(), args=args, global_scale=whole)

    return pack


def word_of(codes: list[int], bits: int) -> int:
    """A word of 32 bits with these codes, the first in the lowest bits, as a signed number."""
    word = sum(code << bits * place for place, code in enumerate(codes))
    return word - (1 << 32) if word >= 1 << 31 else word


def words_along(codes: torch.Tensor, bits: int, order: Sequence[int]) -> torch.Tensor:
    """Words of neighbours of the last extent, which is the first code of a word that `order` names, and so on."""
    eights = codes.unflatten(-1, (-1, len(order)))[..., list(order)]
    words = [word_of(codes, bits) for codes in eights.flatten(0, -2).tolist()]
    return torch.tensor(words, dtype=torch.int32).view(eights.shape[:-1])


def grouped_integers(
    matrix: torch.Tensor, bits: int, group: int, symmetric: bool, group_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales in float16 and zero points [N, G], and the matrix that they stand for. group_of: [K]."""
    codes, unpacked = torch.empty_like(matrix, dtype=torch.int64), torch.empty_like(matrix)
    largest, groups = (1 << bits) - 1, matrix.shape[1] // group
    scales, zeros = torch.empty(len(matrix), groups).half(), torch.empty(len(matrix), groups, dtype=torch.int64)
    for number in range(groups):
        part = matrix[:, group_of == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale, zero = part.abs().amax(1) * 2 / largest, torch.full((len(matrix),), largest // 2 + 1)
        else:
            scale = (high - low) / largest
            zero = (-low / scale).round().long().clamp(0, largest)
        scales[:, number], zeros[:, number] = scale.half(), zero
        own = scales[:, number].float()[:, None]
        code = ((part / own).round().long() + zero[:, None]).clamp(0, largest)
        codes[:, group_of == number], unpacked[:, group_of == number] = code, (code - zero[:, None]) * own
    return codes, scales, zeros, unpacked


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring rows is in a word's lowest bits, in the next ones and so on."""


def awq(group: int, *, symmetric: bool = False) -> Packer:
    """AWQ's layout for GEMM: stored transposed, words along the rows."""

    def pack(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        usual = torch.arange(matrix.shape[1]) // group
        codes, scales, zeros, unpacked = grouped_integers(matrix, 4, group, symmetric, usual)
        return {
            "qweight": words_along(codes.T, 4, AWQ_ORDER),
            "qzeros": words_along(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }, unpacked

    return pack


def gptq(bits: int, group: int, *, symmetric: bool, version: int = 1, shuffled: bool = False) -> Packer:
    """GPTQ's layout: stored transposed, words along the columns, zero points less one in the first version."""

    def pack(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of = torch.arange(matrix.shape[1]) // group
        if shuffled:
            group_of = group_of[torch.randperm(len(group_of), generator=torch.Generator().manual_seed(len(matrix)))]
        codes, scales, zeros, unpacked = grouped_integers(matrix, bits, group, symmetric, group_of)
        stored = zeros - 1 & (1 << bits) - 1 if version == 1 else zeros
        order = range(32 // bits)
        return {
            "qweight": words_along(codes, bits, order).T.contiguous(),
            "qzeros": words_along(stored.T, bits, order),
            "scales": scales.T.contiguous(),
            "g_idx": group_of.int(),
        }, unpacked

    return pack


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def modelopt_nvfp4(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """NVFP4 as ModelOpt stores it: scales are multiplied by one for the whole matrix."""
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    groups = matrix.unflatten(1, (-1, 16))
    whole = matrix.abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    factors = scales.float() * whole
    codes = ((groups / factors[..., None].clamp(min=1e-9))[..., None] - table).abs().argmin(-1)
    unpacked = (table[codes] * factors[..., None]).flatten(1)
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    return {
        "weight": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(1.0),
    }, unpacked


def modelopt_fp8(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """FP8 as ModelOpt stores it, with one scale."""
    parts, unpacked = float8_whole(matrix)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, unpacked
