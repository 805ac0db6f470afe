"""The split with the shortest step that fits the memory: exact, over all contiguous ranges.

Dynamic programming from the first stage on. Workers on one device share its memory (several CPU workers of a host), and
of splits that are as good as equally fast the most even one is wanted; so a partial split is kept unless another one is
no worse in time, in its slowest stage and in every shared memory. Knows nothing of models: what a stage costs and takes
is asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from services.layers import LayerRange

TOLERANCE = 0.02
"""Steps that differ by less are equally fast: measurements are no better. The most even split prefills fastest."""

Cost = Callable[[int, LayerRange], float]
"""Seconds that a stage takes for its layers; infinite where it cannot hold them."""

Usage = Callable[[int, LayerRange], Mapping[Hashable, int]]
"""Bytes that a stage takes of each memory; the memories that it names must not depend on the layers."""


@dataclass(frozen=True, slots=True)
class _Partial:
    """The first stages. shared: what they take of the memories that several stages use."""

    seconds: float
    slowest: float
    shared: tuple[int, ...]
    ranges: tuple[LayerRange, ...]

    def no_worse(self, other: _Partial) -> bool:
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
    """The most even of the splits whose summed cost is within TOLERANCE of the lowest; None where nothing fits.

    may_skip: a stage may be left out, which costs and takes nothing; its range is empty. Otherwise each has a layer.
    """
    named = Counter(memory for stage in range(stages) for memory in usage(stage, LayerRange(0, num_layers)))
    shared = [memory for memory, count in named.items() if count > 1]
    least = 0 if may_skip else 1
    reached: dict[int, list[_Partial]] = {0: [_Partial(0.0, 0.0, (0,) * len(shared), ())]}
    for stage in range(stages):
        behind: dict[int, list[_Partial]] = {}
        following = stages - stage - 1
        for first, partials in reached.items():
            lasts = range(first + least, num_layers - least * following + 1) if following else [num_layers]
            for last in lasts:
                layers = LayerRange(first, last)
                seconds, taken = (cost(stage, layers), usage(stage, layers)) if len(layers) else (0.0, {})
                if math.isinf(seconds) or any(size > free[memory] for memory, size in taken.items()):
                    continue
                for one in partials:
                    used = tuple(size + taken.get(memory, 0) for size, memory in zip(one.shared, shared, strict=True))
                    if all(size <= free[memory] for size, memory in zip(used, shared, strict=True)):
                        slowest = max(one.slowest, seconds)
                        longer = _Partial(one.seconds + seconds, slowest, used, (*one.ranges, layers))
                        _keep(behind.setdefault(last, []), longer)
        reached = behind
    found = reached.get(num_layers, [])
    if not found:
        return None
    fast = min(one.seconds for one in found) * (1 + TOLERANCE)
    return min((one for one in found if one.seconds <= fast), key=lambda one: (one.slowest, one.seconds)).ranges


def _keep(partials: list[_Partial], new: _Partial) -> None:
    """Add one unless another is no worse; drop those that it makes needless."""
    if not any(one.no_worse(new) for one in partials):
        partials[:] = [one for one in partials if not new.no_worse(one)]
        partials.append(new)
