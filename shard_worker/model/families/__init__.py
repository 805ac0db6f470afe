"""Model families, one file each, named after Hugging Face's `model_type` and found by that name.

A family module has:
    read_config(raw) -> ModelConfig                      from config.json (the text part of it)
    layer_shapes(config, layer) -> {name: shape}         every tensor of a layer, without its `layers.N.` prefix
    pack_layer(config, layer, tensors) -> weights        fused and converted for `run_layer`
    run_layer(config, weights, slot, hidden, rows, caches) -> hidden
    norm_weight(stored) -> Tensor                        the float32 factor of an RMSNorm from its stored weight
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from services.errors import InvalidArgument, Unimplemented
from services.model.config import ModelConfig
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.rows import Rows

TEXT_SUFFIX = "_text"


class Family(Protocol):
    """What a family module offers; see the package's docstring."""

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig: ...
    def layer_shapes(self, config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]: ...
    def pack_layer(self, config: ModelConfig, layer: int, tensors: Mapping[str, torch.Tensor]) -> Any: ...
    def run_layer(
        self,
        config: ModelConfig,
        weights: Any,
        slot: int,
        hidden: torch.Tensor,
        rows: Rows,
        caches: SegmentCaches,
    ) -> torch.Tensor: ...
    def norm_weight(self, stored: torch.Tensor) -> torch.Tensor: ...


def known_families() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def family_of(config: Mapping[str, Any]) -> tuple[str, Family, ModelConfig]:
    """Name, module and model shape for a config.json.

    Raises InvalidArgument without a model_type and Unimplemented for a quantised model and, listing the known families,
    for one of an unknown family.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise InvalidArgument("config.json has no model_type", field="model_type")
    name = name.removesuffix(TEXT_SUFFIX)
    if name not in known_families():
        raise Unimplemented(
            f"model_type {config['model_type']!r} is not supported; known families: {', '.join(known_families())}",
            reason="UNKNOWN_FAMILY",
            field="model_type",
        )
    nested = config.get("text_config")
    # Where a multimodal config says it only once, it says it outside.
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    text = {**outer, **nested} if isinstance(nested, Mapping) else config
    if text.get("quantization_config"):
        raise Unimplemented(
            "config.json: quantization_config marks a quantised checkpoint: use one with float32, bfloat16 or float16 "
            "weights",
            field="quantization_config",
        )
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return name, module, module.read_config(text)
