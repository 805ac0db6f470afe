"""Qwen3 dense: nothing but names differs from Hugging Face's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import DECODER_NAMES, decoder_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import stored_unchanged

stored_tensor = stored_unchanged


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **decoder_config(metadata, tensors)}


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return DECODER_NAMES | {"ffn_norm": "post_attention_layernorm"}
