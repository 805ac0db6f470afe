"""A mixture of experts beside a dense feed-forward part: each takes the residual stream by a norm of its own, and what
each makes has a norm before both are added."""

from __future__ import annotations

from services.model.cached_tensors import CachedTensor
from services.model.config import ModelConfig
from services.model.layers import experts, swiglu

ROUTER_SCALE, EXPERT_SCALES = "router.scale", "router.per_expert_scale"
"""What the rows that the router sees are multiplied by, and what each expert's share is."""

DENSE_OUTPUT_NORM = "post_feedforward_layernorm_1.weight"
EXPERTS_NORM = "pre_feedforward_layernorm_2.weight"
EXPERTS_OUTPUT_NORM = "post_feedforward_layernorm_2.weight"


def tensor_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of both parts, with the norms that stand between them and the layer's own."""
    width = (config.hidden_size,)
    return {
        **swiglu.tensor_shapes(config, layer),
        **experts.tensor_shapes(config, layer),
        ROUTER_SCALE: width,
        EXPERT_SCALES: (experts.sizes(config).count,),
        **dict.fromkeys((DENSE_OUTPUT_NORM, EXPERTS_NORM, EXPERTS_OUTPUT_NORM), width),
    }


def cached_tensors(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return nothing: it remembers no row."""
    return ()
