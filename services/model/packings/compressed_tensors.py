"""What llm-compressor writes (`quant_method: compressed-tensors`): whole numbers and floating point numbers of 4 and 8
bits, in the formats pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized.

Modules belong to groups, each with its own settings, by their names or by what class they are of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import InvalidArgument
from services.model.packed_parts import (
    FLOATS,
    Parts,
    block_extents,
    check_unlisted,
    float8_matrix,
    integer_matrix,
    module_list,
    mxfp4_matrix,
    names_module,
    nvfp4_matrix,
    refused,
)
from services.model.packings import FoundMatrices
from services.model.stored_experts import ROUTERS
from services.model.tensor_headers import TensorHeader

_MARKS = {"weight_packed": ("I32", "U8"), "weight": ("I8", "F8_E4M3")}
"""The tensors that make a module a packed one, by the end of their names, and their element types."""

_UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale")
"""Ends of the names of what belongs to activations and to keys and values."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How whole numbers or floating point numbers of one group of modules are scaled.

    bits: of a code. group: how many columns share a scale, None for all of a row. block: rows and columns that do.
    whole: whether a matrix has one scale.
    """

    bits: int
    group: int | None
    block: tuple[int, int] | None
    whole: bool


def find_matrices(settings: Mapping[str, Any], stored: Mapping[str, TensorHeader], directory: Path) -> FoundMatrices:
    """Find the packed matrices, as `PackingMethod` says."""
    _refuse_work_at_run_time(settings)
    groups = _groups(settings)
    ignored = module_list(settings, "ignore")
    modules = sorted(
        name.removesuffix(f".{end}")
        for name, header in stored.items()
        for end, codes in _MARKS.items()
        if name.endswith(f".{end}") and header.code in codes
    )
    matrices = {}
    for module in modules:
        group = _group_of(groups, module)
        if group is None:
            raise InvalidArgument(
                f"tensor {module}.weight is packed, but no group in quantization_config.config_groups names its module",
                reason="PACKING_MISMATCH",
                field=f"{module}.weight",
            )
        name = str(group.get("format") or settings.get("format"))
        if name not in _FORMATS:
            raise refused("format", name, f"convert the checkpoint to one of {', '.join(sorted(_FORMATS))}")
        scheme = _scheme(group["weights"])
        matrices[f"{module}.weight"] = _FORMATS[name](Parts(module, stored, directory), scheme)
    check_unlisted(ignored, "ignore", matrices)
    for name, header in stored.items():
        if _may_be_packed(name, header) and name not in matrices:
            module = name.removesuffix(".weight")
            if _group_of(groups, module) is not None and not names_module(ignored, module):
                raise InvalidArgument(
                    f"tensor {name} is not packed, but quantization_config.config_groups names its module and ignore "
                    "does not: one of the two is wrong",
                    reason="PACKING_MISMATCH",
                    field=name,
                )
    return FoundMatrices(matrices, frozenset(name for name in stored if name.endswith(_UNUSED)))


def _refuse_work_at_run_time(settings: Mapping[str, Any]) -> None:
    """Raises Unimplemented for sparse matrices, and for rotations of activations; those of weights are done already."""
    sparsity = _object(settings, "sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise refused("sparsity_config.format", sparsity["format"], "use a checkpoint that is not sparse")
    for transform in _object(_object(settings, "transform_config"), "config_groups").values():
        places = transform.get("apply") if isinstance(transform, Mapping) else None
        for place in places if isinstance(places, list) else [places]:
            location = place.get("location") if isinstance(place, Mapping) else place
            if not str(location).startswith("weight"):
                raise refused("transform_config", location, "use a checkpoint whose activations are not rotated")


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key, an empty one where it is not given. Raises InvalidArgument for anything else."""
    value = settings.get(key) or {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(
            f"config.json: {key} in quantization_config is {value!r}; it must be an object", field="quantization_config"
        )
    return value


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(
        isinstance(group, Mapping)
        and isinstance(group.get("targets"), list)
        and all(isinstance(target, str) for target in group["targets"])
        for group in groups.values()
    ):
        raise InvalidArgument(
            f"config.json: quantization_config.config_groups is {groups!r}; it must be an object of groups, each with "
            "targets and weights",
            field="quantization_config.config_groups",
        )
    return [group for group in groups.values() if isinstance(group.get("weights"), Mapping)]


def _group_of(groups: Sequence[Mapping[str, Any]], module: str) -> Mapping[str, Any] | None:
    """Return the group of a module: one that names it, else one for its class."""
    for group in groups:
        if names_module(group["targets"], module):
            return group
    own_class = "Embedding" if module.endswith("embed_tokens") else "Linear"
    return next((group for group in groups if own_class in group["targets"]), None)


def _may_be_packed(name: str, header: TensorHeader) -> bool:
    """Return whether a dense tensor is the matrix of a linear module of the decoder, as routers of experts are not."""
    inside = name == "lm_head.weight" or (".layers." in f".{name}" and not name.startswith(("mtp.", "visual.")))
    is_matrix = name.endswith(".weight") and not name.endswith(ROUTERS) and len(header.shape) == 2
    return inside and ".visual." not in name and is_matrix


def _scheme(weights: Mapping[str, Any]) -> Scheme:
    block, group = None, weights.get("group_size")
    if weights.get("strategy") == "block":
        block = block_extents("config_groups.weights.block_structure", weights.get("block_structure"))
    return Scheme(
        bits=weights.get("num_bits", 0),
        group=group if type(group) is int and group > 0 else None,
        block=block,
        whole=weights.get("strategy") == "tensor",
    )


def _pack_quantized(parts: Parts, scheme: Scheme) -> TensorHeader:
    if scheme.bits not in (4, 8):
        raise refused("num_bits", scheme.bits, "convert the checkpoint to 4 or 8 bits")
    rows, words = parts.take_matrix("codes", "weight_packed", ("I32",))
    columns = words * 32 // scheme.bits
    group = scheme.group or columns
    groups = math.ceil(columns / group)
    parts.take("shape", "weight_shape", ("I64", "I32"), [(2,)])
    scale = parts.take("scales", "weight_scale", FLOATS, [(rows, groups)])
    zeros = parts.has("weight_zero_point")
    if zeros:
        parts.take("zeros", "weight_zero_point", ("I32",), [(math.ceil(rows * scheme.bits / 32), groups)])
    reordered = parts.has("weight_g_idx")
    if reordered:
        parts.take("group_of_column", "weight_g_idx", ("I32", "I64"), [(columns,)])
    return integer_matrix(
        parts, "pack_quantized", (rows, columns), scheme.bits, group, scale.code, zeros=zeros, reordered=reordered
    )


def _int_quantized(parts: Parts, scheme: Scheme) -> TensorHeader:
    rows, columns = parts.take_matrix("codes", "weight", ("I8",))
    group = scheme.group or columns
    shapes: list[tuple[int, ...]] = [(rows, math.ceil(columns / group))]
    if scheme.whole:
        shapes = [(1,), ()]
    scale = parts.take("scales", "weight_scale", FLOATS, shapes)
    zeros = parts.has("weight_zero_point")
    if zeros:
        parts.take("zeros", "weight_zero_point", ("I8",), shapes)
    return integer_matrix(parts, "int8", (rows, columns), 8, group, scale.code, zeros=zeros)


def _float_quantized(parts: Parts, scheme: Scheme) -> TensorHeader:
    rows, columns = parts.take_matrix("codes", "weight", ("F8_E4M3",))
    group_rows, group = scheme.block or (1, scheme.group or columns)
    shapes: list[tuple[int, ...]] = [(math.ceil(rows / group_rows), math.ceil(columns / group))]
    if scheme.whole:
        group_rows, shapes = rows, [(1,), ()]
    scale = parts.take("scales", "weight_scale", FLOATS, shapes)
    return float8_matrix(parts, (rows, columns), group_rows, group, scale.code)


def _naive_quantized(parts: Parts, scheme: Scheme) -> TensorHeader:
    floats = parts.has("weight", "F8_E4M3")
    return (_float_quantized if floats else _int_quantized)(parts, scheme)


def _nvfp4(parts: Parts, scheme: Scheme) -> TensorHeader:
    rows, half = parts.take_matrix("codes", "weight_packed", ("U8",))
    parts.take("scale_divisor", "weight_global_scale", ("F32",), [(1,), ()])
    return nvfp4_matrix(parts, (rows, half * 2))


def _mxfp4(parts: Parts, scheme: Scheme) -> TensorHeader:
    rows, half = parts.take_matrix("codes", "weight_packed", ("U8",))
    return mxfp4_matrix(parts, (rows, half * 2))


_FORMATS: dict[str, Callable[[Parts, Scheme], TensorHeader]] = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _naive_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}
