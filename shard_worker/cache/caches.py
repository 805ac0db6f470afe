"""What a session remembers on one device: attention keys and values, and the state of recurrent layers.

Written in place. Layers of one kind are stacked, so that committing a block is a few operators for all of them
together. Rows beyond the committed length are scratch: attention overwrites them, and recurrent layers only keep what
they need to advance by any number of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.layers import LayerRange
from services.model.config import LayerKind, LinearAttentionConfig, ModelConfig
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.prefix_state import GroupKind, StateView, TensorGroup, WholeView
from shard_worker.ops import deltanet


class RecurrentCache:
    """State, convolution inputs and, between a verify and its commit, the block's own rows of all linear layers.

    state: float32 [layers, value_heads, key_dim, value_dim]. conv: [layers, taps - 1 + block, channels]; the first
    taps - 1 rows are the last committed inputs, the others belong to the block in flight. keys, corrected, decays:
    float32 [layers, value_heads, block, …], what advancing by some of the block's rows needs; decays are the running
    sums of log decays where the block was computed as one, each row's own factor where its rows were one by one, or by
    kernels.
    """

    def __init__(
        self, layers: int, shape: LinearAttentionConfig, block_rows: int, like: torch.Tensor, *, exact: bool = False
    ) -> None:
        """exact: blocks are computed row by row."""
        self._exact = exact
        heads = shape.value_heads

        def zeros(*extents: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((layers, *extents), dtype=dtype, device=like.device)

        self.taps = shape.conv_taps
        self.state = zeros(heads, shape.key_head_dim, shape.value_head_dim)
        self.conv = zeros(self.taps - 1 + block_rows, shape.conv_channels, dtype=like.dtype)
        self.keys = zeros(heads, block_rows, shape.key_head_dim)
        self.corrected = zeros(heads, block_rows, shape.value_head_dim)
        self.decays = zeros(heads, block_rows)
        memory = (self.state, self.conv, self.keys, self.corrected, self.decays)
        self.addresses = (*(tensor.data_ptr() for tensor in memory), block_rows)
        """Of state, conv, keys, corrected and decays, and how many rows of a block there is room for."""

    @functools.cached_property
    def place(self) -> torch.Tensor:
        """The addresses on the device, as kernels take them."""
        return torch.tensor([0, 0, 0, *self.addresses], device=self.state.device)

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in (self.state, self.conv, self.keys, self.corrected, self.decays))

    def window(self, slot: int, rows: torch.Tensor, uncommitted: bool) -> torch.Tensor:
        """Inputs of the convolution for new rows [n, channels]: the committed ones before them and they themselves."""
        before = self.taps - 1
        if uncommitted:
            self.conv[slot, before : before + rows.shape[0]] = rows
            return self.conv[slot, : before + rows.shape[0]]
        window = torch.cat((self.conv[slot, :before], rows))
        self.advance_inputs(slot, rows)
        return window

    def advance_inputs(self, slot: int, rows: torch.Tensor) -> None:
        """New rows [n, channels] count: the last ones are what the next convolution begins with."""
        before = self.taps - 1
        if len(rows) < before:
            rows = torch.cat((self.conv[slot, :before], rows))
        self.conv[slot, :before] = rows[-before:]

    def record(self, slot: int, keys: torch.Tensor, corrected: torch.Tensor, decays: torch.Tensor) -> None:
        """Keep what committing a part of the block in flight needs."""
        rows = keys.shape[1]
        self.keys[slot, :, :rows] = keys
        self.corrected[slot, :, :rows] = corrected
        self.decays[slot, :, :rows] = decays

    def commit(self, rows: int) -> None:
        """Advance all layers by the first `rows` rows of the block in flight."""
        before = self.taps - 1
        commit = deltanet.commit_by_steps if self._exact else deltanet.commit
        commit(
            self.state.flatten(0, 1),
            self.keys[:, :, :rows].flatten(0, 1),
            self.corrected[:, :, :rows].flatten(0, 1),
            self.decays[:, :, :rows].flatten(0, 1),
        )
        self.conv[:, :before] = self.conv[:, rows : rows + before].clone()


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
