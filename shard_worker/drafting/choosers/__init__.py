"""How drafts choose tokens, by the hidden rows and logits of a block and the token before it: one module each.

A new chooser is one new module here, and one of the same name in `services.model.choosers` that reads its keys. It must
not know the draft's layers, nor which sessions are computed together: a session's tokens depend on its own rows alone.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from services.model.choosers import ChooserConfig
from shard_worker.drafting.embedding_rows import EmbeddingRows
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.model.rows import row_by_row
from shard_worker.weights.weight import Weight

NOT_PROPOSED = -1
"""Stands in place of a token where a block ends sooner than it was asked for."""


@dataclass(frozen=True, slots=True)
class GuessedRows:
    """The rows of draft tokens of several sessions, one session's behind the other's.

    hidden: [n, hidden], normed. logits: [n, rows of lm_head]. known: the token before each session's first row. counts:
    how many rows each session has. named: returns the target's tokens for which rows of lm_head stand, int64 in any
    shape. embedding: looks up the target's embedding; None where it is not at hand. batch_invariant_rows: as in `Rows`.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    known: Sequence[int]
    counts: Sequence[int]
    named: Callable[[torch.Tensor], torch.Tensor]
    embedding: EmbeddingRows | None = None
    batch_invariant_rows: int | None = None

    def each(self, work: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        """Return an elementwise function of rows [m, …], as `Rows.each`."""
        return work(tensor) if self.batch_invariant_rows is None else row_by_row(work, tensor)

    def places(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each place of a block from the first one on, the sessions that have it and their rows, int64 [m]
        both."""
        device, firsts = self.hidden.device, [0, *itertools.accumulate(self.counts)]
        for place in range(max(self.counts)):
            sessions = [number for number, count in enumerate(self.counts) if place < count]
            rows = [firsts[number] + place for number in sessions]
            yield torch.tensor(sessions, device=device), torch.tensor(rows, device=device)


class Chooser(Protocol):
    """A loaded chooser."""

    @property
    def takes_logits(self) -> bool:
        """Whether it asks how large logits are, so that they must be capped as the target's, and not only which one is
        the largest."""

    @property
    def cuts_blocks(self) -> bool:
        """Whether a block may have fewer tokens than it was asked for."""

    @property
    def nbytes(self) -> int:
        """Memory that its weights take."""

    @property
    def multiplied(self) -> Sequence[Weight]:
        """The matrices that kernels would have to multiply rows by, beside lm_head."""

    def choose(self, rows: GuessedRows) -> torch.Tensor:
        """Return the token of each row, int64 [n], and NOT_PROPOSED from the row on with which a session's block is not
        worth verifying; never for its first one."""


class ChooserModule(Protocol):
    """The functions of a module of this package."""

    def load(self, config: Any, tensors: LayerTensors) -> Chooser:
        """Return the chooser of a configuration. tensors: those of `ChooserConfig.tensor_shapes`, on the device where
        logits are made and in the draft's dtype."""


def load_chooser(config: ChooserConfig, tensors: LayerTensors) -> Chooser:
    """Return the chooser that a draft's configuration asks for, as `ChooserModule.load`."""
    module = cast(ChooserModule, importlib.import_module(f"{__name__}.{config.name}"))
    return module.load(config, tensors)
