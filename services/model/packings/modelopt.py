"""What NVIDIA's ModelOpt writes (`quant_method: modelopt`): NVFP4, and FP8 with one scale for a matrix.

Scales are multiplied by, those of whole matrices too. Its own file hf_quant_config.json says the same as
quantization_config in config.json, which newer versions write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.model.packed_parts import FLOATS, Parts, check_unlisted, float8_matrix, module_list, nvfp4_matrix, refused
from services.model.packings import FoundMatrices
from services.model.tensor_headers import TensorHeader

_MARKS = {"NVFP4": "U8", "FP8": "F8_E4M3"}
"""The element types of packed matrices by quant_algo."""

_LISTS = ("ignore", "exclude_modules")


def find_matrices(settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path) -> FoundMatrices:
    """Find the packed matrices, as `PackingMethod` says."""
    algorithm = str(settings.get("quant_algo"))
    if algorithm not in _MARKS:
        raise refused("quant_algo", algorithm, f"convert the checkpoint to {' or '.join(_MARKS)}")
    matrices = {}
    for name, header in sorted(stored.items()):
        if name.endswith(".weight") and header.code == _MARKS[algorithm]:
            parts = Parts(name.removesuffix(".weight"), stored, directory)
            rows, columns = parts.take_matrix("codes", "weight", (header.code,))
            if algorithm == "NVFP4":
                parts.take("scale_factor", "weight_scale_2", ("F32",), [(), (1,)])
                matrices[name] = nvfp4_matrix(parts, (rows, columns * 2))
            else:
                scale = parts.take("scales", "weight_scale", FLOATS, [(), (1,)])
                matrices[name] = float8_matrix(parts, (rows, columns), rows, columns, scale.code)
    for key in _LISTS:
        check_unlisted(module_list(settings, key), key, matrices)
    unused = (name for name in stored if name.endswith((".input_scale", ".k_scale", ".v_scale")))
    return FoundMatrices(matrices, frozenset(unused))
