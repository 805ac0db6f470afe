"""SwiGLU, the feed-forward part of most decoders: `down(silu(gate(x)) * up(x))`."""

from __future__ import annotations

from services.model.cached_tensors import CachedTensor
from services.model.config import ModelConfig


def tensor_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return its three matrices, and a bias of each where there are any."""
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate_proj.weight": (config.mlp_size_of(layer), config.hidden_size),
        "mlp.up_proj.weight": (config.mlp_size_of(layer), config.hidden_size),
        "mlp.down_proj.weight": (config.hidden_size, config.mlp_size_of(layer)),
    }
    if config.mlp_bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


def cached_tensors(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return nothing: it remembers no row."""
    return ()
