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

    def spread(self, parts: int) -> list[LayerRange]:
        """Return so many contiguous runs of these layers, whose lengths differ by at most one."""
        bounds = [self.first + len(self) * index // parts for index in range(parts + 1)]
        return [LayerRange(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]

    def __str__(self) -> str:
        return f"[{self.first}, {self.last})"
