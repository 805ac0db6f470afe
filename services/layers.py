"""A half-open range of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers [first, last) of the target, by global index."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.last

    def most_parts(self, last_cut: int) -> int:
        """Return into how many runs these layers can be spread. last_cut: as of `spread`."""
        return 1 + max(0, min(self.last - 1, last_cut) - self.first)

    def spread(self, parts: int, last_cut: int | None = None) -> list[LayerRange]:
        """Return so many contiguous runs of these layers, whose lengths differ by at most one.

        last_cut: the last layer that a run behind another may begin with, None for any; the last run may be longer for
        it. There must be no more parts than `most_parts` says.
        """
        most = self.last - 1 if last_cut is None else min(self.last - 1, last_cut)
        even = [self.first + len(self) * index // parts for index in range(1, parts)]
        cuts = [min(cut, most - (parts - 1 - index)) for index, cut in enumerate(even, 1)]
        bounds = [self.first, *cuts, self.last]
        return [LayerRange(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]

    def __str__(self) -> str:
        return f"[{self.first}, {self.last})"
