"""Writers of packed checkpoints beside the dense ones that they stand for, restated from the formats' descriptions.

A packer takes a matrix, float32 [rows, columns], and returns the tensors that a file stores in its place, by what
follows the module's name and a dot, and the matrix that these stand for, unpacked by other code than the engine's.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
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
