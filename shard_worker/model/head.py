"""The final norm and lm_head of the last stage; a draft beside it shares lm_head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.model.synthetic_acceptance import SyntheticAcceptance
from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class Head:
    """What makes logits of the residual stream.

    norm: float32 [hidden]. weight: [vocab, hidden], prepared. synthetic: says which draft tokens are chosen whatever
    the logits are; None but for measuring. cap: as of `ModelConfig.logit_cap`.
    """

    norm: torch.Tensor
    weight: Weight
    eps: float
    synthetic: SyntheticAcceptance | None = None
    cap: float | None = None

    def logits(self, hidden: torch.Tensor, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Return the logits [n, vocab] of the residual stream [n, hidden], in the weights' dtype.

        batch_invariant_rows: as in `Rows`.
        """
        products = self.project(rms_norm(hidden, self.norm, self.eps), batch_invariant_rows)
        if batch_invariant_rows is not None:
            # Row by row, as `Rows.each`.
            for row in products:
                self.capped(row)
            return products
        return self.capped(products)

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        """Return products with lm_head as logits, in the same memory."""
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def project(self, normed: torch.Tensor, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Return the logits of rows that a draft has normed itself, uncapped: lm_head alone."""
        return self.weight.matmul(normed.to(self.weight.device, self.weight.dtype), None, batch_invariant_rows)
