"""Qwen3.5 and 3.6 with mixtures of experts, text part (`model_type: qwen3_5_moe`), such as 35B-A3B: Gated DeltaNet and
gated attention, and in every layer routed experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.model.config import ExpertsConfig, ModelConfig
from services.model.config_reader import ConfigReader
from services.model.hybrid_decoder import read_hybrid


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    reader.only("norm_topk_prob", True)
    size = reader.integer("moe_intermediate_size", 512)
    dense = read_hybrid(raw, "qwen3_5_moe", size)
    experts = ExpertsConfig(
        count=reader.integer("num_experts", 256),
        chosen=reader.integer("num_experts_per_tok", 8),
        size=size,
        normalised=True,
        layers=frozenset(range(dense.num_layers)),
        shared_size=reader.integer("shared_expert_intermediate_size", 512),
    )
    return replace(dense, experts=experts)
