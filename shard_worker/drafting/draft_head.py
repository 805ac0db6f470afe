"""What turns the normed hidden rows of a draft into draft tokens: the target's lm_head, or a smaller one of the draft's
own, whose rows stand for some of the target's tokens; and behind it the draft's chooser."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shard_worker.drafting.choosers import NOT_PROPOSED, Chooser, GuessedRows
from shard_worker.drafting.choosers.argmax import Argmax
from shard_worker.drafting.embedding_rows import EmbeddingRows
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A matrix [tokens, hidden], and what chooses tokens by the logits that it makes.

    token_ids: int64 [tokens], the target's token that each row stands for; None where row n stands for token n. A token
    that has no row is never proposed. cap: as of `ModelConfig.logit_cap`, for a chooser that asks how large logits are.
    """

    weight: Weight
    token_ids: torch.Tensor | None = None
    chooser: Chooser = Argmax()
    cap: float | None = None

    def choose(
        self,
        hidden: torch.Tensor,
        known: Sequence[int],
        counts: Sequence[int],
        embedding: EmbeddingRows | None = None,
        batch_invariant_rows: int | None = None,
    ) -> list[tuple[int, ...]]:
        """Return the draft tokens of several sessions, of their normed rows [n, hidden], one session's behind the
        other's: as many as each has rows, or fewer where the chooser says that no more are worth it.

        known: the token before each session's first row. counts: how many rows each has. embedding: as of
        `GuessedRows`. batch_invariant_rows: as in `Rows`.
        """
        logits = self.weight.matmul(hidden.to(self.weight.dtype), None, batch_invariant_rows)
        rows = GuessedRows(hidden, self.capped(logits), known, counts, self.named, embedding, batch_invariant_rows)
        tokens = iter(self.chooser.choose(rows).tolist())
        blocks = [itertools.islice(tokens, count) for count in counts]
        return [tuple(token for token in block if token != NOT_PROPOSED) for block in blocks]

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits as the chooser asks for them, in the same memory."""
        if self.cap is None or not self.chooser.takes_logits:
            return logits
        return logits.div_(self.cap).tanh_().mul_(self.cap)

    def named(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tokens for which these rows of the matrix stand, in the same shape."""
        return rows if self.token_ids is None else self.token_ids[rows]
