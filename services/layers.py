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

    def __str__(self) -> str:
        return f"[{self.first}, {self.last})"
