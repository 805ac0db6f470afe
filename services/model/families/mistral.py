"""Mistral (`model_type: mistral`): Llama without biases, and where there is a window all layers slide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.model.config import LayerKind, ModelConfig
from services.model.config_reader import ConfigReader
from services.model.families import llama

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    # Unlike a window that is not mentioned, one that is null is none.
    given = {**_DEFAULTS, **raw}
    reader = ConfigReader(given)
    for key in ("attention_bias", "mlp_bias"):
        reader.only(key, False)
    dense = replace(llama.read_config(given), family="mistral")
    if not reader.has("sliding_window"):
        return dense
    window, kinds = reader.integer("sliding_window"), (LayerKind.SLIDING,) * dense.num_layers
    return replace(dense, layer_kinds=kinds, sliding_window=window)
