"""Qwen3-Next (`model_type: qwen3_next`), such as Coder-Next 80B-A3B: Gated DeltaNet, whose projections are grouped by
key head, gated attention, and routed experts beside a shared one in all layers or some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.model.config import ExpertsConfig, ModelConfig, read_sparse_layers
from services.model.config_reader import ConfigReader
from services.model.hybrid_decoder import read_hybrid


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    dense = read_hybrid(raw, "qwen3_next", 5632)
    assert dense.linear is not None
    # Only what is read out of a GGUF file may have the two projections of Qwen3.5.
    linear = replace(dense.linear, qkvz_grouped=reader.flag("qkvz_grouped", True), ba_grouped=True)
    experts = ExpertsConfig(
        count=reader.integer("num_experts", 512),
        chosen=reader.integer("num_experts_per_tok", 10),
        size=reader.integer("moe_intermediate_size", 512),
        normalised=reader.flag("norm_topk_prob", True),
        layers=read_sparse_layers(reader, dense.num_layers),
        shared_size=reader.integer("shared_expert_intermediate_size", 512),
    )
    return replace(dense, experts=experts, linear=linear)
