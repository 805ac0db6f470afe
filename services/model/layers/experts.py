"""A mixture of experts: a router sends each row through a few of many SwiGLUs, and all rows may go through a shared one
(arXiv 1701.06538, 2401.06066)."""

from __future__ import annotations

from services.model.cached_tensors import CachedTensor
from services.model.config import ExpertsConfig, ModelConfig


def sizes(config: ModelConfig) -> ExpertsConfig:
    """Return the mixture's sizes, which every family with such layers reads."""
    assert config.experts is not None
    return config.experts


def tensor_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return each expert's three matrices, the router, biases of these and, where there is one, the shared expert and
    its gate."""
    experts, hidden = sizes(config), config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(experts.count):
        shapes |= _swiglu(f"{experts.prefix}{expert}.", hidden, experts.size)
    if experts.biased:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
        shapes[f"{experts.router}.bias"] = (experts.count,)
    shapes[f"{experts.router}.weight"] = (experts.count, hidden)
    if experts.sigmoid is not None:
        shapes[experts.sigmoid.bias] = (experts.count,)
    if experts.shared_size is not None:
        shapes |= _swiglu(f"{experts.shared}.", hidden, experts.shared_size)
        if experts.shared_gated:
            shapes[f"{experts.shared}_gate.weight"] = (1, hidden)
    return shapes


def cached_tensors(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return nothing: it remembers no row."""
    return ()


def _swiglu(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }
