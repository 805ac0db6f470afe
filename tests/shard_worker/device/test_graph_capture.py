"""Graphs are captured whatever garbage there is meanwhile."""

from __future__ import annotations

import gc

import pytest
import torch

from shard_worker.device.graph_capture import capture_graph

pytestmark = [pytest.mark.gpu]


class Stage:
    """What refers to itself, and so is freed by the garbage collector, with pinned memory that a graph copies to.

    Freeing that calls CUDA about the stream on which all graphs are captured.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.itself = self
        self.pinned = torch.zeros(4).pin_memory()
        self.graph, _ = capture_graph(lambda: self.pinned.copy_(values, non_blocking=True))


def test_garbage_is_left_alone_while_a_graph_is_captured() -> None:
    values = torch.arange(4.0, device="cuda")
    thresholds = gc.get_threshold()

    def launch() -> torch.Tensor:
        gc.set_threshold(10, 1, 1)
        made = [[number] for number in range(2000)]
        return values * len(made)

    # Far from the next collection by itself.
    gc.collect()
    Stage(values)
    try:
        graph, product = capture_graph(launch)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    graph.replay()
    assert product.tolist() == [0.0, 2000.0, 4000.0, 6000.0]


def test_what_fails_while_it_is_captured_is_told_and_leaves_the_collector_on() -> None:
    values = torch.arange(4.0, device="cuda")

    def launch() -> None:
        values.add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture_graph(launch)
    assert gc.isenabled()
