"""Qwen3.5 and 3.6 with mixtures of experts: as Qwen3.5 dense, and experts that are held together; the shared expert's
gate is a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.gguf.architectures import qwen35
from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import EXPERTS_NAMES, decoder_config, experts_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import StoredTensor


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    experts = experts_config(metadata, tensors)
    dense = decoder_config(metadata, tensors, experts["moe_intermediate_size"])
    return qwen35.hybrid_config(metadata, dense) | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": metadata.integer("{arch}.expert_shared_feed_forward_length"),
        **experts,
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return {**qwen35.tensor_names(), **EXPERTS_NAMES}


def stored_tensor(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor with what was changed of it."""
    return shared_gate(name, tensor) or qwen35.stored_tensor(name, tensor, config)


def shared_gate(name: str, tensor: GgufTensor) -> StoredTensor | None:
    """Return the shared expert's gate, which is a matrix of one row in checkpoints; None for other tensors."""
    return StoredTensor(tensor, (1, tensor.shape[-1])) if name == "mlp.shared_expert_gate.weight" else None
