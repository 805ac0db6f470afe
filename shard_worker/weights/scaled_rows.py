"""An embedding whose rows are multiplied by a number when they are looked up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.weights.weight import RowLookup


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of a matrix times a factor. rows: where they are looked up. factor: of one element, of the dtype that they
    come in."""

    rows: RowLookup
    factor: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def lookup(self, indices: torch.Tensor) -> torch.Tensor:
        return self.rows.lookup(indices).to(self.factor.dtype) * self.factor


def scaled_rows(rows: RowLookup, scale: float, dtype: torch.dtype) -> RowLookup:
    """Return the rows times a scale that is rounded to `dtype` first; themselves where it is 1."""
    return rows if scale == 1.0 else ScaledRows(rows, torch.tensor(scale, dtype=dtype, device=rows.device))
