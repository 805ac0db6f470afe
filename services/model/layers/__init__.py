"""Sublayers without their math, one file each: the tensors that a checkpoint has for one, and what it caches.

A sublayer is found by the name of its module, which `LayerKind.mixer` and `ModelConfig.feed_forward` give; its math is
the worker's module of the same name. The functions here put the sublayers of a whole layer together.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from services.model.cached_tensors import CachedTensor
from services.model.config import ModelConfig
from services.model.layers.experts import EXPERTS

Shapes = dict[str, tuple[int, ...]]
"""The shape of every tensor by its name behind `layers.N.`, in the order in which they are loaded."""


class Sublayer(Protocol):
    """What a module of this package offers."""

    def tensor_shapes(self, config: ModelConfig) -> Shapes:
        """Return the tensors of one such sublayer."""

    def cached_tensors(self, config: ModelConfig) -> tuple[CachedTensor, ...]:
        """Return what a session keeps of one such sublayer."""


def sublayer_of(name: str) -> Sublayer:
    """Return the module of this name, which is one that a family's ModelConfig holds."""
    return cast(Sublayer, importlib.import_module(f"{__name__}.{name}"))


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Return the tensors of a decoder layer: two norms, a mixer and a feed-forward part."""
    return {
        "input_layernorm.weight": (config.hidden_size,),
        "post_attention_layernorm.weight": (config.hidden_size,),
        **sublayer_of(config.layer_kinds[layer].mixer).tensor_shapes(config),
        **sublayer_of(config.feed_forward(layer)).tensor_shapes(config),
    }


def read_share(config: ModelConfig, name: str) -> float:
    """Return which share of a tensor a step of one row reads: of experts, those that the row goes through.

    name: full, or behind `layers.N.`. As the experts of a layer are alike, it stands for that share of all of them.
    """
    experts = config.experts
    return 1.0 if experts is None or EXPERTS not in name else experts.chosen / experts.count


def layer_caches(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return what a session keeps for a decoder layer."""
    mixer, feed_forward = sublayer_of(config.layer_kinds[layer].mixer), sublayer_of(config.feed_forward(layer))
    return (*mixer.cached_tensors(config), *feed_forward.cached_tensors(config))
