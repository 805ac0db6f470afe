"""A decoder layer as most families have it: norm, mixer, residual, norm, feed-forward part, residual. What a sublayer
makes may have a norm of its own before it is added."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol, cast

import torch

from services.model.config import ModelConfig
from services.model.layers import OUTPUT_SCALE, PER_LAYER_GATE, PER_LAYER_NORM, PER_LAYER_OUT, Norm, norm_names
from shard_worker.model.layer_weights import DecoderWeights, LayerTensors, PerLayerWeights, norm_factor
from shard_worker.model.rows import Rows
from shard_worker.ops.activation import gating


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
        mixer=mixer_of(kind.mixer).pack(config, layer, tensors),
        post_norm=norms[Norm.FEED_FORWARD],
        mlp=feed_forward_of(feed_forward).pack(config, layer, tensors),
        feed_forward=feed_forward,
        mixer_output_norm=norms.get(Norm.MIXER_OUTPUT),
        mlp_output_norm=norms.get(Norm.FEED_FORWARD_OUTPUT),
        output_scale=tensors.vectors.get(OUTPUT_SCALE),
        per_layer=None if config.per_layer is None else _pack_per_layer(config, tensors),
    )


def _pack_per_layer(config: ModelConfig, tensors: LayerTensors) -> PerLayerWeights:
    return PerLayerWeights(
        gate=tensors.matrices[PER_LAYER_GATE].prepared(),
        out=tensors.matrices[PER_LAYER_OUT].prepared(),
        norm=norm_factor(config, tensors.vectors[PER_LAYER_NORM]),
        activation=config.activation,
    )


def run(
    config: ModelConfig,
    weights: DecoderWeights,
    slot: int,
    hidden: torch.Tensor,
    rows: Rows,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one layer on hidden [n, hidden_size].

    slot: its place in the caches of its kind. own: the rows' inputs of this layer by per-layer embeddings, [n, size].
    """
    norm = rows.operations.rms_norm
    normed = norm(hidden, weights.input_norm, config.norm_eps)
    mixed = mixer_of(weights.kind.mixer).run(config, weights.mixer, slot, normed, rows)
    if weights.mixer_output_norm is not None:
        mixed = norm(mixed, weights.mixer_output_norm, config.norm_eps)
    hidden = hidden + mixed
    normed = norm(hidden, weights.post_norm, config.norm_eps)
    made = feed_forward_of(weights.feed_forward).run(weights.mlp, normed, rows, hidden)
    if weights.mlp_output_norm is not None:
        made = norm(made, weights.mlp_output_norm, config.norm_eps)
    hidden = hidden + made
    if weights.per_layer is not None:
        assert own is not None
        hidden = hidden + _enter(config, weights.per_layer, hidden, own, rows)
    return hidden if weights.output_scale is None else hidden * weights.output_scale.to(hidden.dtype)


def _enter(
    config: ModelConfig, weights: PerLayerWeights, hidden: torch.Tensor, own: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Return what the rows' own inputs [n, size] add to the residual stream, [n, hidden]."""
    gate = rows.each(gating(weights.activation), weights.gate.matmul(hidden, None, rows.batch_invariant_rows))
    made = weights.out.matmul(gate * own, None, rows.batch_invariant_rows)
    return rows.operations.rms_norm(made, weights.norm, config.norm_eps)


@functools.cache
def mixer_of(name: str) -> Mixer:
    """Return the module of a mixer, by its name in `LayerKind`."""
    return cast(Mixer, importlib.import_module(f"{__package__}.{name}"))


@functools.cache
def feed_forward_of(name: str) -> FeedForward:
    """Return the module of a feed-forward part, by its name in `ModelConfig`."""
    return cast(FeedForward, importlib.import_module(f"{__package__}.{name}"))
