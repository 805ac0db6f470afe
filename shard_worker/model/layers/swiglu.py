"""SwiGLU: `down(silu(gate(x)) * up(x))`, gate and up in one product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from shard_worker.model.layer_weights import MlpWeights
from shard_worker.model.rows import Rows
from shard_worker.ops.linear import linear, packed


def pack(tensors: Mapping[str, torch.Tensor]) -> MlpWeights:
    gate_up = torch.cat((tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]))
    return MlpWeights(packed(gate_up), packed(tensors["mlp.down_proj.weight"]))


def run(weights: MlpWeights, x: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
    """x: [n, hidden] -> [n, hidden]. rows: what they are, where they are a step's."""
    made_of = None if rows is None else rows.batch_invariant_rows
    gate_up = linear(x, weights.gate_up, None, made_of)
    if rows is not None and rows.kernels:
        from shard_worker.model.kernels import elementwise

        return linear(elementwise.swiglu(gate_up), weights.down, None, made_of)
    gate, up = gate_up.chunk(2, -1)
    gated = F.silu(gate) if rows is None else rows.each(F.silu, gate)
    return linear(gated * up, weights.down, None, made_of)
