"""Formats in which Hugging Face files store packed matrices, one file each, named by `PackedMatrix.format`.

A module has one function, `load`, which brings the stored tensors of one matrix to the form in which it is multiplied
by, once. Which tensors those are is found by `services.model.packings`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from services.errors import DataLoss
from services.model.tensor_headers import PackedMatrix
from shard_worker.weights.integers import split_pairs
from shard_worker.weights.packed import PackedWeight, are_finite
from shard_worker.weights.unread import StoredRows, UnreadWeight
from shard_worker.weights.weight import ReorderedWeight, Weight

Rows = slice | torch.Tensor
"""Some rows of a matrix: a run of them, or those at the indices int64 [n]."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The stored tensors of one matrix, for the device that it is loaded to.

    packed: how it is stored. shape: its rows and columns. read: returns a stored tensor over the mapped file. file_of:
    returns the file that holds one. Both take the tensor's name.
    """

    packed: PackedMatrix
    shape: tuple[int, int]
    device: torch.device
    read: Callable[[str], torch.Tensor]
    file_of: Callable[[str], Path]

    def has(self, role: str) -> bool:
        """Return whether the matrix has such a part."""
        return role in self.packed.parts

    def tensor(self, role: str) -> torch.Tensor:
        """Return a copy of a part on the device, with its stored dtype."""
        return self.read(self.packed.parts[role]).to(self.device, copy=True)

    def scales(self, role: str) -> torch.Tensor:
        """Return a part of floating point numbers as `tensor` does. Raises DataLoss for NaN and infinity in it."""
        scales = self.tensor(role)
        if scales.dtype is torch.float8_e8m0fnu:
            scales = scales.bfloat16()
        if not are_finite(scales):
            raise self.damaged(role, "holds NaN or infinity; scales must be finite numbers")
        return scales

    def unread(
        self, role: str, make: Callable[[torch.Tensor, Rows], PackedWeight], kind: Hashable, dtype: torch.dtype
    ) -> UnreadWeight:
        """Return the matrix as one whose codes are read some rows at a time.

        role: of the codes, one row of which is one of the matrix. make: makes some rows of the matrix of their codes,
        which are its own, on the device; it is told which rows they are. kind: as of `UnreadWeight`. dtype: of the
        activations that it takes and gives.
        """
        rows, columns = self.shape
        stored = self.read(self.packed.parts[role])
        source = StoredRows(rows, lambda some: make(stored[some].to(self.device, copy=True), some))
        return UnreadWeight([source], columns, kind, dtype=dtype, device=self.device)

    def damaged(self, role: str, what: str) -> DataLoss:
        """Return the error for contents that a part cannot have. what: what it holds, and what it must hold."""
        name = self.packed.parts[role]
        return DataLoss(f"tensor {name} in {self.file_of(name)} {what}", reason="TENSOR_CONTENTS", field=name)


class WeightFormat(Protocol):
    """What a module of this package offers."""

    def load(self, parts: StoredParts, dtype: torch.dtype) -> Weight:
        """Return the matrix for the parts' device, in memory or to be read. dtype: of the activations that it takes and
        gives.

        Raises DataLoss for contents that the format cannot have.
        """


def checked_zeros(parts: StoredParts, role: str, zeros: torch.Tensor) -> torch.Tensor | None:
    """Return the zero points of groups, [rows, groups], or None where the configuration says that all are the middle.

    Raises DataLoss where they are not.
    """
    if not parts.packed.symmetric:
        return zeros
    middle = 1 << parts.packed.bits - 1
    other = zeros[zeros != middle]
    if len(other):
        raise parts.damaged(
            role,
            f"makes {other[0].item()} the code of 0, but config.json says that the matrix is symmetric: it must be "
            f"{middle} in all groups",
        )
    return None


def in_group_order(parts: StoredParts, codes: torch.Tensor, make: Callable[[torch.Tensor], Weight]) -> Weight:
    """Return the matrix of codes whose groups may be of columns that are no neighbours.

    codes: as `integer_weight` takes them. make: makes it of codes whose groups are neighbours. Where the part
    `group_of_column` says otherwise, the columns are brought to that order once, and with each product the activations
    are.

    Raises DataLoss for groups that do not exist, or that have more columns than others.
    """
    if not parts.has("group_of_column"):
        return make(codes)
    role, group, (_, columns) = "group_of_column", parts.packed.group, parts.shape
    group_of = parts.tensor(role).long()
    usual = torch.arange(columns, device=parts.device) // group
    if torch.equal(group_of, usual):
        return make(codes)
    groups = int(usual[-1]) + 1
    outside = group_of[(group_of < 0) | (group_of >= groups)]
    if len(outside):
        raise parts.damaged(role, f"names group {outside[0].item()}; groups are 0 to {groups - 1}")
    in_order, order = group_of.sort(stable=True)
    if not torch.equal(in_order, usual):
        raise parts.damaged(role, f"has groups of unlike sizes; each must have {group} columns")
    if parts.packed.bits == 8:
        return ReorderedWeight(make(codes[:, order]), order.int())
    in_place = split_pairs(codes)[:, order]
    return ReorderedWeight(make(in_place[:, ::2] | in_place[:, 1::2] << 4), order.int())


def weight_format(name: str) -> WeightFormat:
    """Return the module of this name."""
    return cast(WeightFormat, importlib.import_module(f"{__name__}.{name}"))
