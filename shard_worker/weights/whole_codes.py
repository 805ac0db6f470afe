"""Packed matrices whose elements are whole numbers with a scale and an offset, as CPUs can multiply by."""

from __future__ import annotations

from typing import Protocol

import torch

from services.model.target_tensors import CPU_GROUPS


class WholeCodes(Protocol):
    """A matrix whose elements are `scale * code + offset`, with whole codes from 0 on.

    unsigned_bits: those of a code, 4 or 8; None where codes are not of this kind after all. group: how many
    neighbouring columns of a row have one scale and offset.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def unsigned_bits(self) -> int | None: ...

    @property
    def group(self) -> int: ...

    def part(self, rows: slice) -> CodesOfRows:
        """Return some of the rows."""


class CodesOfRows(Protocol):
    """Some rows of a matrix of `WholeCodes`."""

    def unsigned(self) -> torch.Tensor:
        """Return the codes: those of 8 bits as uint8 [rows, columns], of 4 bits two in a byte, [rows, columns / 2], in
        runs as `codes_kernel.RUN` says. They are not the caller's to change."""

    def unsigned_numbers(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and offsets, float32 [rows, columns / group] both, which are the caller's.

        group: it divides the columns, and the matrix's groups.
        """


def group_of(packed: WholeCodes) -> int:
    """Return the largest group that torch's product takes whose elements have one scale and offset; 0 if none is."""
    return next((group for group in CPU_GROUPS if packed.columns % group == 0 and packed.group % group == 0), 0)
