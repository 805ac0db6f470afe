"""What turns the normed hidden rows of a draft into draft tokens: the target's lm_head, or a smaller one of the draft's
own, whose rows stand for some of the target's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A matrix [tokens, hidden].

    token_ids: int64 [tokens], the target's token that each row stands for; None where row n stands for token n. A token
    that has no row is never proposed.
    """

    weight: Weight
    token_ids: torch.Tensor | None = None

    def most_probable(self, hidden: torch.Tensor, batch_invariant_rows: int | None = None) -> torch.Tensor:
        """Return the most probable token of each of n normed rows [n, hidden]: int64 [n].

        batch_invariant_rows: as in `Rows`.
        """
        logits = self.weight.matmul(hidden.to(self.weight.dtype), None, batch_invariant_rows)
        return self.named(logits.argmax(-1))

    def named(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tokens for which these rows [n] of the matrix stand."""
        return rows if self.token_ids is None else self.token_ids[rows]
