"""SwiGLU, `down(silu(gate(x)) * up(x))`, with gate and up in one product."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from services.model.config import Activation, ClampedSwiGlu, ModelConfig
from shard_worker.model.layer_weights import LayerTensors, MlpWeights
from shard_worker.model.rows import PLAIN, Rows
from shard_worker.ops.activation import clamped_swiglu
from shard_worker.weights.weight import concatenate


def pack(config: ModelConfig, layer: int, tensors: LayerTensors) -> MlpWeights:
    """Return the weights with one matrix for gate and up."""
    gate, up, down = (tensors.matrices[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    weights = MlpWeights(concatenate([gate, up]).prepared(), down.prepared(), activation=config.activation)
    if not config.mlp_bias:
        return weights
    of_gate, of_up, of_down = (tensors.vectors[f"mlp.{part}_proj.bias"] for part in ("gate", "up", "down"))
    return replace(weights, gate_up_bias=torch.cat([of_gate, of_up]), down_bias=of_down)


def run(
    weights: MlpWeights, x: torch.Tensor, rows: Rows | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what rows x [n, hidden] become, [n, hidden]. rows, residual: as of `FeedForward.run`."""
    fixed_rows = None if rows is None else rows.batch_invariant_rows
    hidden = gated(weights, weights.gate_up.matmul(x, weights.gate_up_bias, fixed_rows), rows)
    return weights.down.matmul(hidden, weights.down_bias, fixed_rows)


def gated(weights: MlpWeights, gate_up: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
    """Return what `down` takes, [n, mlp], of the products with `gate_up`, [n, 2 * mlp]. rows: as of `run`."""
    operations = PLAIN if rows is None else rows.operations
    gate = operations.swiglu
    if isinstance(weights.activation, ClampedSwiGlu):
        limit, alpha = weights.activation.limit, weights.activation.alpha
        gate = functools.partial(clamped_swiglu, limit=limit, alpha=alpha)
    elif weights.activation is Activation.GELU_TANH:
        gate = operations.geglu
    return gate(gate_up) if rows is None else rows.each(gate, gate_up)
