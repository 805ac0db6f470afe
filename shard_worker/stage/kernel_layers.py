"""Describes a segment's layers to the kernels that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.model.config import LayerKind
from shard_worker.cache.attention_cache import PAGE_ROWS
from shard_worker.model.layer_weights import AttentionWeights
from shard_worker.stage.segment import Segment

if TYPE_CHECKING:
    from shard_worker.model.kernels import decoder


def kernel_layers(segment: Segment) -> decoder.Layers:
    """Return a segment's layers as kernels take them."""
    from shard_worker.model.kernels import decoder, deltanet
    from shard_worker.model.kernels.heads import HeadShape

    config = segment.config
    kinds = config.layer_kinds[segment.layers.first : segment.layers.last]
    heads = {
        kind: HeadShape(
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            rotary=config.rope.rotary_dim,
            page=PAGE_ROWS,
            window=(config.sliding_window or 0) if kind is LayerKind.SLIDING else 0,
            gated=any(isinstance(one.mixer, AttentionWeights) and one.mixer.gated for one in segment.weights),
            float8=segment.kv_dtype is not None,
        )
        for kind in set(kinds) - {LayerKind.LINEAR}
    }
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
        rotation=segment.rotation,
        eps=config.norm_eps,
    )
