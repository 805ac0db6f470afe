"""Features for the draft: captured residual streams, summed through the draft's `fc` slice by slice, or as they are.

`fc` is linear, so each stage may multiply what it captured by its own columns of `fc` and add the product to a float32
sum that rides along: 2 rows of hidden values a token on the wire instead of 1 + N. Where the draft is beside the stage,
the product can wait until the draft takes the rows: rows that do not count are then never multiplied, and those of many
steps are multiplied together, for which `fc` is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shard_worker.device.dtypes import joined_on, to_device
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class UnmultipliedRows:
    """What a segment captured, which is still to be multiplied by `fc` and added to the sum.

    rows: [n, k * hidden], the captured layers side by side. fc, batch_invariant_rows: as of `Capture`.
    """

    rows: torch.Tensor
    fc: Weight
    batch_invariant_rows: int | None

    def product(self) -> torch.Tensor:
        """Return the rows' part of the sum, [n, draft hidden]."""
        return self.fc.matmul(self.rows, None, self.batch_invariant_rows)

    def joins(self, other: UnmultipliedRows) -> bool:
        """Return whether rows of both can be multiplied at once with the bits that each has alone."""
        return self.fc is other.fc and self.batch_invariant_rows == other.batch_invariant_rows


@dataclass(slots=True)
class Features:
    """Features of the rows of one step, gathered along the chain.

    total: float32 [n, draft hidden], the sum so far, or None. slices: [n, hidden] by place in the draft's list of
    blocks. waits: whether what is captured is multiplied by `settle` only, and not at once. unmultiplied: what waits
    for that.
    """

    total: torch.Tensor | None = None
    slices: dict[int, torch.Tensor] = field(default_factory=dict)
    waits: bool = False
    unmultiplied: tuple[UnmultipliedRows, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing was captured yet."""
        return self.total is None and not self.slices and not self.unmultiplied

    @property
    def indices(self) -> list[int | None]:
        """What `tensors` are: None for the sum, and the slices' places in the draft's list."""
        return [*([None] if self.total is not None else []), *sorted(self.slices)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The sum and the slices, in the order in which they travel; all is to be multiplied before."""
        return [*([self.total] if self.total is not None else []), *(self.slices[i] for i in sorted(self.slices))]

    @property
    def count(self) -> int:
        """How many rows there are."""
        if self.unmultiplied:
            return len(self.unmultiplied[0].rows)
        return len(self.tensors[0]) if not self.empty else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors, *(one.rows for one in self.unmultiplied)))

    def rows(self, count: int) -> Features:
        """Return the features of the first `count` rows."""
        first = Features()
        if not self.empty:
            self.give(first, 0, count)
        return first

    def give(self, other: Features, first: int, last: int) -> None:
        """Let the other features be those of rows [first, last) of these."""
        other.total = None if self.total is None else self.total[first:last]
        other.slices = {index: piece[first:last] for index, piece in self.slices.items()}
        other.unmultiplied = tuple(replace(one, rows=one.rows[first:last]) for one in self.unmultiplied)

    def own(self) -> Features:
        """Return a copy that holds no other rows' memory."""
        total = None if self.total is None else self.total.clone()
        unmultiplied = tuple(replace(one, rows=one.rows.clone()) for one in self.unmultiplied)
        return Features(
            total, {index: piece.clone() for index, piece in self.slices.items()}, unmultiplied=unmultiplied
        )

    def settle(self) -> None:
        """Multiply what waits for it, and add it to the sum."""
        unmultiplied, self.unmultiplied = self.unmultiplied, ()
        for one in unmultiplied:
            self.add(one.product())

    def add(self, part: torch.Tensor) -> None:
        """Add rows [n, draft hidden] to the sum."""
        part = part.float()
        self.total = part if self.total is None else to_device(self.total, part.device) + part

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        if self.total is not None:
            self.total = to_device(self.total, device)
        self.slices = {index: to_device(piece, device) for index, piece in self.slices.items()}


def joined(features: Sequence[Features], device: torch.device | None = None) -> Features:
    """Return the features of several sessions' rows, one session's behind the other's, all captured alike. Rows that
    are to be multiplied go on waiting where all can be multiplied at once. device: where a sum is needed, if it is not
    there."""
    if len(features) == 1:
        return features[0]
    if not all(_joins(features[0], other) for other in features):
        for one in features:
            one.settle()
    columns = [*zip(*(one.unmultiplied for one in features), strict=True)]
    totals = [one.total for one in features if one.total is not None]
    slices = {index: torch.cat([one.slices[index] for one in features]) for index in features[0].slices}
    unmultiplied = tuple(replace(column[0], rows=torch.cat([one.rows for one in column])) for column in columns)
    waits = all(one.waits for one in features)
    return Features(joined_on(totals, device) if totals else None, slices, waits, unmultiplied)


def _joins(one: Features, other: Features) -> bool:
    """Return whether what is still to be multiplied of both can be multiplied together."""
    alike = len(one.unmultiplied) == len(other.unmultiplied)
    return alike and all(a.joins(b) for a, b in zip(one.unmultiplied, other.unmultiplied, strict=True))


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
            rows = UnmultipliedRows(torch.cat(captured, -1), self.fc, batch_invariant_rows)
            if features.waits:
                features.unmultiplied += (rows,)
            else:
                features.add(rows.product())
        else:
            features.slices |= dict(zip(self.indices.values(), captured, strict=True))


def fc_columns(fc: torch.Tensor, indices: Mapping[int, int], hidden_size: int) -> torch.Tensor:
    """Return the columns of `fc` [draft hidden, N * hidden] that belong to these captures, in order of their layers."""
    return torch.cat([fc[:, i * hidden_size : (i + 1) * hidden_size] for i in indices.values()], -1)
