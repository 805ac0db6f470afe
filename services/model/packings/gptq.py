"""GPTQ (`quant_method: gptq`): 4 or 8 bits with a zero point for each group of columns.

Matrices are stored transposed, and neighbouring columns of one row in a word. Zero points are stored less one, but in
checkpoint_format gptq_v2. With desc_act a column's group is what `g_idx` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.errors import InvalidArgument
from services.model.packed_parts import FLOATS, Parts, check_unlisted, group_size, integer_matrix, names_module, refused
from services.model.packings import FoundMatrices
from services.model.tensor_headers import TensorHeader

_CONVERT = "convert the checkpoint to checkpoint_format 'gptq' or 'gptq_v2' with GPTQModel"


def find_matrices(settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path) -> FoundMatrices:
    """Find the packed matrices, as `PackingMethod` says."""
    layout = settings.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise refused("checkpoint_format", layout, _CONVERT)
    if settings.get("pack_dtype") not in (None, "int32"):
        raise refused("pack_dtype", settings["pack_dtype"], "convert the checkpoint to int32")
    meta = settings.get("meta")
    for place, key in ((settings, "eora"), (meta if isinstance(meta, Mapping) else {}, "eora")):
        if place.get(key):
            raise refused("eora", place[key], "convert the checkpoint without an adapter")
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise InvalidArgument(
            f"config.json: quantization_config.dynamic is {dynamic!r}; it must be an object of patterns",
            field="quantization_config.dynamic",
        )
    matrices = {}
    for name in sorted(stored):
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            own = _settings_of(module, settings, dynamic)
            matrices[f"{module}.weight"] = _matrix(Parts(module, stored, directory), own, less_one=layout == "gptq")
    unpacked = [f"re:{pattern.removeprefix('-:')}" for pattern in dynamic if pattern.startswith("-:")]
    check_unlisted(unpacked, "dynamic", matrices)
    if settings.get("lm_head") is False:
        check_unlisted(["lm_head"], "lm_head", matrices)
    return FoundMatrices(matrices)


def _settings_of(module: str, settings: Mapping[str, Any], dynamic: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of one module: those of the first pattern that matches it come before the others."""
    for pattern, own in dynamic.items():
        if pattern.startswith("-:") or not isinstance(own, Mapping):
            continue
        if names_module([f"re:{pattern.removeprefix('+:')}"], module):
            return {**settings, **own}
    return settings


def _matrix(parts: Parts, settings: Mapping[str, Any], *, less_one: bool) -> TensorHeader:
    bits = settings.get("bits")
    if bits not in (4, 8):
        raise refused("bits", bits, "convert the checkpoint to 4 or 8 bits")
    words, rows = parts.take_matrix("codes", "qweight", ("I32",))
    columns = words * 32 // bits
    group = group_size(settings, "group_size") or columns
    groups = math.ceil(columns / group)
    role = "zeros_less_one" if less_one else "zeros"
    parts.take(role, "qzeros", ("I32",), [(groups, math.ceil(rows * bits / 32))])
    scale = parts.take("scales", "scales", FLOATS, [(groups, rows)])
    reordered = settings.get("desc_act") is True
    if parts.has("g_idx") or reordered:
        parts.take("group_of_column", "g_idx", ("I32", "I64"), [(columns,)])
    zeros = settings.get("sym") is not True
    return integer_matrix(parts, "gptq", (rows, columns), bits, group, scale.code, zeros=zeros, reordered=reordered)
