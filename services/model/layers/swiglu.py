"""SwiGLU, the feed-forward part of most decoders: `down(silu(gate(x)) * up(x))`."""

from __future__ import annotations

from services.model.cached_tensors import CachedTensor
from services.model.config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return its three matrices."""
    return {
        "mlp.gate_proj.weight": (config.mlp_size, config.hidden_size),
        "mlp.up_proj.weight": (config.mlp_size, config.hidden_size),
        "mlp.down_proj.weight": (config.hidden_size, config.mlp_size),
    }


def cached_tensors(config: ModelConfig) -> tuple[CachedTensor, ...]:
    """Return nothing: it remembers no row."""
    return ()
