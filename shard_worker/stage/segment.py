"""A contiguous run of layers on one device: the unit that runs without a copy between devices."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from services.layers import LayerRange
from services.model.cached_tensors import PAGE_ROWS, Per, held_positions
from services.model.config import AttentionShape, ModelConfig
from services.model.layers import layer_caches
from services.model.rope import Rope
from shard_worker.cache.page_pool import PagePool
from shard_worker.cache.prefix_state import TensorGroup
from shard_worker.cache.segment_caches import KeyKind, SegmentCaches, key_kinds, slots_of, state_groups
from shard_worker.cpu_kernels import native
from shard_worker.device.devices import Device
from shard_worker.device.dtypes import dtype_to_name
from shard_worker.model.features import Capture, Features
from shard_worker.model.layer_program import LayerProgram
from shard_worker.model.layer_weights import DecoderWeights
from shard_worker.model.layers import decoder
from shard_worker.model.per_layer import PerLayerInputs
from shard_worker.model.rows import PLAIN, RowOperations, SessionRows, make_rows
from shard_worker.ops.rope import Rotation

PROMPT_ROWS = 2048
"""The most rows of a prompt's step, before which layers with a window keep what they give back behind it."""

_MOST_PAGES = 1 << 40
"""More than any session may have."""


@dataclass(frozen=True)
class Segment:
    """The target's layers [first, last) on one device. What follows from the configuration is found out once."""

    config: ModelConfig
    layers: LayerRange
    device: Device
    weights: tuple[DecoderWeights, ...]
    """One for each layer, in order."""
    rotations: Mapping[Rope, Rotation]
    """Each of the model's ways in which positions enter, on the device."""
    capture: Capture | None
    """What a draft wants of these layers; None where it wants nothing."""
    dtype: torch.dtype
    """The element type of matrices and activations."""
    operations: RowOperations = PLAIN
    """What is done to many rows between products."""
    kv_dtype: torch.dtype | None = None
    """What attention keys and values are kept in; None for `dtype`."""
    per_layer: PerLayerInputs | None = None
    """What makes these layers' inputs of the rows' tokens; None without per-layer embeddings."""
    pool: PagePool = field(default_factory=PagePool)
    """Where the pages of keys and values come from."""

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """Each layer's place in the cache that it uses."""
        return slots_of(self.config, self.layers)

    @functools.cached_property
    def program(self) -> LayerProgram | None:
        """What runs a few rows through all layers by one call; None where there is no such thing."""
        is_wide = self.kv_dtype in (None, self.dtype) and self.dtype is torch.bfloat16
        if self.device.is_gpu or not is_wide or not native.is_available():
            return None
        indices = () if self.capture is None else self.capture.indices
        captured = {index - self.layers.first for index in indices if index in self.layers}
        return LayerProgram.of(self.config, self.weights, self.slots, captured)

    @functools.cached_property
    def attention_shapes(self) -> frozenset[AttentionShape]:
        """All ways in which layers attend here."""
        return frozenset(shape for layer, shape in self.config.attention_shapes.items() if layer in self.layers)

    @functools.cached_property
    def key_kinds(self) -> Mapping[KeyKind, int]:
        """How many layers have each of the attention caches that a session has here, in order."""
        return key_kinds(self.config, self.layers)

    @property
    def session_tokens(self) -> int | None:
        """The most tokens of one session for which the pool has room; None where there is no bound."""
        dtype = dtype_to_name(self.dtype)
        kv_dtype = dtype if self.kv_dtype is None else dtype_to_name(self.kv_dtype)
        token_bytes: Counter[int | None] = Counter()
        for layer in range(self.layers.first, self.layers.last):
            for one in layer_caches(self.config, layer):
                if one.per is Per.TOKEN:
                    token_bytes[one.window] += one.size_bytes(dtype, kv_dtype)
        page_rows = PAGE_ROWS if self.device.is_gpu else 1

        def size_bytes(pages: int) -> int:
            held = {window: held_positions(pages * page_rows, window, PROMPT_ROWS) for window in token_bytes}
            return sum(size * -(-held[window] // page_rows) * page_rows for window, size in token_bytes.items())

        if self.pool.size_bytes is None or size_bytes(_MOST_PAGES) <= self.pool.size_bytes:
            return None
        return (bisect.bisect_right(range(_MOST_PAGES), self.pool.size_bytes, key=size_bytes) - 1) * page_rows

    def allocate(self, capacity: int, block_rows: int, *, row_by_row: bool = False) -> SegmentCaches:
        """Return the caches of one session.

        capacity: its most positions. block_rows: rows of its largest verify. row_by_row: whether those are computed one
        by one.
        """
        like = torch.empty(0, dtype=self.dtype, device=self.device.torch_device)
        page_rows = PAGE_ROWS if self.device.is_gpu else None
        return SegmentCaches.allocate(
            self.config,
            self.layers,
            self.key_kinds,
            capacity,
            block_rows,
            like,
            page_rows,
            row_by_row=row_by_row,
            kv_dtype=self.kv_dtype,
            pool=self.pool,
        )

    def state_groups(self) -> list[TensorGroup]:
        """Say what a prefix keeps of these layers, in the order of the caches' views."""
        return state_groups(self.config, self.layers, self.dtype, self.kv_dtype)

    def run(
        self,
        hidden: torch.Tensor,
        sessions: Sequence[SessionRows],
        features: Features | None,
        *,
        batch_invariant_rows: int | None = None,
        token_ids: Sequence[int] = (),
    ) -> torch.Tensor:
        """Run the layers on rows [n, hidden] of any device, and return [n, hidden] on this segment's device.

        sessions: whose rows they are, one session's behind the other's. features: what captured rows are added to,
        None where no draft wants any. batch_invariant_rows: as in `Rows`. token_ids: of each row, for layers that have
        embeddings of their own.
        """
        hidden = hidden.to(self.device.torch_device)
        for session in sessions:
            session.caches.settle()
        # Attention with sinks needs no masks in memory.
        masked = frozenset[AttentionShape]() if self.config.attention_sinks else self.attention_shapes
        rows = make_rows(
            masked,
            self.rotations,
            hidden,
            sessions,
            operations=self.operations,
            batch_invariant_rows=batch_invariant_rows,
        )
        capture = self.capture if features is not None else None
        captured: list[torch.Tensor] = []
        if self.program is not None and self.program.takes(rows):
            hidden, captured = self.program.run(hidden, rows)
        else:
            own = None if self.per_layer is None else self.per_layer.of(token_ids, batch_invariant_rows)
            for offset, (weights, slot) in enumerate(zip(self.weights, self.slots, strict=True)):
                of_layer = None if own is None else own[:, offset]
                hidden = decoder.run(self.config, weights, slot, hidden, rows, of_layer)
                if capture is not None and self.layers.first + offset in capture.indices:
                    captured.append(hidden)
        if capture is not None and features is not None:
            capture.collect(captured, features, batch_invariant_rows)
        return hidden
