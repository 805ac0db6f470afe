"""MXFP4 as gpt-oss is published (`quant_method: mxfp4`): experts of 4-bit floating point numbers with a power of two
for 32 columns, those of a layer in one tensor of codes (`_blocks`) and one of scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.model.packed_parts import Parts, check_unlisted, module_list, mxfp4_matrix
from services.model.packings import FoundMatrices
from services.model.tensor_headers import TensorHeader

_CODES = ".blocks"
_LIST = "modules_to_not_convert"


def find_matrices(settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path) -> FoundMatrices:
    """Find the packed matrices, as `PackingMethod` says."""
    matrices = {}
    for name in stored:
        if name.endswith(_CODES):
            parts = Parts(name.removesuffix(_CODES), stored, directory)
            rows, half = parts.take_matrix("codes", _CODES[1:], ("U8",))
            matrices[f"{parts.module}.weight"] = mxfp4_matrix(parts, (rows, half * 2), "scales")
    check_unlisted(module_list(settings, _LIST), _LIST, matrices)
    return FoundMatrices(matrices)
