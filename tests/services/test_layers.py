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


def test_layers_are_spread_evenly() -> None:
    """Runs follow each other, hold every layer once and differ in length by at most one."""
    for parts in range(1, 8):
        runs = LayerRange(3, 10).spread(parts)

        assert [layer for run in runs for layer in range(run.first, run.last)] == list(range(3, 10))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        assert len(runs) == parts


def test_runs_end_where_layers_can_be_cut() -> None:
    """Behind the last cut none begins, however many there are; runs before it stay as even as they can."""
    for last_cut in range(3, 10):
        most = LayerRange(3, 10).most_parts(last_cut)
        assert most == min(last_cut, 9) - 3 + 1
        for parts in range(1, most + 1):
            runs = LayerRange(3, 10).spread(parts, last_cut)
            assert [layer for run in runs for layer in range(run.first, run.last)] == list(range(3, 10))
            assert all(len(run) for run in runs)
            assert max(run.first for run in runs) <= last_cut
    assert LayerRange(0, 12).spread(3, 11) == LayerRange(0, 12).spread(3)
    assert LayerRange(3, 10).most_parts(2) == 1
