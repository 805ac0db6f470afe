"""Qwen3.5 and 3.6 dense, text part (`model_type: qwen3_5`): Gated DeltaNet and gated attention, and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.config import ModelConfig
from services.model.hybrid_decoder import read_hybrid


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    return read_hybrid(raw, "qwen3_5")
