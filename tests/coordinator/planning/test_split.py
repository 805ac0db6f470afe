"""The split: as good as trying them all, and never worse for more memory or faster devices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping

import pytest

from coordinator.planning.split import TOLERANCE, best_split
from services.layers import LayerRange


class Case:
    """Random layers on random stages. pools: the memory of each stage; stages may share one."""

    def __init__(self, seed: int, *, stages: int, layers: int, pools: int) -> None:
        draw = random.Random(seed)
        self.layers, self.stages = layers, stages
        self.seconds = [draw.uniform(0.5, 2.0) for _ in range(layers)]
        self.bytes = [draw.randint(1, 9) for _ in range(layers)]
        self.speed = [draw.choice([1.0, 1.0, 0.3, 4.0]) for _ in range(stages)]
        self.fixed = [draw.uniform(0.0, 0.5) for _ in range(stages)]
        self.pool = [draw.randrange(pools) for _ in range(stages)]
        self.free: dict[Hashable, int] = {
            pool: draw.randint(1, 2 * sum(self.bytes) // stages + 4) for pool in range(pools)
        }

    def cost(self, stage: int, layers: LayerRange) -> float:
        return self.fixed[stage] + sum(self.seconds[layers.first : layers.last]) / self.speed[stage]

    def usage(self, stage: int, layers: LayerRange) -> Mapping[Hashable, int]:
        return {self.pool[stage]: sum(self.bytes[layers.first : layers.last])}

    def solve(self) -> tuple[LayerRange, ...] | None:
        return best_split(self.layers, self.stages, self.cost, self.usage, self.free)

    def fits(self, ranges: tuple[LayerRange, ...]) -> bool:
        used = dict.fromkeys(self.free, 0)
        for stage, layers in enumerate(ranges):
            for pool, size in self.usage(stage, layers).items():
                used[pool] += size
        return all(used[pool] <= self.free[pool] for pool in used)

    def step(self, ranges: tuple[LayerRange, ...]) -> float:
        return sum(self.cost(stage, layers) for stage, layers in enumerate(ranges))

    def slowest(self, ranges: tuple[LayerRange, ...]) -> float:
        return max(self.cost(stage, layers) for stage, layers in enumerate(ranges))

    def everything(self) -> list[tuple[LayerRange, ...]]:
        """All contiguous splits that fit."""
        found = []
        for inner in itertools.combinations(range(1, self.layers), self.stages - 1):
            bounds = (0, *inner, self.layers)
            ranges = tuple(LayerRange(*pair) for pair in itertools.pairwise(bounds))
            if self.fits(ranges):
                found.append(ranges)
        return found


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_better(seed: int) -> None:
    """Against every split there is: the most even of the fastest, or none where none fits."""
    case = Case(seed, stages=1 + seed % 4, layers=4 + seed % 7, pools=1 + seed % 3)
    splits, found = case.everything(), case.solve()

    if not splits:
        assert found is None
        return
    assert found is not None
    assert case.fits(found)
    fast = [one for one in splits if case.step(one) <= min(map(case.step, splits)) * (1 + TOLERANCE) + 1e-9]
    assert found in fast
    assert case.slowest(found) <= min(map(case.slowest, fast)) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_more_of_anything_never_makes_it_worse(seed: int) -> None:
    """More memory, a faster device or a cheaper hop: the step does not get longer, and what fitted still fits."""
    case = Case(100 + seed, stages=3, layers=9, pools=2)
    before = case.solve()
    if before is None:
        return
    step = case.step(before) * (1 + TOLERANCE) + 1e-9
    for change in ("free", "speed", "fixed"):
        better = Case(100 + seed, stages=3, layers=9, pools=2)
        if change == "free":
            better.free = {pool: size * 2 for pool, size in better.free.items()}
        elif change == "speed":
            better.speed[seed % 3] *= 3
        else:
            better.fixed[seed % 3] = 0.0
        after = better.solve()
        assert after is not None
        assert better.step(after) <= step


def test_equal_devices_share_evenly() -> None:
    """Where every split is as fast, prefill decides: the stages are as even as can be."""
    found = best_split(9, 3, lambda _, layers: float(len(layers)), lambda _, __: {}, {})

    assert found == (LayerRange(0, 3), LayerRange(3, 6), LayerRange(6, 9))


def test_a_fast_device_gets_what_its_memory_holds() -> None:
    """The slower one keeps only what does not fit the faster one."""
    speeds = (1.0, 100.0)
    found = best_split(
        10,
        2,
        lambda stage, layers: len(layers) / speeds[stage],
        lambda stage, layers: {stage: len(layers)},
        {0: 10, 1: 7},
    )

    assert found == (LayerRange(0, 3), LayerRange(3, 10))


def test_one_memory_holds_all_that_share_it() -> None:
    """Two workers of one host cannot both use the same bytes."""

    def solve(free: int) -> object:
        return best_split(
            4, 2, lambda _, layers: float(len(layers)), lambda _, layers: {"host": len(layers)}, {"host": free}
        )

    assert solve(4) is not None
    assert solve(3) is None


def test_a_stage_may_be_left_out() -> None:
    """Where that is asked for, a slow stage gets nothing and costs nothing; a needed one stays."""
    speeds = (1.0, 10.0, 1.0)

    def solve(room: int) -> object:
        return best_split(
            6,
            3,
            lambda stage, layers: 0.5 + len(layers) / speeds[stage],
            lambda stage, layers: {stage: len(layers)},
            {0: 6, 1: room, 2: 6},
            may_skip=True,
        )

    assert solve(6) == (LayerRange(0, 0), LayerRange(0, 6), LayerRange(6, 6))
    assert solve(4) in (
        (LayerRange(0, 2), LayerRange(2, 6), LayerRange(6, 6)),
        (LayerRange(0, 0), LayerRange(0, 4), LayerRange(4, 6)),
    )


def test_many_layers_are_split_in_seconds() -> None:
    """80 layers over four stages, each two of them in one memory."""
    speeds = (1.0, 3.0, 2.0, 5.0)
    found = best_split(
        80,
        4,
        lambda stage, layers: len(layers) / speeds[stage],
        lambda stage, layers: {stage // 2: len(layers) * 10},
        {0: 500, 1: 700},
    )

    assert found is not None
    assert sum(len(layers) for layers in found) == 80
