"""The state that a prefix leaves behind, as groups of equal tensors: names, shapes, copying them out and in.

No family of models is known here: a stage and a draft each list their groups and, for a session, a view of each. Rows
belong to tokens and add up along a chain of snapshots; other state is that behind the last token.
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
    """A view of state that does not grow with the tokens. tensor: [names, …]."""

    tensor: torch.Tensor

    def read(self, first: int, last: int) -> torch.Tensor:
        return self.tensor

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        self.tensor.copy_(tensor, non_blocking=True)


def copy_out(
    groups: Sequence[TensorGroup], views: Sequence[StateView], first_token: int, length: int
) -> tuple[torch.Tensor, ...]:
    """Copy the state of the tokens [first_token, length) into host memory, one tensor for each group.

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
    """Copy the first `length` tokens' state into a session's memory.

    chain: (first_token, length, tensors) of each snapshot, beginning with the one from token 0 on; tensors as of
    `copy_out`. State that is not rows is written only where the last snapshot ends at `length`.
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
    """Return the stored rows of the tokens [first_token, length) in pieces: (first, last, [names, …, rows, dim]).

    index: the group's place among the tensors of each snapshot. chain: as in `copy_in`.
    """
    pieces = []
    first_needed = group.first_row(first_token, length)
    for node_first, node_last, tensors in chain:
        first_stored = group.first_row(node_first, node_last)
        first, last = max(first_stored, first_needed), min(node_last, length)
        if first < last:
            pieces.append((first, last, tensors[index][..., first - first_stored : last - first_stored, :]))
    return pieces
