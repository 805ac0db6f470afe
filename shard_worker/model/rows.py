"""The rows of one step as every layer of a segment sees them: positions, rotary table, masks. Made once a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from services.model.config import AttentionShape, LinearAttentionConfig
from services.model.rope import Rope
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.cache.segment_caches import KeyKind, SegmentCaches
from shard_worker.model.layer_weights import AttentionWeights, ExpertsWeights, LinearAttentionWeights
from shard_worker.ops.activation import geglu, swiglu
from shard_worker.ops.attention import Causal, attend_with_sinks, first_seen, grouped_mask, visibility
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import Rotation, rope_table

RecurrentPrefill = Callable[
    [LinearAttentionConfig, LinearAttentionWeights, torch.Tensor, RecurrentCache, int, float], torch.Tensor
]
"""What a recurrent layer does between its two projections to rows that all count, given its sizes and weights, the rows
of its first projection, the session's cache, the layer's slot in it, and the norm's epsilon.

It advances the state, leaves the convolution's inputs to the caller, and returns [n, value_heads * value_head_dim].
"""


Mixture = Callable[[ExpertsWeights, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""What a mixture makes of rows [n, hidden], [n, hidden], given its weights, whose matrices stand together, the rows,
what the router takes of them, and what the shared expert makes of them, None without one, [n, hidden] all three."""

SessionPages = Callable[[AttentionCache, int, int], torch.Tensor]
"""Returns the numbers by which kernels find the pages of a session's cache, on its device, given the position of the
first of its rows in a step and how many these are. What is missing for them is taken: errors as in
`AttentionCache.reserve`."""

SinkAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""Causal attention with sinks, [n, heads * head_dim], given queries, keys, values, sinks and the window."""

FinishedHeads = Callable[
    [AttentionWeights, torch.Tensor, tuple[torch.Tensor, torch.Tensor], AttentionCache, torch.Tensor, int, float],
    torch.Tensor,
]
"""What becomes of the projections [n, heads, head_dim] of a session's rows on their way into attention, given the
weights, the projections, the rotary table, the session's cache with what `SessionPages` returned for it, the layer's
slot in it, and the norms' epsilon.

Stores keys and values, and returns queries, and behind them gates where attention is gated, [n, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class RowOperations:
    """What is done to many rows between products, by whatever suits the device: chosen when a stage is built.

    Layers call these and know no kernels. The defaults are plain torch, for every device.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    """As `ops.norm.rms_norm`, over rows [n, hidden]."""
    swiglu: Callable[[torch.Tensor], torch.Tensor] = swiglu
    """As `ops.activation.swiglu`."""
    geglu: Callable[[torch.Tensor], torch.Tensor] = geglu
    """As `ops.activation.geglu`."""
    recurrent_prefill: RecurrentPrefill | None = None
    """None where recurrent layers take their rows one operator after the other."""
    mixture: Mixture | None = None
    """None where rows go through experts one expert after the other."""
    session_pages: SessionPages | None = None
    """None where heads are finished one operator after the other."""
    finished_heads: FinishedHeads | None = None
    """There where `session_pages` is."""
    attend_with_sinks: SinkAttention = attend_with_sinks
    """As `ops.attention.attend_with_sinks`, of rows that need not come out as they would alone."""


PLAIN = RowOperations()


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of one session in a step."""

    base: int
    """The position of the first row."""
    count: int
    caches: SegmentCaches
    """The session's memory of the layers."""
    uncommitted: bool
    """Whether it is decided later which rows count, so that recurrent layers must not advance."""
    masks: Mapping[AttentionShape, torch.Tensor | Causal | None] = field(default_factory=dict)
    """By how layers attend, for `attend`; None where every row sees all positions from the first
    one that any sees up to the last row's."""


@dataclass(frozen=True, slots=True)
class AlikeSessions:
    """Sessions of a step that have equally many rows, which count alike: recurrent layers take them together."""

    count: int
    """Rows of each session."""
    uncommitted: bool
    """As in `SessionRows`."""
    caches: Sequence[SegmentCaches]
    """Each session's."""


@dataclass(frozen=True)
class Rows:
    """The n rows of one step."""

    sessions: Sequence[SessionRows]
    """Whose they are: those of one session, and behind them those of the next."""
    ropes: Mapping[Rope, tuple[torch.Tensor, torch.Tensor]]
    """Rotary cos and sin of every row, from `rope_table`, for each way in which positions enter; at least one."""
    operations: RowOperations = PLAIN
    """What suits the device."""
    batch_invariant_rows: int | None = None
    """How many rows every product multiplies, so that a row comes out the same in steps of different numbers of rows;
    None where it need not."""
    pages: Mapping[KeyKind, torch.Tensor] = field(default_factory=dict)
    """What `SessionPages` returns for the only session's caches, where `finished_heads` is to serve; else empty."""

    @property
    def _device(self) -> torch.device:
        return next(iter(self.ropes.values()))[0].device

    def each(self, work: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        """Return an elementwise function of rows [n, …].

        Batch-invariant rows are given one by one: functions made of exp round differently in the lanes of a vector and
        behind the last whole one.
        """
        return work(tensor) if self.batch_invariant_rows is None else row_by_row(work, tensor)

    def by_session(self, work: Callable[[SessionRows, slice], torch.Tensor]) -> torch.Tensor:
        """Return what `work` makes of each session's rows, all rows together [n, …]. It gets the rows' places too."""
        if len(self.sessions) == 1:
            [only] = self.sessions
            return work(only, slice(0, only.count))
        made, first = [], 0
        for session in self.sessions:
            made.append(work(session, slice(first, first + session.count)))
            first += session.count
        return torch.cat(made)

    def by_likeness(
        self, work: Callable[[AlikeSessions, torch.Tensor], torch.Tensor], tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return what `work` makes of the rows of sessions that are alike, all rows together [n, …]. It gets their rows
        of `tensor` [n, …], one session's behind the other's."""
        if len(self.sessions) == 1:
            [only] = self.sessions
            return work(AlikeSessions(only.count, only.uncommitted, [only.caches]), tensor)
        alike, order, places = self._likeness
        if len(alike) == 1:
            return work(alike[0], tensor)
        parts = tensor[order].split_with_sizes([len(one.caches) * one.count for one in alike])
        return torch.cat([work(one, part) for one, part in zip(alike, parts, strict=True)])[places]

    @cached_property
    def _likeness(self) -> tuple[list[AlikeSessions], torch.Tensor, torch.Tensor]:
        """The sessions that are alike, the rows of one kind of sessions behind those of another, and each row's place
        in that order."""
        kinds: dict[tuple[int, bool], tuple[list[SegmentCaches], list[int]]] = {}
        first = 0
        for session in self.sessions:
            caches, rows = kinds.setdefault((session.count, session.uncommitted), ([], []))
            caches.append(session.caches)
            rows += range(first, first + session.count)
            first += session.count
        order = torch.tensor([row for _, rows in kinds.values() for row in rows], device=self._device)
        return [AlikeSessions(*kind, caches) for kind, (caches, _) in kinds.items()], order, order.argsort()


def row_by_row(work: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return an elementwise function of rows [n, …] that are given to it one by one."""
    return work(tensor) if len(tensor) == 1 else torch.cat([work(row) for row in tensor.chunk(len(tensor))])


def make_rows(
    shapes: Collection[AttentionShape],
    rotations: Mapping[Rope, Rotation],
    like: torch.Tensor,
    sessions: Sequence[SessionRows],
    *,
    operations: RowOperations = PLAIN,
    batch_invariant_rows: int | None = None,
) -> Rows:
    """Return the rows of these sessions for layers that attend in these ways, in the dtype and on the device of `like`.

    rotations: at least those of the shapes, and one where there are none. sessions: without masks. The other arguments
    are fields of `Rows`.
    """
    device = like.device
    positions = [torch.arange(one.base, one.base + one.count, device=device) for one in sessions]
    ropes = {
        rope: rope_of_rows(positions, rotation, like.dtype, batch_invariant_rows)
        for rope, rotation in rotations.items()
    }
    if batch_invariant_rows is not None:
        return Rows(sessions, ropes, operations, batch_invariant_rows)
    rows = [
        replace(one, masks={shape: _mask(shape, like, own) for shape in shapes})
        for one, own in zip(sessions, positions, strict=True)
    ]
    pages: dict[KeyKind, torch.Tensor] = {}
    if operations.session_pages is not None and len(rows) == 1:
        [only] = rows
        for cache in only.caches.attentions:
            kind = KeyKind(cache.kv_heads, cache.head_dim, cache.window)
            pages[kind] = operations.session_pages(cache, only.base, only.count)
    return Rows(rows, ropes, operations, pages=pages)


def rope_of_rows(
    positions: Sequence[torch.Tensor], rotation: Rotation, dtype: torch.dtype, batch_invariant_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rope_table` for the rows of several sessions, at `positions` [n] of each.

    batch_invariant_rows: as in `Rows`; rows are then turned by the same numbers whatever rows stand beside them.
    """
    together = positions[0] if len(positions) == 1 else torch.cat(list(positions))
    if batch_invariant_rows is None:
        return rope_table(together, rotation, dtype)
    tables = [rope_table(position, rotation, dtype) for position in together.chunk(len(together))]
    cos, sin = (torch.cat(tensors) for tensors in zip(*tables, strict=True))
    return cos, sin


def _mask(shape: AttentionShape, like: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | Causal | None:
    """Return what a session's rows at these positions see in layers that attend so, for `attend`."""
    if len(positions) == 1:
        return None
    window = shape.window
    first, end = first_seen(int(positions[0]), window), int(positions[-1]) + 1
    if window is not None and end <= window:
        window = None
    if window is None and like.is_cuda and like.dtype.itemsize == 2:
        return Causal()
    seen = visibility(positions, torch.arange(first, end, device=like.device), causal=True, window=window)
    return grouped_mask(seen, shape.heads // shape.kv_heads, like.dtype)
