"""Products of rows with weight matrices.

On the CPU a matrix is packed once into the blocks that oneDNN reads: one row then costs half of what it costs from a
plain matrix, sixteen float32 rows a third.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PACKED_FOR = 16
"""Rows that the blocks are chosen for; all other numbers of rows take them too."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """For `linear`: a copy in blocks where that is faster, else the matrix [out, in] itself."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    ops = torch.ops.mkldnn
    if weight.dtype is not torch.float32 and not (weight.dtype is torch.bfloat16 and ops._is_mkldnn_bf16_supported()):
        return weight
    blocks: torch.Tensor = ops._reorder_linear_weight(weight.contiguous(), PACKED_FOR)
    return blocks


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, made_of: int | None = None
) -> torch.Tensor:
    """x [n, in], weight [out, in] as it is or `packed`, bias [out] -> [n, out].

    made_of: compute a product of so many rows in any case. How a row is rounded depends on their number, because
    libraries have different loops for different ones, and not on what or where the others are.
    """
    if made_of is not None and len(x) < made_of:
        return linear(F.pad(x, (0, 0, 0, made_of - len(x))), weight, bias)[: len(x)]
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made
