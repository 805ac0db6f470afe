"""Layer ranges are half-open."""

from __future__ import annotations

from services.layers import LayerRange


def test_half_open() -> None:
    """The first layer belongs to the range, the last does not."""
    layers = LayerRange(3, 9)
    assert len(layers) == 6
    assert [layer in layers for layer in (2, 3, 8, 9)] == [False, True, True, False]
    assert str(layers) == "[3, 9)"


def test_order() -> None:
    """Ranges sort by where they begin."""
    assert sorted([LayerRange(4, 5), LayerRange(0, 9), LayerRange(0, 4)]) == [
        LayerRange(0, 4),
        LayerRange(0, 9),
        LayerRange(4, 5),
    ]
