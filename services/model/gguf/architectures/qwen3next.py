"""Qwen3-Next: norms, decays and the convolution changed as in Qwen3.5, but value heads keep their order.

The converter puts the rows of a linear layer's queries, keys, values and gates, which a checkpoint has together by key
head, in the order of Qwen3.5's two projections, which older converters did not, and leaves those of betas and decays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.gguf.architectures import qwen35, qwen35moe
from services.model.gguf.container import GgufTensor
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import StoredTensor


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    return qwen35moe.read_config(metadata, tensors) | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "qkvz_grouped": "blk.0.ssm_in.weight" in tensors,
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return {**qwen35moe.tensor_names(), "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}


def stored_tensor(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor with what was changed of it."""
    return qwen35moe.shared_gate(name, tensor) or qwen35.unchanged_order(name, tensor)
