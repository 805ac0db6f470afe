"""The split with the shortest step that fits the memory: exact, over all contiguous ranges.

Dynamic programming from the first stage on, first for the shortest step, then for the most even split among those that
are nearly as short. Workers on one device share its memory (several CPU workers of a host), so a partial split is kept
unless another one is no worse in time, in its slowest stage and in every shared memory. Knows nothing of models: what a
stage costs and takes is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from services.layers import LayerRange

TOLERANCE = 0.02
"""Steps that differ by less are equally fast: measurements are no better. The most even split prefills fastest."""

Cost = Callable[[int, LayerRange], float]
"""Seconds that a stage takes for its layers; infinite where it cannot hold them."""

Usage = Callable[[int, LayerRange], Mapping[Hashable, int]]
"""Bytes that a stage takes of each memory; the memories that it names must not depend on the layers."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Layers that one stage may hold, the seconds that they cost and the bytes that they take of each memory."""

    layers: LayerRange
    seconds: float
    taken: Mapping[Hashable, int]


@dataclass(frozen=True, slots=True)
class _Partial:
    """Layers of the first stages.

    seconds: their sum. slowest: of one stage, 0 where it does not matter. shared: bytes taken of each memory that
    several stages use.
    """

    seconds: float
    slowest: float
    shared: tuple[int, ...]
    ranges: tuple[LayerRange, ...]

    def no_worse(self, other: _Partial) -> bool:
        """Say whether nothing speaks for the other one."""
        return (
            self.seconds <= other.seconds
            and self.slowest <= other.slowest
            and all(own <= theirs for own, theirs in zip(self.shared, other.shared, strict=True))
        )


def best_split(
    num_layers: int,
    stages: int,
    cost: Cost,
    usage: Usage,
    free: Mapping[Hashable, int],
    *,
    may_skip: bool = False,
) -> tuple[LayerRange, ...] | None:
    """Return the most even of the splits whose summed cost is within TOLERANCE of the lowest; None where nothing fits.

    free: bytes of each memory. may_skip: whether a stage may be left out, which costs and takes nothing; its range is
    empty then. Otherwise each stage has a layer.
    """
    choices = [_choices(num_layers, stage, stages, cost, usage, free, 0 if may_skip else 1) for stage in range(stages)]
    fastest = _search(num_layers, choices, free, math.inf, even=False)
    if fastest is None:
        return None
    most_even = _search(num_layers, choices, free, fastest.seconds * (1 + TOLERANCE), even=True)
    return (most_even or fastest).ranges


def _choices(
    num_layers: int, stage: int, stages: int, cost: Cost, usage: Usage, free: Mapping[Hashable, int], least: int
) -> dict[int, list[_Choice]]:
    """Return, by first layer, what a stage may hold and what that costs, as far as it fits on its own."""
    following = stages - stage - 1
    choices: dict[int, list[_Choice]] = {}
    for first in range(num_layers + 1 - least):
        lasts = range(first + least, num_layers - least * following + 1) if following else [num_layers]
        for last in lasts:
            layers = LayerRange(first, last)
            seconds, taken = (cost(stage, layers), usage(stage, layers)) if len(layers) else (0.0, {})
            if not math.isinf(seconds) and all(size <= free[memory] for memory, size in taken.items()):
                choices.setdefault(first, []).append(_Choice(layers, seconds, taken))
    return choices


def _search(
    num_layers: int,
    choices: Sequence[Mapping[int, Sequence[_Choice]]],
    free: Mapping[Hashable, int],
    most: float,
    *,
    even: bool,
) -> _Partial | None:
    """Return the split whose slowest stage is fastest (even) or whose sum is lowest, of at most `most` seconds."""
    used = [{memory for held in stage.values() for choice in held for memory in choice.taken} for stage in choices]
    shared = sorted({memory for memory in free if sum(memory in memories for memories in used) > 1}, key=str)
    to_go = _seconds_to_go(num_layers, choices)
    reached: dict[int, list[_Partial]] = {0: [_Partial(0.0, 0.0, (0,) * len(shared), ())]}
    for stage, by_first in enumerate(choices):
        behind: dict[int, list[_Partial]] = {}
        for first, partials in reached.items():
            for choice in by_first.get(first, ()):
                rest = to_go[stage + 1].get(choice.layers.last, math.inf)
                for partial in partials:
                    seconds = partial.seconds + choice.seconds
                    # Sums of the same numbers in another order differ in their last bits.
                    if math.isinf(rest) or seconds + rest > most * (1 + 1e-9):
                        continue
                    taken = tuple(
                        size + choice.taken.get(memory, 0) for size, memory in zip(partial.shared, shared, strict=True)
                    )
                    if all(size <= free[memory] for size, memory in zip(taken, shared, strict=True)):
                        slowest = max(partial.slowest, choice.seconds) if even else 0.0
                        longer = _Partial(seconds, slowest, taken, (*partial.ranges, choice.layers))
                        _keep(behind.setdefault(choice.layers.last, []), longer)
        reached = behind
    return min(reached.get(num_layers, []), key=lambda partial: (partial.slowest, partial.seconds), default=None)


def _seconds_to_go(num_layers: int, choices: Sequence[Mapping[int, Sequence[_Choice]]]) -> list[dict[int, float]]:
    """Return, by stage and first layer, the least that it and those behind it cost, were memory never shared."""
    to_go: list[dict[int, float]] = [{num_layers: 0.0}]
    for by_first in reversed(choices):
        to_go.insert(
            0,
            {
                first: min(choice.seconds + to_go[0].get(choice.layers.last, math.inf) for choice in some)
                for first, some in by_first.items()
            },
        )
    return to_go


def _keep(partials: list[_Partial], new: _Partial) -> None:
    """Add a partial split unless another is no worse, and drop those that are worse than it."""
    if not any(partial.no_worse(new) for partial in partials):
        partials[:] = [partial for partial in partials if not new.no_worse(partial)]
        partials.append(new)
