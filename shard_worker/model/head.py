"""Final norm and lm_head of the last stage; the draft beside it shares the projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.ops.linear import linear
from shard_worker.ops.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Head:
    """norm: float32 [hidden]; weight: [vocab, hidden], as `packed`."""

    norm: torch.Tensor
    weight: torch.Tensor
    eps: float

    def logits(self, hidden: torch.Tensor, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Residual stream [n, hidden] -> logits [n, vocab] in the weights' dtype. exact_rows: as of `Rows`."""
        return self.project(rms_norm(hidden, self.norm, self.eps), batch_invariant_rows)

    def project(self, normed: torch.Tensor, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """lm_head alone, for rows that a draft has normed itself."""
        return linear(normed.to(self.weight.device, self.weight.dtype), self.weight, None, batch_invariant_rows)
