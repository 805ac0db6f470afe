"""FP8 (`quant_method: fp8`): 8-bit floating point numbers with a scale for each block of rows and columns.

Files of Qwen and DeepSeek are of this kind. Scales are multiplied by, in spite of their name, `weight_scale_inv`. They
are bfloat16, float32 or powers of two (`scale_fmt: ue8m0`), for blocks of 128 by 128 as a rule, or one for a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.model.packed_parts import (
    FLOATS,
    Parts,
    block_extents,
    check_unlisted,
    float8_matrix,
    module_list,
    refused,
)
from services.model.packings import FoundMatrices
from services.model.tensor_headers import TensorHeader

_SCALE = ".weight_scale_inv"
_LISTS = ("modules_to_not_convert", "ignored_layers")


def find_matrices(settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path) -> FoundMatrices:
    """Find the packed matrices, as `PackingMethod` says."""
    if settings.get("fmt") not in (None, "e4m3"):
        raise refused("fmt", settings["fmt"], "convert the checkpoint to e4m3")
    if settings.get("expert_dtype") not in (None, "fp8"):
        raise refused("expert_dtype", settings["expert_dtype"], "convert the checkpoint to fp8 throughout")
    extents = settings.get("weight_block_size")
    block = None if extents is None else block_extents("weight_block_size", extents)
    modules = {name.removesuffix(_SCALE) for name in stored if name.endswith(_SCALE)} | {
        name.removesuffix(".weight")
        for name, header in stored.items()
        if name.endswith(".weight") and header.code == "F8_E4M3"
    }
    matrices = {f"{module}.weight": _matrix(Parts(module, stored, directory), block) for module in sorted(modules)}
    for key in _LISTS:
        check_unlisted(module_list(settings, key), key, matrices)
    return FoundMatrices(
        matrices, frozenset(name for name in stored if name.endswith((".activation_scale", ".input_scale")))
    )


def _matrix(parts: Parts, block: tuple[int, int] | None) -> TensorHeader:
    rows, columns = parts.take_matrix("codes", "weight", ("F8_E4M3",))
    group_rows, group = block or (rows, columns)
    shapes: list[tuple[int, ...]] = [(math.ceil(rows / group_rows), math.ceil(columns / group))]
    if block is None:
        shapes += [(), (1,)]
    scale = parts.take("scales", "weight_scale_inv", (*FLOATS, "F8_E8M0"), shapes)
    return float8_matrix(parts, (rows, columns), group_rows, group, scale.code)
