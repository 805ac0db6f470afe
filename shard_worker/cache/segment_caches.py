"""All that a session remembers of one segment's layers: an attention cache, a recurrent cache, or both.

They are written in place. Rows beyond the committed length are scratch: attention overwrites them, and recurrent layers
only keep what they need to advance by any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.layers import LayerRange
from services.model.config import LayerKind, ModelConfig
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.prefix_state import GroupKind, StateView, TensorGroup, WholeView
from shard_worker.cache.recurrent_cache import RecurrentCache


@dataclass(slots=True, weakref_slot=True)
class SegmentCaches:
    """The caches of one segment, and each layer's place in them."""

    attention: AttentionCache | None
    recurrent: RecurrentCache | None
    slots: tuple[int, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        kinds: Sequence[LayerKind],
        capacity: int,
        block_rows: int,
        like: torch.Tensor,
        page_rows: int | None = None,
        *,
        exact: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> SegmentCaches:
        """Caches for layers of these kinds. capacity: positions; block_rows: rows of the largest verify; page_rows:
        positions that are allocated at a time, by default all; exact: blocks are computed row by row; kv_dtype: see
        `AttentionCache`."""
        linear = kinds.count(LayerKind.LINEAR)
        attention = len(kinds) - linear
        recurrent = None
        if linear:
            assert config.linear is not None
            recurrent = RecurrentCache(linear, config.linear, block_rows, like, exact=exact)
        keys_and_values = None
        if attention:
            keys_and_values = AttentionCache(
                attention, config.kv_heads, capacity, config.head_dim, like, page_rows, kept=kv_dtype
            )
        return cls(keys_and_values, recurrent, slots_of(kinds))

    @property
    def size_bytes(self) -> int:
        return sum(cache.size_bytes for cache in (self.attention, self.recurrent) if cache is not None)

    def has_room(self, length: int) -> bool:
        """For the first `length` positions, without asking for memory."""
        return self.attention is None or self.attention.has_room(length)

    def reserve(self, length: int) -> None:
        """Make room for the first `length` positions."""
        if self.attention is not None:
            self.attention.reserve(length)

    def views(self) -> list[StateView]:
        """In the order of `state_groups`."""
        views: list[StateView] = []
        if self.attention is not None:
            views += [AttentionView(self.attention, slice(None), which) for which in (0, 1)]
        if self.recurrent is not None:
            committed = self.recurrent.conv[:, : self.recurrent.taps - 1]
            views += [WholeView(self.recurrent.state), WholeView(committed)]
        return views

    def commit_block(self, rows: int) -> None:
        """Let the first `rows` rows of the block in flight count. Attention needs nothing: length decides there."""
        if self.recurrent is not None:
            self.recurrent.commit(rows)


def slots_of(kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    """Each layer's place among those that share a cache with it: recurrent ones, or all that attend."""
    linear = [kind is LayerKind.LINEAR for kind in kinds]
    return tuple(linear[:layer].count(one) for layer, one in enumerate(linear))


def state_groups(
    config: ModelConfig, layers: LayerRange, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[TensorGroup]:
    """What sessions remember of these layers, as it is kept for a prefix."""
    kinds = {layer: config.layer_kinds[layer] for layer in range(layers.first, layers.last)}
    attention = [layer for layer, kind in kinds.items() if kind is not LayerKind.LINEAR]
    linear = [layer for layer, kind in kinds.items() if kind is LayerKind.LINEAR]

    def named(what: str, of: list[int]) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.{what}" for layer in of)

    groups: list[TensorGroup] = []
    if attention:
        extents = (config.kv_heads, config.head_dim)
        kept = kv_dtype or dtype
        groups += [TensorGroup(GroupKind.ROWS, named(what, attention), extents, kept) for what in ("k", "v")]
    if linear:
        shape = config.linear
        assert shape is not None
        state = (shape.value_heads, shape.key_head_dim, shape.value_head_dim)
        conv = (shape.conv_taps - 1, shape.conv_channels)
        groups.append(TensorGroup(GroupKind.STATE, named("recurrent", linear), state, torch.float32))
        groups.append(TensorGroup(GroupKind.STATE, named("conv", linear), conv, dtype))
    return groups
