"""A session's state of the recurrent layers (Gated DeltaNet) on one device, and what a verify leaves for its commit.

Layers are stacked, so that committing a block is a few operators for all of them together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from services.model.config import LinearAttentionConfig
from shard_worker.ops import deltanet


class RecurrentCache:
    """State, convolution inputs and, between a verify and its commit, the block's own rows of all linear layers.

    taps: how many inputs the convolution spans.
    state: float32 [layers, value_heads, key_dim, value_dim].
    conv: [layers, taps - 1 + block, channels]; the first taps - 1 rows are the last committed inputs, the others belong
    to the block in flight.
    keys, corrected, decays: float32 [layers, value_heads, block, …], what advancing by some of the block's rows needs.
    Decays are the running sums of log decays where the block was computed as one, and each row's own factor where its
    rows were computed one by one, or by kernels.
    addresses: of these five tensors, and behind them how many rows of a block there is room for.
    deferred: where among these records the last row is that counts, if the state has not advanced by it: one of a step
    that was launched behind another one may be taken back. None where the state is up to date.
    """

    def __init__(
        self,
        layers: int,
        shape: LinearAttentionConfig,
        block_rows: int,
        like: torch.Tensor,
        *,
        row_by_row: bool = False,
    ) -> None:
        """Allocate it, with states of zeros.

        block_rows: rows of the largest verify. like: a tensor on the device, of the type that is computed in.
        row_by_row: whether a block's rows are computed one by one.
        """
        self._row_by_row = row_by_row
        heads = shape.value_heads

        def zeros(*extents: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((layers, *extents), dtype=dtype, device=like.device)

        self.taps = shape.conv_taps
        # Kernels keep the last inputs of rows that count at once where a block's would be, and, two by turns, rows that
        # the state advances by later.
        block_rows = max(block_rows, self.taps - 1, 2)
        self.state = zeros(heads, shape.key_head_dim, shape.value_head_dim)
        self.conv = zeros(self.taps - 1 + block_rows, shape.conv_channels, dtype=like.dtype)
        self.keys = zeros(heads, block_rows, shape.key_head_dim)
        self.corrected = zeros(heads, block_rows, shape.value_head_dim)
        self.decays = zeros(heads, block_rows)
        self.addresses = (*(tensor.data_ptr() for tensor in self._tensors), block_rows)
        self.deferred: int | None = None
        self._advance: Callable[[torch.Tensor], None] | None = None

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.state, self.conv, self.keys, self.corrected, self.decays

    @functools.cached_property
    def step_parameters(self) -> torch.Tensor:
        """The addresses on the device as kernels take them, int64 [1, n]: a step of no rows."""
        return self._parameters_from(0)

    def _parameters_from(self, first: int) -> torch.Tensor:
        """Return them with the record of the row `first` as that of a block's first row."""
        state, conv, *records, room = self.addresses
        apart = (self.keys.shape[-1], self.corrected.shape[-1], 1)
        moved = [at + first * width * self.keys.itemsize for at, width in zip(records, apart, strict=True)]
        return torch.tensor([[0, 0, 0, state, conv, *moved, room]], device=self.state.device)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def begin_row(self, advance: Callable[[torch.Tensor], None] | None = None) -> int | None:
        """Note that a single row is computed next; return where the one before is recorded by which the state advances
        in that step first, if it was deferred.

        advance: makes the state advance by the first row that parameters like `step_parameters` record; None where
        the state advances by the new row at once, which is deferred otherwise.
        """
        before, self._advance, self.deferred = self.deferred, advance, None
        if advance is not None:
            # Beside the record before it, which is still being read.
            self.deferred = 1 if before == 0 else 0
        return before

    def take_back(self) -> None:
        """Leave out the row that was deferred, where one was."""
        self.deferred = None

    def settle(self) -> None:
        """Advance the state by the row that was deferred, if one was: to be called before anything reads it but a step
        of several sessions that is told of that row."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            assert self._advance is not None
            self._advance(self._parameters_from(deferred))

    def advance_inputs(self, slot: int, rows: torch.Tensor) -> None:
        """Let new rows [n, channels] count: the last ones are what the next convolution begins with."""
        before = self.taps - 1
        if len(rows) < before:
            rows = torch.cat((self.conv[slot, :before], rows))
        self.conv[slot, :before] = rows[-before:]

    def record(self, slot: int, keys: torch.Tensor, corrected: torch.Tensor, decays: torch.Tensor) -> None:
        """Keep what committing a part of the block in flight needs, of one layer: float32 [value_heads, n, …]."""
        rows = keys.shape[1]
        self.keys[slot, :, :rows] = keys
        self.corrected[slot, :, :rows] = corrected
        self.decays[slot, :, :rows] = decays

    def commit(self, rows: int) -> None:
        """Advance all layers by the first `rows` rows of the block in flight."""
        before = self.taps - 1
        commit = deltanet.commit_by_steps if self._row_by_row else deltanet.commit
        commit(
            self.state.flatten(0, 1),
            self.keys[:, :, :rows].flatten(0, 1),
            self.corrected[:, :, :rows].flatten(0, 1),
            self.decays[:, :, :rows].flatten(0, 1),
        )
        self.conv[:, :before] = self.conv[:, rows : rows + before].clone()


# --- of several sessions at once


def window(caches: Sequence[RecurrentCache], slot: int, rows: torch.Tensor, uncommitted: bool) -> torch.Tensor:
    """Return the convolution's inputs for new rows [sessions, n, channels]: the committed ones before them, and the
    rows."""
    before = caches[0].taps - 1
    convs = [cache.conv[slot] for cache in caches]
    committed = [conv[:before] for conv in convs]
    window = torch.cat((committed[0][None] if len(caches) == 1 else torch.stack(committed), rows), 1)
    kept = rows if uncommitted else window[:, -before:]
    first = before if uncommitted else 0
    for conv, own in zip(convs, kept, strict=True):
        conv[first : first + len(own)] = own
    return window


def states(caches: Sequence[RecurrentCache], slot: int) -> torch.Tensor:
    """Return a layer's states, float32 [sessions * value_heads, key_dim, value_dim]: one session's own, or a copy of
    those of several."""
    if len(caches) == 1:
        return caches[0].state[slot]
    return torch.cat([cache.state[slot] for cache in caches])


def put_states(caches: Sequence[RecurrentCache], slot: int, states: torch.Tensor) -> None:
    """Let the states that `states` gave, and that have changed since, be the sessions'."""
    if len(caches) > 1:
        torch._foreach_copy_([cache.state[slot] for cache in caches], states.chunk(len(caches)))
