"""Sublayers without their math, one file each: the tensors that a checkpoint has for one, and what it caches.

A sublayer is found by the name of its module, which `LayerKind.mixer` and `ModelConfig.feed_forward` give; its math is
the worker's module of the same name. The functions here put the sublayers of a whole layer together.
"""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Protocol, cast

from services.model.cached_tensors import CachedTensor
from services.model.config import ModelConfig
from services.model.stored_experts import is_of_expert

Shapes = dict[str, tuple[int, ...]]
"""The shape of every tensor by its name behind `layers.N.`, in the order in which they are loaded."""


OUTPUT_SCALE = "layer_scalar"
"""The name of what a layer's output is multiplied by, where there is one."""


PER_LAYER_GATE = "per_layer_input_gate.weight"
PER_LAYER_OUT = "per_layer_projection.weight"
PER_LAYER_NORM = "post_per_layer_input_norm.weight"
"""What takes a token's own input of a layer into the residual stream, where there are per-layer embeddings."""


class Norm(StrEnum):
    """Where an RMSNorm of a decoder layer stands: before a sublayer, or behind it."""

    MIXER = "mixer"
    MIXER_OUTPUT = "mixer_output"
    FEED_FORWARD = "feed_forward"
    FEED_FORWARD_OUTPUT = "feed_forward_output"


class Sublayer(Protocol):
    """What a module of this package offers."""

    def tensor_shapes(self, config: ModelConfig, layer: int) -> Shapes:
        """Return the tensors of a layer's sublayer."""

    def cached_tensors(self, config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
        """Return what a session keeps of a layer's sublayer."""


def sublayer_of(name: str) -> Sublayer:
    """Return the module of this name, which is one that a family's ModelConfig holds."""
    return cast(Sublayer, importlib.import_module(f"{__name__}.{name}"))


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Return the tensors of a decoder layer: two norms or four, a mixer, a feed-forward part and maybe a factor."""
    return {
        **dict.fromkeys(norm_names(config).values(), (config.hidden_size,)),
        **({OUTPUT_SCALE: (1,)} if config.output_scale else {}),
        **_per_layer_shapes(config),
        **sublayer_of(config.layer_kinds[layer].mixer).tensor_shapes(config, layer),
        **sublayer_of(config.feed_forward(layer)).tensor_shapes(config, layer),
    }


def _per_layer_shapes(config: ModelConfig) -> Shapes:
    if config.per_layer is None:
        return {}
    size, hidden = config.per_layer.size, config.hidden_size
    return {PER_LAYER_GATE: (size, hidden), PER_LAYER_OUT: (hidden, size), PER_LAYER_NORM: (hidden,)}


def norm_names(config: ModelConfig) -> dict[Norm, str]:
    """Return the names of a decoder layer's norms. Where outputs have norms, too, the second one's name is theirs."""
    if not config.output_norms:
        return {Norm.MIXER: "input_layernorm.weight", Norm.FEED_FORWARD: "post_attention_layernorm.weight"}
    return {
        Norm.MIXER: "input_layernorm.weight",
        Norm.MIXER_OUTPUT: "post_attention_layernorm.weight",
        Norm.FEED_FORWARD: "pre_feedforward_layernorm.weight",
        Norm.FEED_FORWARD_OUTPUT: "post_feedforward_layernorm.weight",
    }


def read_share(config: ModelConfig, name: str) -> float:
    """Return which share of a tensor a step of one row reads: of experts, those that the row goes through.

    name: full, or behind `layers.N.`. As the experts of a layer are alike, it stands for that share of all of them.
    """
    experts = config.experts
    return 1.0 if experts is None or not is_of_expert(name) else experts.chosen / experts.count


def layer_caches(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return what a session keeps for a decoder layer."""
    mixer, feed_forward = sublayer_of(config.layer_kinds[layer].mixer), sublayer_of(config.feed_forward(layer))
    return (*mixer.cached_tensors(config, layer), *feed_forward.cached_tensors(config, layer))
