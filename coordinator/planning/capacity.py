"""How many sessions find memory at once, by their length: what the pools of keys and values have room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.planning.memory import Models, cache_bytes
from services.model.cached_tensors import PAGE_ROWS
from services.processes.device_memory import MEMORY_SHARE

if TYPE_CHECKING:
    from coordinator.planning.report import DeviceLoad

USUAL_LENGTHS = (2048, 8192)


def fitting_sessions(models: Models, loads: Sequence[DeviceLoad], memory_share: float | None) -> dict[int, int] | None:
    """Return how many sessions of each usual length, and of the model's own, find memory at once on all devices.

    memory_share: of each device's memory, what a worker may take; None for the default. Returns None where not all
    devices were asked how much memory they have.
    """
    most = models.target.max_position
    if any(load.free_bytes is None for load in loads):
        return None
    share = MEMORY_SHARE if memory_share is None else memory_share
    # Memory that has but experts of sessions' layers takes nothing of theirs.
    caching = {load.memory for load in loads if load.share.layers is not None or load.share.draft}
    return {
        length: min(_sessions(models, loads, memory, length, share) for memory in caching)
        for length in (*(length for length in USUAL_LENGTHS if length < most), most)
    }


def _sessions(models: Models, loads: Sequence[DeviceLoad], memory: str, length: int, share: float) -> int:
    members = [load for load in loads if load.memory == memory]
    free, total = members[0].free_bytes, members[0].total_bytes
    assert free is not None
    assert total is not None
    left = free - sum(load.weight_bytes for load in members)
    if members[0].device == "cpu":
        pool = share * left
    else:
        pool = left - (1 - share) * total
        length = -(-length // PAGE_ROWS) * PAGE_ROWS
    each = sum(cache_bytes(models, load.share, length, 1) for load in members)
    return max(0, int(pool // each)) if each else 0
