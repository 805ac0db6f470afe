"""Describes a segment's layers to the kernels that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.model.cached_tensors import PAGE_ROWS
from services.model.config import LayerKind, ModelConfig
from shard_worker.cache.segment_caches import KeyKind
from shard_worker.model.layer_weights import AttentionWeights
from shard_worker.stage.segment import Segment

if TYPE_CHECKING:
    from shard_worker.model.kernels import decoder


def page_count(config: ModelConfig) -> int:
    """Return how many pages of a cache a session may have."""
    return -(-config.max_position // PAGE_ROWS) + 1


def kernel_layers(segment: Segment) -> decoder.Layers:
    """Return a segment's layers as kernels take them."""
    from shard_worker.model.kernels import decoder, deltanet
    from shard_worker.model.kernels.heads import HeadShape

    config = segment.config
    kinds = config.layer_kinds[segment.layers.first : segment.layers.last]
    caches = [*segment.key_kinds]
    heads = [
        HeadShape(
            heads=one.mixer.shape.heads,
            kv_heads=one.mixer.shape.kv_heads,
            dim=one.mixer.shape.head_dim,
            rotary=one.mixer.shape.rope.rotary_dim,
            page=PAGE_ROWS,
            window=one.mixer.shape.window or 0,
            gated=one.mixer.gated,
            float8=segment.kv_dtype is not None,
            pages=page_count(config) * caches.index(KeyKind.of(one.mixer.shape)),
            value_norm=one.mixer.value_norm is not None,
            keys_as_values=one.mixer.shape.keys_as_values,
            shares=one.mixer.shares,
        )
        if isinstance(one.mixer, AttentionWeights)
        else None
        for one in segment.weights
    ]
    ropes = {one.mixer.shape.rope for one in segment.weights if isinstance(one.mixer, AttentionWeights)}
    linear = config.linear
    delta = None
    if linear is not None and LayerKind.LINEAR in kinds:
        delta = deltanet.Shape(
            key_heads=linear.key_heads,
            value_heads=linear.value_heads,
            key_dim=linear.key_head_dim,
            value_dim=linear.value_head_dim,
            taps=linear.conv_taps,
            layers=kinds.count(LayerKind.LINEAR),
        )
    return decoder.Layers(
        weights=segment.weights,
        slots=segment.slots,
        heads=heads,
        delta=delta,
        longest=config.max_position,
        rotations={rope: rotation for rope, rotation in segment.rotations.items() if rope in ropes},
        eps=config.norm_eps,
    )
