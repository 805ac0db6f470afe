"""DFlash2's candidate selector, which walks a block from the known token on.

Of the most probable tokens of each row it takes the one that fits the token before it best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.model.choosers.dflash2 import SelectorConfig
from shard_worker.drafting.choosers import GuessedRows
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.weights.weight import Weight

MOST_RANK = 1024
"""The most numbers of a token's vectors that kernels take."""


@dataclass(frozen=True, slots=True)
class Selector:
    """As of `Chooser`.

    projection: [rank, hidden], what a row's hidden state weighs a token's vectors by. predecessors, successors: [vocab,
    rank], the vectors of the token before and of the one that follows. candidates: how many of a row.
    """

    projection: Weight
    predecessors: torch.Tensor
    successors: torch.Tensor
    candidates: int
    takes_logits: bool = True
    cuts_blocks: bool = False

    @property
    def nbytes(self) -> int:
        return self.projection.nbytes + self.predecessors.nbytes + self.successors.nbytes

    @property
    def multiplied(self) -> tuple[Weight, ...]:
        return (self.projection,)

    @property
    def fits_kernels(self) -> bool:
        """Whether kernels can walk through blocks by it."""
        return self.predecessors.shape[1] <= MOST_RANK

    def choose(self, rows: GuessedRows) -> torch.Tensor:
        logits, candidates = rows.logits.float().topk(self.candidates, -1)
        hidden = rows.hidden.to(self.projection.dtype)
        weighing = self.projection.matmul(hidden, None, rows.batch_invariant_rows).float()
        # All but the token before is known for every row at once: [n, candidates, rank].
        followers = self.successors[candidates].float() * weighing[:, None]
        before = torch.tensor(rows.known, device=logits.device)
        chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for sessions, places in rows.places():
            fits = (followers[places] * self.predecessors[before[sessions], None].float()).sum(-1)
            best = (logits[places] + fits).argmax(-1, keepdim=True)
            before[sessions] = chosen[places] = candidates[places].gather(1, best)[:, 0]
        return chosen


def load(config: SelectorConfig, tensors: LayerTensors) -> Selector:
    """As of `ChooserModule`."""
    prefix = "candidate_selector."
    return Selector(
        projection=tensors.matrices[f"{prefix}hidden_projection.weight"].prepared(),
        predecessors=tensors.vectors[f"{prefix}predecessor_codebook"],
        successors=tensors.vectors[f"{prefix}successor_codebook"],
        candidates=config.candidates,
    )
