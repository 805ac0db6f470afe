"""Features for the draft: captured residual streams, summed through the draft's `fc` slice by slice, or as they are.

`fc` is linear, so each stage may multiply what it captured by its own columns of `fc` and add the product to a float32
sum that rides along: 2 rows of hidden values a token on the wire instead of 1 + N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shard_worker.device.dtypes import to_device
from shard_worker.weights.weight import Weight


@dataclass(slots=True)
class Features:
    """Features of the rows of one step, gathered along the chain.

    total: float32 [n, draft hidden], the sum so far, or None. slices: [n, hidden] by place in the draft's list of
    blocks.
    """

    total: torch.Tensor | None = None
    slices: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing was captured yet."""
        return self.total is None and not self.slices

    @property
    def indices(self) -> list[int | None]:
        """What `tensors` are: None for the sum, and the slices' places in the draft's list."""
        return [*([None] if self.total is not None else []), *sorted(self.slices)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The sum and the slices, in the order in which they travel."""
        return [*([self.total] if self.total is not None else []), *(self.slices[i] for i in sorted(self.slices))]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.tensors[0]) if not self.empty else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows(self, count: int) -> Features:
        """Return the features of the first `count` rows."""
        first = Features()
        self.give(first, 0, count)
        return first

    def give(self, other: Features, first: int, last: int) -> None:
        """Let the other features be those of rows [first, last) of these."""
        other.total = None if self.total is None else self.total[first:last]
        other.slices = {index: piece[first:last] for index, piece in self.slices.items()}

    def own(self) -> Features:
        """Return a copy that holds no other rows' memory."""
        total = None if self.total is None else self.total.clone()
        return Features(total, {index: piece.clone() for index, piece in self.slices.items()})

    def add(self, part: torch.Tensor) -> None:
        """Add rows [n, draft hidden] to the sum."""
        part = part.float()
        self.total = part if self.total is None else to_device(self.total, part.device) + part

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        if self.total is not None:
            self.total = to_device(self.total, device)
        self.slices = {index: to_device(piece, device) for index, piece in self.slices.items()}


def joined(features: Sequence[Features]) -> Features:
    """Return the features of several sessions' rows, one session's behind the other's, all captured alike."""
    if len(features) == 1:
        return features[0]
    totals = [one.total for one in features if one.total is not None]
    slices = {index: torch.cat([one.slices[index] for one in features]) for index in features[0].slices}
    return Features(torch.cat(totals) if totals else None, slices)


@dataclass(frozen=True, slots=True)
class Capture:
    """Which layers of a segment are captured.

    indices: each captured layer's place in the draft's list, by global layer. fc: this segment's columns of the draft's
    `fc`, [draft hidden, k * hidden], in order of the layers; None where the slices travel as they are.
    """

    indices: Mapping[int, int]
    fc: Weight | None

    def collect(
        self, captured: list[torch.Tensor], features: Features, batch_invariant_rows: int | None = None
    ) -> None:
        """Add a segment's captured rows, one [n, hidden] for each layer in order.

        batch_invariant_rows: as in `Rows`.
        """
        if self.fc is not None:
            features.add(self.fc.matmul(torch.cat(captured, -1), None, batch_invariant_rows))
        else:
            features.slices |= dict(zip(self.indices.values(), captured, strict=True))


def fc_columns(fc: torch.Tensor, indices: Mapping[int, int], hidden_size: int) -> torch.Tensor:
    """Return the columns of `fc` [draft hidden, N * hidden] that belong to these captures, in order of their layers."""
    return torch.cat([fc[:, i * hidden_size : (i + 1) * hidden_size] for i in indices.values()], -1)
