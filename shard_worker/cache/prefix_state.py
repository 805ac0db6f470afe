"""The state that a prefix leaves behind, as groups of equal tensors: names, shapes, keeping them and taking them up.

What lies in pages of a device is shared with the session, all else is copied to host memory.
No family of models is known here: a stage and a draft each list their groups and, for a session, a view of each. Rows
belong to tokens and add up along a chain of snapshots; other state is that behind the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from services.messages.snapshots import SnapshotTensor
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.kept_pages import KeptPages, KeptRows
from shard_worker.device.dtypes import dtype_to_name


class GroupKind(StrEnum):
    """What tensors of a group belong to.

    ROWS: each token has a row of its own. STATE: the last token alone. LOGITS: the last token alone too, but a shorter
    prefix does without them.
    """

    ROWS = "rows"
    STATE = "state"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Equal tensors of a snapshot, which are stored as one: [names, *shape].

    names: those of the tensors. extents: the shape of one of them; for ROWS without the rows, which come before the
    last extent. window: how many of the last tokens are ever looked at; None for all.
    """

    kind: GroupKind
    names: tuple[str, ...]
    extents: tuple[int, ...]
    dtype: torch.dtype
    window: int | None = None

    def first_row(self, first_token: int, length: int) -> int:
        """Return the first token of [first_token, length) whose row is stored."""
        return first_token if self.window is None else max(first_token, length - self.window)

    def shape(self, first_token: int, length: int) -> tuple[int, ...]:
        """Return the shape of one tensor for the tokens [first_token, length)."""
        if self.kind is not GroupKind.ROWS:
            return self.extents
        return (*self.extents[:-1], length - self.first_row(first_token, length), self.extents[-1])

    def size_bytes(self, first_token: int, length: int) -> int:
        """Return the size of all tensors together for the tokens [first_token, length)."""
        return len(self.names) * self.dtype.itemsize * torch.Size(self.shape(first_token, length)).numel()

    def empty(self, first_token: int, length: int, *, pinned: bool) -> torch.Tensor:
        """Return host memory for the tokens [first_token, length): [names, *shape]. pinned: page-locked, for GPUs."""
        return torch.empty(
            (len(self.names), *self.shape(first_token, length)), dtype=self.dtype, pin_memory=pinned, device="cpu"
        )


def tensors_of(groups: Sequence[TensorGroup], first_token: int, length: int) -> tuple[SnapshotTensor, ...]:
    """Return the groups' tensors for the tokens [first_token, length) as a header announces them."""
    return tuple(
        SnapshotTensor(name, dtype_to_name(group.dtype), group.shape(first_token, length))
        for group in groups
        for name in group.names
    )


def trimmable(groups: Sequence[TensorGroup]) -> bool:
    """Whether a snapshot can be trimmed to every shorter prefix: it has rows alone, and all of them."""
    return not any(group.kind is GroupKind.STATE or group.window is not None for group in groups)


class StateView(Protocol):
    """A group's tensors in a session's own memory, as one: [names, …]."""

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return the rows of the tokens [first, last), or the state."""

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        """Put back what `read` returned."""


@dataclass(frozen=True, slots=True)
class WholeView:
    """A view of state that does not grow with the tokens. tensor: [names, …]. settle: called before that is read or
    written, where it may be behind the tokens."""

    tensor: torch.Tensor
    settle: Callable[[], None] = lambda: None

    def read(self, first: int, last: int) -> torch.Tensor:
        self.settle()
        return self.tensor

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        self.settle()
        self.tensor.copy_(tensor, non_blocking=True)


Kept = torch.Tensor | KeptRows
"""What a snapshot has of one group: a copy in host memory, [names, …], or rows in pages that sessions share."""

Part = tuple[int, int, tuple[Kept, ...]]
"""What a snapshot has of the tokens [first, last), one item for each group."""


def copy_out(
    groups: Sequence[TensorGroup], views: Sequence[StateView], first_token: int, length: int
) -> tuple[Kept, ...]:
    """Keep the state of the tokens [first_token, length): share the pages that can be shared, and copy all else.

    From a GPU the copies are queued, in order with its steps; synchronise the device before reading them elsewhere.
    """
    kept: list[Kept] = []
    pages: dict[AttentionCache, KeptPages] = {}
    for group, view in zip(groups, views, strict=True):
        if (cache := _shared(view)) is not None:
            if cache not in pages:
                pages[cache] = cache.keep(group.first_row(first_token, length), length)
            assert isinstance(view, AttentionView)
            kept.append(KeptRows(pages[cache], view.layers, view.which))
            continue
        live = view.read(group.first_row(first_token, length), length)
        host = group.empty(first_token, length, pinned=live.is_cuda)
        # Made contiguous where it is: crossing the bus in pieces would be slow.
        host.copy_(live.contiguous() if live.is_cuda else live, non_blocking=True)
        kept.append(host)
    return tuple(kept)


def copy_in(groups: Sequence[TensorGroup], views: Sequence[StateView], chain: Sequence[Part], length: int) -> None:
    """Begin a session's memory with the first `length` tokens' state: share pages where they are kept, copy all else.

    chain: (first_token, length, items) of each snapshot, beginning with the one from token 0 on; items as of
    `copy_out`. State that is not rows is written only where the last snapshot ends at `length`. Raises
    ResourceExhausted where the device has no pages left for what is copied.
    """
    whole = chain[-1][1] == length
    there: dict[AttentionCache, list[tuple[int, int]]] = {}
    for index, (group, view) in enumerate(zip(groups, views, strict=True)):
        if group.kind is not GroupKind.ROWS:
            if whole:
                state = chain[-1][2][index]
                assert isinstance(state, torch.Tensor)
                view.write(state, 0, length)
            continue
        pieces, shared = rows_of(group, index, chain, 0, length), list[tuple[int, int]]()
        if isinstance(view, AttentionView):
            view.cache.begin_at(group.first_row(0, length))
        if (cache := _shared(view)) is not None:
            if cache not in there:
                there[cache] = cache.take_up([rows.kept for _, _, rows in pieces if isinstance(rows, KeptRows)], length)
            shared = there[cache]
        for first, last, rows in pieces:
            for begin, end in _outside(first, last, shared):
                missing = (
                    rows.read(begin, end) if isinstance(rows, KeptRows) else rows[..., begin - first : end - first, :]
                )
                view.write(missing, begin, end)


def rows_of(
    group: TensorGroup, index: int, chain: Sequence[Part], first_token: int, length: int
) -> list[tuple[int, int, Kept]]:
    """Return the kept rows of the tokens [first_token, length) in pieces: (first, last, rows).

    The rows are a tensor [names, …, last - first, dim], or all those of a snapshot where they are in pages. index: the
    group's place among the items of each snapshot. chain: as in `copy_in`.
    """
    pieces: list[tuple[int, int, Kept]] = []
    first_needed = group.first_row(first_token, length)
    for node_first, node_last, items in chain:
        first_stored = group.first_row(node_first, node_last)
        first, last = max(first_stored, first_needed), min(node_last, length)
        if first < last:
            rows = items[index]
            if isinstance(rows, torch.Tensor):
                rows = rows[..., first - first_stored : last - first_stored, :]
            pieces.append((first, last, rows))
    return pieces


def _shared(view: StateView) -> AttentionCache | None:
    """Return the cache whose pages a view's rows are in, where they can be shared."""
    return view.cache if isinstance(view, AttentionView) and view.cache.shares else None


def _outside(first: int, last: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return what of [first, last) is in none of the ranges, which are in order."""
    for begin, end in ranges:
        if first < begin:
            yield first, min(begin, last)
        first = max(first, end)
        if first >= last:
            return
    yield first, last
