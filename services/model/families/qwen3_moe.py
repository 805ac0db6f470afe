"""Qwen3 with mixtures of experts (`model_type: qwen3_moe`), such as 30B-A3B: Qwen3's attention, and experts in place of
SwiGLU in all layers or some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.model.config import ExpertsConfig, ModelConfig, read_sparse_layers
from services.model.config_reader import ConfigReader
from services.model.families import qwen3


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    head_dim = reader.integer("hidden_size") // reader.integer("num_attention_heads")
    size = reader.integer("moe_intermediate_size", 768)
    # Without a list of kinds, a window is one of all layers.
    changes = {"head_dim": reader.integer("head_dim", head_dim), "max_window_layers": 0}
    dense = qwen3.read_config({"intermediate_size": size, **raw, **changes})
    experts = ExpertsConfig(
        count=reader.integer("num_experts" if reader.has("num_experts") else "num_local_experts", 128),
        chosen=reader.integer("num_experts_per_tok", 8),
        size=size,
        normalised=reader.flag("norm_topk_prob", False),
        layers=read_sparse_layers(reader, dense.num_layers),
    )
    return replace(dense, family="qwen3_moe", experts=experts)
