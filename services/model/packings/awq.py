"""AWQ (`quant_method: awq`), in the layout `gemm`: 4 bits with a zero point for each group of columns.

Matrices are stored transposed, and eight neighbouring rows of one column in a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.model.packed_parts import FLOATS, Parts, check_unlisted, group_size, integer_matrix, module_list, refused
from services.model.packings import FoundMatrices
from services.model.tensor_headers import TensorHeader

_CONVERT = "convert the checkpoint to the version 'gemm' with AutoAWQ, or to compressed-tensors"


def find_matrices(settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path) -> FoundMatrices:
    """Find the packed matrices, as `PackingMethod` says."""
    for key in ("version", "format"):
        if str(settings.get(key) or "gemm").lower() != "gemm":
            raise refused(key, settings[key], _CONVERT)
    if str(settings.get("backend") or "autoawq").lower() == "llm-awq":
        raise refused("backend", settings["backend"], _CONVERT)
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        raise refused("bits", bits, "convert the checkpoint to 4 bits, or to compressed-tensors with 8")
    asked_group = group_size(settings, "group_size", "q_group_size")
    matrices = {}
    for name in sorted(stored):
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            zeros = settings.get("zero_point") is not False
            matrices[f"{module}.weight"] = _matrix(Parts(module, stored, directory), asked_group, zeros=zeros)
    check_unlisted(module_list(settings, "modules_to_not_convert"), "modules_to_not_convert", matrices)
    return FoundMatrices(matrices)


def _matrix(parts: Parts, asked_group: int | None, *, zeros: bool) -> TensorHeader:
    columns, words = parts.take_matrix("codes", "qweight", ("I32",))
    rows, group = words * 8, asked_group or columns
    groups = math.ceil(columns / group)
    parts.take("zeros", "qzeros", ("I32",), [(groups, words)])
    scale = parts.take("scales", "scales", FLOATS, [(groups, rows)])
    return integer_matrix(parts, "awq", (rows, columns), 4, group, scale.code, zeros=zeros)
