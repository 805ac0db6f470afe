"""A mixture of experts beside a dense feed-forward part: each takes the residual stream by a norm of its own, and what
each makes has a norm before both are added."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.model.config import ModelConfig
from services.model.layers import experts_beside as names
from shard_worker.model.layer_weights import ExpertsBesideWeights, LayerTensors, norm_factor
from shard_worker.model.layers import experts, swiglu
from shard_worker.model.rows import PLAIN, Rows


def pack(config: ModelConfig, layer: int, tensors: LayerTensors) -> ExpertsBesideWeights:
    """Return the weights of both parts."""
    vectors = tensors.vectors
    mixture = experts.pack(config, layer, tensors)
    router_norm, together = vectors[names.ROUTER_SCALE].float() * config.hidden_size**-0.5, mixture.together
    if together is not None:
        # Kernels score rows as they are, and know the factor of their norm afterwards.
        together = replace(together, scores=together.scores * router_norm)
    return ExpertsBesideWeights(
        dense=swiglu.pack(config, layer, tensors),
        experts=replace(mixture, scales=vectors[names.EXPERT_SCALES].float(), together=together),
        router_norm=router_norm,
        experts_norm=norm_factor(config, vectors[names.EXPERTS_NORM]),
        dense_output_norm=norm_factor(config, vectors[names.DENSE_OUTPUT_NORM]),
        experts_output_norm=norm_factor(config, vectors[names.EXPERTS_OUTPUT_NORM]),
        eps=config.norm_eps,
    )


def run(
    weights: ExpertsBesideWeights, x: torch.Tensor, rows: Rows | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what rows become, [n, hidden]. x: on their way to the dense part. residual: before any norm."""
    assert residual is not None
    norm, eps = (PLAIN if rows is None else rows.operations).rms_norm, weights.eps
    dense = norm(swiglu.run(weights.dense, x, rows), weights.dense_output_norm, eps)
    routed = norm(residual.float(), weights.router_norm, eps)
    mixed = experts.run(weights.experts, norm(residual, weights.experts_norm, eps), rows, routed=routed)
    return dense + norm(mixed, weights.experts_output_norm, eps)
