"""All that a session remembers of one segment's layers: attention caches, one a kind of keys, and a recurrent one.

They are written in place. Rows beyond the committed length are scratch: attention overwrites them, and recurrent layers
only keep what they need to advance by any number of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.layers import LayerRange
from services.model.cached_tensors import CachedTensor, CacheDtype, Per
from services.model.config import AttentionShape, LayerKind, ModelConfig
from services.model.layers import layer_caches
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.page_pool import PagePool
from shard_worker.cache.prefix_state import GroupKind, StateView, TensorGroup, WholeView
from shard_worker.cache.recurrent_cache import RecurrentCache


class KeyKind(NamedTuple):
    """What layers have in common whose keys and values lie in one cache: the heads of keys, the elements of each, and
    how many positions a row sees, None for all."""

    kv_heads: int
    head_dim: int
    window: int | None

    @classmethod
    def of(cls, shape: AttentionShape) -> KeyKind:
        """Return that of layers that attend so."""
        return cls(shape.kv_heads, shape.head_dim, shape.window)


_GROUP_KINDS = {Per.TOKEN: GroupKind.ROWS, Per.SESSION: GroupKind.STATE}


@dataclass(slots=True, weakref_slot=True)
class SegmentCaches:
    """The caches of one session for one segment; a layer's place in them is in `slots_of`."""

    attention: AttentionCache | None
    """Of the layers whose keys are of one kind with those of the first one that attends; None where none does."""
    recurrent: RecurrentCache | None
    others: tuple[AttentionCache, ...] = ()
    """Of layers with other keys, one for each kind."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        layers: LayerRange,
        kinds: Mapping[KeyKind, int],
        capacity: int,
        block_rows: int,
        like: torch.Tensor,
        page_rows: int | None = None,
        *,
        row_by_row: bool = False,
        kv_dtype: torch.dtype | None = None,
        pool: PagePool | None = None,
    ) -> SegmentCaches:
        """Return empty caches for these layers.

        kinds: as of `key_kinds`. capacity: positions of the longest session. block_rows: rows of its largest verify.
        like: a tensor on the device, of the type that is computed in. page_rows: positions that are allocated at a
        time, None for all. row_by_row: whether a block's rows are computed one by one. kv_dtype: what keys and values
        are kept in, None for the type that is computed in. pool: as of `AttentionCache`.
        """
        linear = config.layer_kinds[layers.first : layers.last].count(LayerKind.LINEAR)
        recurrent = None
        if linear:
            assert config.linear is not None
            recurrent = RecurrentCache(linear, config.linear, block_rows, like, row_by_row=row_by_row)
        caches = [
            AttentionCache(
                count, kind.kv_heads, capacity, kind.head_dim, like, page_rows, kind.window, dtype=kv_dtype, pool=pool
            )
            for kind, count in kinds.items()
        ]
        return cls(caches[0] if caches else None, recurrent, tuple(caches[1:]))

    @property
    def attentions(self) -> tuple[AttentionCache, ...]:
        """All attention caches."""
        return (*(() if self.attention is None else (self.attention,)), *self.others)

    def attention_of(self, shape: AttentionShape) -> AttentionCache:
        """Return the cache of the layers that attend so."""
        kind = KeyKind.of(shape)
        return next(cache for cache in self.attentions if (cache.kv_heads, cache.head_dim, cache.window) == kind)

    @property
    def size_bytes(self) -> int:
        """Memory that they take by now."""
        return sum(cache.size_bytes for cache in (*self.attentions, self.recurrent) if cache is not None)

    def has_room(self, length: int) -> bool:
        """Say whether there is memory for the first `length` positions already."""
        return all(cache.has_room(length) for cache in self.attentions)

    def reserve(self, length: int) -> None:
        """Take what is missing for the first `length` positions. Errors as in `AttentionCache.reserve`."""
        if self.attention is not None:
            self.attention.reserve(length)
        for cache in self.others:
            cache.reserve(length)

    def shortest(self, length: int) -> int:
        """Return the fewest positions that these `length` can be cut to: all of them where layers are recurrent."""
        return length if self.recurrent is not None else max((cache.shortest for cache in self.attentions), default=0)

    def free_unseen(self, length: int) -> None:
        """Free the memory of positions that no row from `length` on sees, as `AttentionCache.free_unseen`."""
        if self.attention is not None:
            self.attention.free_unseen(length)
        for cache in self.others:
            cache.free_unseen(length)

    @property
    def defers(self) -> bool:
        """Whether recurrent layers are to advance by a row later, as `RecurrentCache.deferred` says."""
        return self.recurrent is not None and self.recurrent.deferred is not None

    def settle(self) -> None:
        """Let the states of recurrent layers be those behind all rows that count, as `RecurrentCache.settle`."""
        if self.recurrent is not None:
            self.recurrent.settle()

    def take_back(self) -> None:
        """Leave out the last row, of which recurrent layers have deferred to advance by it."""
        if self.recurrent is not None:
            self.recurrent.take_back()

    def views(self) -> list[StateView]:
        """Return a view for each of `state_groups`, in that order."""
        views: list[StateView] = []
        for cache in self.attentions:
            views += [AttentionView(cache, slice(None), which) for which in (0, 1)]
        if self.recurrent is not None:
            committed = self.recurrent.conv[:, : self.recurrent.taps - 1]
            views += [WholeView(self.recurrent.state, self.settle), WholeView(committed, self.settle)]
        return views

    def commit_block(self, rows: int) -> None:
        """Let the first `rows` rows of the block in flight count. Attention needs nothing: length decides there."""
        if self.recurrent is not None:
            self.recurrent.commit(rows)


def key_kinds(config: ModelConfig, layers: LayerRange) -> Counter[KeyKind]:
    """Return how many layers have each of the attention caches, in order."""
    return Counter(KeyKind.of(config.attention(layer)) for layer in _owners(config, layers))


def slots_of(config: ModelConfig, layers: LayerRange) -> tuple[int, ...]:
    """Return each layer's place among those that share a cache with it: recurrent ones, or those with keys of its kind.
    One that shares another's keys has that one's place."""
    seen: Counter[KeyKind | None] = Counter()
    slots: dict[int, int] = {}
    attending = frozenset(_owners(config, layers))
    for layer in range(layers.first, layers.last):
        source = config.keys_of(layer)
        if source != layer:
            slots[layer] = slots[source]
            continue
        keys = KeyKind.of(config.attention(layer)) if layer in attending else None
        slots[layer] = seen[keys]
        seen[keys] += 1
    return tuple(slots.values())


def _owners(config: ModelConfig, layers: LayerRange) -> list[int]:
    """Return the layers that attend to keys and values of their own."""
    return [layer for layer in config.attention_shapes if layer in layers and config.keys_of(layer) == layer]


def state_groups(
    config: ModelConfig, layers: LayerRange, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[TensorGroup]:
    """Say what a prefix keeps of these layers: equal tensors of all layers in a group, those of attention first."""
    dtypes = {
        CacheDtype.KEYS_AND_VALUES: kv_dtype or dtype,
        CacheDtype.ACTIVATIONS: dtype,
        CacheDtype.FLOAT32: torch.float32,
    }
    names: dict[CachedTensor, list[str]] = {}
    # A sort keeps the order of equals.
    for layer in sorted(range(layers.first, layers.last), key=lambda layer: config.layer_kinds[layer].mixer):
        for tensor in layer_caches(config, layer):
            names.setdefault(tensor, []).append(f"layers.{layer}.{tensor.name}")
    return [
        TensorGroup(_GROUP_KINDS[tensor.per], tuple(named), tensor.shape, dtypes[tensor.dtype], tensor.window)
        for tensor, named in names.items()
        if tensor.per in _GROUP_KINDS
    ]
