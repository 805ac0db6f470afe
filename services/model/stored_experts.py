"""How checkpoints name mixtures of experts, and hold them.

Experts that one holds all together, [experts, rows, columns], are a matrix each: as most other checkpoints have them,
and as they are packed, counted and multiplied by. Files of gpt-oss have biases beside them. There the rows of gates and
ups alternate, and dense matrices are transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.model.tensor_headers import TensorHeader

ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "router.proj.weight")
"""What families call the router, in a layer."""

_OF_EXPERT = re.compile(r"(^|\.)experts\.(\d+)\.")
_FUSED = re.compile(r"(.+\.experts\.)(gate_up_proj|gate_proj|up_proj|down_proj)(|_bias|_blocks|_scales)")
_EXTENTS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
"""By what stands behind a projection's name: the matrix, its biases, and codes and scales of MXFP4. Codes are
[experts, rows, groups, bytes], scales [experts, rows, groups]."""
_OWN = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
"""What one expert's are called."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Where one expert's matrix, biases, codes or scales are: the rows that a slice names, of its number in the stored
    tensor. transposed: whether these are that one's columns."""

    stored: str
    expert: int
    rows: slice
    transposed: bool = False


def is_of_expert(name: str) -> bool:
    """Return whether a tensor of this name, full or behind `layers.N.`, is a routed expert's."""
    return _OF_EXPERT.search(name) is not None


def is_in_host(name: str, in_host: int) -> bool:
    """Return whether a tensor of this name is one of the first `in_host` routed experts'."""
    found = _OF_EXPERT.search(name)
    return found is not None and int(found[2]) < in_host


def experts_in_host(count: int, share: float) -> int:
    """Return how many of a layer's routed experts are in the host's memory: rounded, and at least one on each side
    where the share is neither 0 nor 1. They are the first ones.

    count: of all of them, 0 for a layer without. share: that of the host, 0 to 1.
    """
    if not 0.0 < share < 1.0 or count < 2:
        return round(count * share)
    return min(max(round(count * share), 1), count - 1)


def experts_apart(stored: Mapping[str, TensorHeader]) -> tuple[dict[str, TensorHeader], dict[str, ExpertPart]]:
    """Return the headers with one for each expert's matrix in place of those of all together, and where these are.

    Gates come before ups, or alternate with them where both have biases together. All extents of a row are made one.
    """
    headers: dict[str, TensorHeader] = {}
    parts: dict[str, ExpertPart] = {}
    for name, header in stored.items():
        found = _FUSED.fullmatch(name)
        if found is None or len(header.shape) != _EXTENTS[found[3]]:
            headers[name] = header
            continue
        start, projection, kind = found.groups()
        alternating = f"{start}gate_up_proj_bias" in stored
        transposed = alternating and not kind
        count, rows, *inner = header.shape
        if transposed:
            rows, inner = inner[0], [rows]
        names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        height = rows // len(names)
        columns = [] if kind == "_bias" else [inner[0] if len(inner) == 1 else inner[0] * inner[1]]
        for expert in range(count):
            for index, one in enumerate(names):
                own = f"{start}{expert}.{one}.{_OWN[kind]}"
                of = slice(index, rows, len(names)) if alternating else slice(index * height, (index + 1) * height)
                headers[own] = TensorHeader(header.code, (height, *columns))
                parts[own] = ExpertPart(name, expert, of, transposed)
    return headers, parts
