"""What a prefix leaves behind, as groups of equal tensors: their names and shapes, and copying them out and in.

Family-neutral: a stage and a draft each list their groups and, for a session, a view of each. Rows belong to tokens and
build up along a chain of snapshots; other state is that behind the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from services.messages.snapshots import SnapshotTensor
from shard_worker.device.dtypes import dtype_to_name


class GroupKind(StrEnum):
    """ROWS: one a token. STATE: behind the last token only. LOGITS: likewise, but a shorter prefix does without."""

    ROWS = "rows"
    STATE = "state"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are kept stacked, one for each name.

    extents: of one tensor; for ROWS without the rows, which come before the last extent. window: only the last so many
    tokens are ever looked at.
    """

    kind: GroupKind
    names: tuple[str, ...]
    extents: tuple[int, ...]
    dtype: torch.dtype
    window: int | None = None

    def first_row(self, first_token: int, length: int) -> int:
        """The first token of [first_token, length) whose row is kept."""
        return first_token if self.window is None else max(first_token, length - self.window)

    def shape(self, first_token: int, length: int) -> tuple[int, ...]:
        """Of one tensor for the tokens [first_token, length)."""
        if self.kind is not GroupKind.ROWS:
            return self.extents
        return (*self.extents[:-1], length - self.first_row(first_token, length), self.extents[-1])

    def size_bytes(self, first_token: int, length: int) -> int:
        """Of all tensors together."""
        return len(self.names) * self.dtype.itemsize * torch.Size(self.shape(first_token, length)).numel()

    def empty(self, first_token: int, length: int, *, pinned: bool) -> torch.Tensor:
        """Host memory for the tokens [first_token, length): [names, *shape]."""
        return torch.empty(
            (len(self.names), *self.shape(first_token, length)), dtype=self.dtype, pin_memory=pinned, device="cpu"
        )


def tensors_of(groups: Sequence[TensorGroup], first_token: int, length: int) -> tuple[SnapshotTensor, ...]:
    """The groups' tensors as a header announces them."""
    return tuple(
        SnapshotTensor(name, dtype_to_name(group.dtype), group.shape(first_token, length))
        for group in groups
        for name in group.names
    )


def trimmable(groups: Sequence[TensorGroup]) -> bool:
    """Whether a snapshot also serves every shorter prefix: rows alone, and all of them."""
    return not any(group.kind is GroupKind.STATE or group.window is not None for group in groups)


class StateView(Protocol):
    """A group's tensors in a session's own memory, stacked: [names, …]."""

    def read(self, first: int, last: int) -> torch.Tensor:
        """The rows of tokens [first, last), or the state."""

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        """Put back what `read` gave."""


@dataclass(frozen=True, slots=True)
class WholeView:
    """State that does not grow: [names, …]."""

    tensor: torch.Tensor

    def read(self, first: int, last: int) -> torch.Tensor:
        return self.tensor

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        self.tensor.copy_(tensor, non_blocking=True)


def copy_out(
    groups: Sequence[TensorGroup], views: Sequence[StateView], first_token: int, length: int
) -> tuple[torch.Tensor, ...]:
    """A copy in host memory, one tensor a group.

    From a GPU the copies are queued, in order with its steps; synchronise the device before reading them elsewhere.
    """
    copies = []
    for group, view in zip(groups, views, strict=True):
        live = view.read(group.first_row(first_token, length), length)
        host = group.empty(first_token, length, pinned=live.is_cuda)
        # Made contiguous where it is: crossing the bus in pieces would be slow.
        host.copy_(live.contiguous() if live.is_cuda else live, non_blocking=True)
        copies.append(host)
    return tuple(copies)


def copy_in(
    groups: Sequence[TensorGroup],
    views: Sequence[StateView],
    chain: Sequence[tuple[int, int, tuple[torch.Tensor, ...]]],
    length: int,
) -> None:
    """Put the first `length` tokens' state into a session's memory.

    chain: (first_token, length, tensors) of each snapshot, from the one that begins at 0 on.
    """
    whole = chain[-1][1] == length
    for index, (group, view) in enumerate(zip(groups, views, strict=True)):
        if group.kind is not GroupKind.ROWS:
            if whole:
                view.write(chain[-1][2][index], 0, length)
            continue
        for first, last, rows in rows_of(group, index, chain, 0, length):
            view.write(rows, first, last)


def rows_of(
    group: TensorGroup,
    index: int,
    chain: Sequence[tuple[int, int, tuple[torch.Tensor, ...]]],
    first_token: int,
    length: int,
) -> list[tuple[int, int, torch.Tensor]]:
    """The kept rows for tokens [first_token, length) in pieces (first, last, [names, …, rows, dim])."""
    pieces = []
    wanted = group.first_row(first_token, length)
    for node_first, node_last, tensors in chain:
        kept = group.first_row(node_first, node_last)
        first, last = max(kept, wanted), min(node_last, length)
        if first < last:
            pieces.append((first, last, tensors[index][..., first - kept : last - kept, :]))
    return pieces
