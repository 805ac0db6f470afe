"""Experts that a checkpoint holds all together, [experts, rows, columns], as one matrix each: as most other checkpoints
have them, and as they are packed, counted and multiplied by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.model.tensor_headers import TensorHeader

_FUSED = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Where one expert's matrix is: rows [first, last) of its number in the stored tensor."""

    stored: str
    expert: int
    first: int
    last: int


def experts_apart(stored: Mapping[str, TensorHeader]) -> tuple[dict[str, TensorHeader], dict[str, ExpertPart]]:
    """Return the headers with one for each expert's matrix in place of those of all together, and where these are.

    Gates come before ups. Experts with biases are laid out in another way, and stay as they are.
    """
    headers: dict[str, TensorHeader] = {}
    parts: dict[str, ExpertPart] = {}
    for name, header in stored.items():
        found = _FUSED.fullmatch(name)
        if found is None or len(header.shape) != 3 or f"{name}_bias" in stored:
            headers[name] = header
            continue
        count, rows, columns = header.shape
        names = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else (found[2],)
        height = rows // len(names)
        for expert in range(count):
            for index, one in enumerate(names):
                own = f"{found[1]}{expert}.{one}.weight"
                headers[own] = TensorHeader(header.code, (height, columns))
                parts[own] = ExpertPart(name, expert, index * height, (index + 1) * height)
    return headers, parts
