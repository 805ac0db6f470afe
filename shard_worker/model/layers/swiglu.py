"""SwiGLU, `down(silu(gate(x)) * up(x))`, with gate and up in one product."""

from __future__ import annotations

import torch

from shard_worker.model.layer_weights import LayerTensors, MlpWeights
from shard_worker.model.rows import Rows
from shard_worker.ops.activation import swiglu
from shard_worker.weights.weight import concatenate


def pack(tensors: LayerTensors) -> MlpWeights:
    """Return the weights with one matrix for gate and up."""
    gate, up, down = (tensors.matrices[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return MlpWeights(concatenate([gate, up]).prepared(), down.prepared())


def run(weights: MlpWeights, x: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
    """Return what rows x [n, hidden] become, [n, hidden]. rows: what they are, where they are a step's."""
    fixed_rows = None if rows is None else rows.batch_invariant_rows
    gate_up = weights.gate_up.matmul(x, None, fixed_rows)
    hidden = swiglu(gate_up) if rows is None else rows.each(rows.operations.swiglu, gate_up)
    return weights.down.matmul(hidden, None, fixed_rows)
