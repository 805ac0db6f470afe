"""A decoder layer as most families have it: norm, mixer, residual, norm, feed-forward part, residual. What a sublayer
makes may have a norm of its own before it is added."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol, cast

import torch

from services.model.config import ModelConfig
from services.model.layers import OUTPUT_SCALE, Norm, norm_names
from shard_worker.model.layer_weights import DecoderWeights, LayerTensors, norm_factor
from shard_worker.model.rows import Rows


class Mixer(Protocol):
    """What the module of a mixer offers: the part of a layer in which a row sees those before it."""

    def pack(self, config: ModelConfig, layer: int, tensors: LayerTensors) -> Any:
        """Return a layer's weights, fused and converted."""

    def run(
        self,
        config: ModelConfig,
        weights: Any,
        slot: int,
        x: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """Return what the rows [n, hidden] of a step become, [n, hidden]. slot: the layer's place in its caches."""


class FeedForward(Protocol):
    """What the module of a feed-forward part offers: the part of a layer that takes each row by itself."""

    def pack(self, config: ModelConfig, layer: int, tensors: LayerTensors) -> Any:
        """Return a layer's weights, fused and converted."""

    def run(
        self, weights: Any, x: torch.Tensor, rows: Rows | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what rows [n, hidden] become, [n, hidden].

        rows: what they are, where they are a step's. residual: the rows before their norm, for parts that need them.
        """


def pack(config: ModelConfig, layer: int, tensors: LayerTensors) -> DecoderWeights:
    """Return a layer's weights as `run` takes them."""
    kind, feed_forward = config.layer_kinds[layer], config.feed_forward(layer)
    norms = {place: norm_factor(config, tensors.vectors[name]) for place, name in norm_names(config).items()}
    return DecoderWeights(
        kind=kind,
        input_norm=norms[Norm.MIXER],
        mixer=_mixer(kind.mixer).pack(config, layer, tensors),
        post_norm=norms[Norm.FEED_FORWARD],
        mlp=_feed_forward(feed_forward).pack(config, layer, tensors),
        feed_forward=feed_forward,
        mixer_output_norm=norms.get(Norm.MIXER_OUTPUT),
        mlp_output_norm=norms.get(Norm.FEED_FORWARD_OUTPUT),
        output_scale=tensors.vectors.get(OUTPUT_SCALE),
    )


def run(
    config: ModelConfig,
    weights: DecoderWeights,
    slot: int,
    hidden: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """Run one layer on hidden [n, hidden_size]. slot: its place in the caches of its kind."""
    norm = rows.operations.rms_norm
    normed = norm(hidden, weights.input_norm, config.norm_eps)
    mixed = _mixer(weights.kind.mixer).run(config, weights.mixer, slot, normed, rows)
    if weights.mixer_output_norm is not None:
        mixed = norm(mixed, weights.mixer_output_norm, config.norm_eps)
    hidden = hidden + mixed
    normed = norm(hidden, weights.post_norm, config.norm_eps)
    made = _feed_forward(weights.feed_forward).run(weights.mlp, normed, rows, hidden)
    if weights.mlp_output_norm is not None:
        made = norm(made, weights.mlp_output_norm, config.norm_eps)
    hidden = hidden + made
    return hidden if weights.output_scale is None else hidden * weights.output_scale.to(hidden.dtype)


@functools.cache
def _mixer(name: str) -> Mixer:
    return cast(Mixer, importlib.import_module(f"{__package__}.{name}"))


@functools.cache
def _feed_forward(name: str) -> FeedForward:
    return cast(FeedForward, importlib.import_module(f"{__package__}.{name}"))
