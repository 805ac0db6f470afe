"""What a session remembers on one device: attention keys and values, and the state of recurrent layers.

Preallocated for the whole session and written in place. Layers of one kind are stacked, so that committing a block is a
few operators for all of them together. Rows beyond the committed length are scratch: attention overwrites them, and
recurrent layers only keep what they need to advance by any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.layers import LayerRange
from shard_worker.model_config import LayerKind, LinearAttentionConfig, ModelConfig
from shard_worker.ops import deltanet
from shard_worker.prefix_state import GroupKind, RowsView, StateView, TensorGroup, WholeView


class AttentionCache:
    """Keys (after norm and RoPE) and values of all attention layers of a segment: [layers, kv_heads, capacity, dim]."""

    def __init__(self, layers: int, kv_heads: int, capacity: int, head_dim: int, like: torch.Tensor) -> None:
        shape = (layers, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, slot: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows [n, kv_heads, dim] of layer `slot` at `positions` [n]."""
        self.keys[slot].index_copy_(1, positions, keys.transpose(0, 1))
        self.values[slot].index_copy_(1, positions, values.transpose(0, 1))


class RecurrentCache:
    """State, convolution inputs and, between a verify and its commit, the block's own rows of all linear layers.

    state: float32 [layers, value_heads, key_dim, value_dim]. conv: [layers, taps - 1 + block, channels]; the first
    taps - 1 rows are the last committed inputs, the others belong to the block in flight.
    """

    def __init__(self, layers: int, shape: LinearAttentionConfig, block_rows: int, like: torch.Tensor) -> None:
        heads = shape.value_heads

        def zeros(*extents: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((layers, *extents), dtype=dtype, device=like.device)

        self.taps = shape.conv_taps
        self.state = zeros(heads, shape.key_head_dim, shape.value_head_dim)
        self.conv = zeros(self.taps - 1 + block_rows, shape.conv_channels, dtype=like.dtype)
        self._keys = zeros(heads, block_rows, shape.key_head_dim)
        self._corrected = zeros(heads, block_rows, shape.value_head_dim)
        self._running = zeros(heads, block_rows)

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in (self.state, self.conv, self._keys, self._corrected, self._running))

    def window(self, slot: int, rows: torch.Tensor, deferred: bool) -> torch.Tensor:
        """Inputs of the convolution for new rows [n, channels]: the committed ones before them and they themselves."""
        before = self.taps - 1
        if deferred:
            self.conv[slot, before : before + rows.shape[0]] = rows
            return self.conv[slot, : before + rows.shape[0]]
        window = torch.cat((self.conv[slot, :before], rows))
        self.conv[slot, :before] = window[-before:]
        return window

    def record(self, slot: int, keys: torch.Tensor, corrected: torch.Tensor, running: torch.Tensor) -> None:
        """Keep what committing a part of the block in flight needs."""
        rows = keys.shape[1]
        self._keys[slot, :, :rows] = keys
        self._corrected[slot, :, :rows] = corrected
        self._running[slot, :, :rows] = running

    def commit(self, rows: int) -> None:
        """Advance all layers by the first `rows` rows of the block in flight."""
        before = self.taps - 1
        deltanet.commit(
            self.state.flatten(0, 1),
            self._keys[:, :, :rows].flatten(0, 1),
            self._corrected[:, :, :rows].flatten(0, 1),
            self._running[:, :, :rows].flatten(0, 1),
        )
        self.conv[:, :before] = self.conv[:, rows : rows + before].clone()


@dataclass(slots=True)
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
    ) -> SegmentCaches:
        """Caches for layers of these kinds. capacity: positions; block_rows: rows of the largest verify."""
        slots: list[int] = []
        linear = attention = 0
        for kind in kinds:
            if kind is LayerKind.LINEAR:
                slots.append(linear)
                linear += 1
            else:
                slots.append(attention)
                attention += 1
        recurrent = None
        if linear:
            assert config.linear is not None
            recurrent = RecurrentCache(linear, config.linear, block_rows, like)
        keys_and_values = None
        if attention:
            keys_and_values = AttentionCache(attention, config.kv_heads, capacity, config.head_dim, like)
        return cls(keys_and_values, recurrent, tuple(slots))

    @property
    def size_bytes(self) -> int:
        return sum(cache.size_bytes for cache in (self.attention, self.recurrent) if cache is not None)

    def views(self) -> list[StateView]:
        """In the order of `state_groups`."""
        views: list[StateView] = []
        if self.attention is not None:
            views += [RowsView(self.attention.keys), RowsView(self.attention.values)]
        if self.recurrent is not None:
            committed = self.recurrent.conv[:, : self.recurrent.taps - 1]
            views += [WholeView(self.recurrent.state), WholeView(committed)]
        return views

    def commit_block(self, rows: int) -> None:
        """Let the first `rows` rows of the block in flight count. Attention needs nothing: length decides there."""
        if self.recurrent is not None:
            self.recurrent.commit(rows)


def state_groups(config: ModelConfig, layers: LayerRange, dtype: torch.dtype) -> list[TensorGroup]:
    """What sessions remember of these layers, as it is kept for a prefix."""
    kinds = {layer: config.layer_kinds[layer] for layer in range(layers.first, layers.last)}
    attention = [layer for layer, kind in kinds.items() if kind is not LayerKind.LINEAR]
    linear = [layer for layer, kind in kinds.items() if kind is LayerKind.LINEAR]

    def named(what: str, of: list[int]) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.{what}" for layer in of)

    groups: list[TensorGroup] = []
    if attention:
        extents = (config.kv_heads, config.head_dim)
        groups += [TensorGroup(GroupKind.ROWS, named(what, attention), extents, dtype) for what in ("k", "v")]
    if linear:
        shape = config.linear
        assert shape is not None
        state = (shape.value_heads, shape.key_head_dim, shape.value_head_dim)
        conv = (shape.conv_taps - 1, shape.conv_channels)
        groups.append(TensorGroup(GroupKind.STATE, named("recurrent", linear), state, torch.float32))
        groups.append(TensorGroup(GroupKind.STATE, named("conv", linear), conv, dtype))
    return groups
