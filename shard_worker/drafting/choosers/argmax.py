"""The most probable token of each row, whatever stands in the others. Kernels that end with an argmax do the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.model.choosers.argmax import ArgmaxConfig
from shard_worker.drafting.choosers import GuessedRows
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.ops.largest import largest
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class Argmax:
    """As of `Chooser`; it has no weights."""

    takes_logits: bool = False
    cuts_blocks: bool = False
    nbytes: int = 0
    multiplied: Sequence[Weight] = ()

    def choose(self, rows: GuessedRows) -> torch.Tensor:
        return rows.named(largest(rows.logits))


def load(config: ArgmaxConfig, tensors: LayerTensors) -> Argmax:
    """As of `ChooserModule`."""
    return Argmax()
