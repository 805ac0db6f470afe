"""gpt-oss: the converter takes gates and ups apart, whose rows alternate in checkpoints, and turns experts' matrices
round where they are not packed. That their RoPE blends between no whole pairs is not said in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import DECODER_NAMES, EXPERTS_NAMES, decoder_config, experts_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import stored_unchanged

stored_tensor = stored_unchanged


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    experts = experts_config(metadata, tensors)
    size = experts.pop("moe_intermediate_size")
    config = decoder_config(metadata, tensors, size)
    rope = config["rope_parameters"]
    return {
        **config,
        **experts,
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": size,
        "sliding_window": metadata.integer("{arch}.attention.sliding_window"),
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return {
        **DECODER_NAMES,
        **EXPERTS_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
        "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    }
