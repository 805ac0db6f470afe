"""Which layers workers take over where others are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cluster.placement import make_plan
from coordinator.cluster.resplit import FREE_SHARE, split_anew, weight_room
from services.layers import LayerRange
from tests.services.fakes import WORKER


def ranges(*bounds: int) -> list[LayerRange]:
    return [LayerRange(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]


def weigh(layers: LayerRange) -> int:
    """Ten bytes a layer, and five for the embedding."""
    return 10 * len(layers) + 5 * (layers.first == 0)


@pytest.mark.parametrize(
    ("held", "rooms", "found"),
    [
        # By what each holds: who was given twice as much takes twice as much more.
        (ranges(0, 4, 12), [200, 200], ranges(0, 4, 12)),
        ([LayerRange(0, 2), LayerRange(8, 12)], [200, 200], ranges(0, 4, 12)),
        ([LayerRange(4, 8)], [125], ranges(0, 12)),
        # By room where that does not fit, and not at all where nothing does.
        ([LayerRange(0, 4), LayerRange(8, 12)], [45, 90], ranges(0, 4, 12)),
        ([LayerRange(4, 8)], [124], None),
        ([LayerRange(0, 4), LayerRange(8, 12)], [55, 55], None),
        # A system that does not say what is free is believed to have it.
        ([LayerRange(0, 4), LayerRange(8, 12)], [None, 60], ranges(0, 6, 12)),
        ([LayerRange(0, 4), LayerRange(8, 12)], [None, 59], None),
    ],
)
def test_layers_are_divided_by_what_workers_hold_and_have_room_for(
    held: list[LayerRange], rooms: list[int | None], found: list[LayerRange] | None
) -> None:
    assert split_anew(held, 12, rooms, weigh) == found


def test_without_weights_everything_fits() -> None:
    assert split_anew([LayerRange(4, 8)], 12, [1], None) == ranges(0, 12)


def test_layers_that_share_keys_stay_together() -> None:
    """The last worker begins where it must, whatever the others hold."""
    held = [LayerRange(0, 4), LayerRange(4, 8)]
    assert split_anew(held, 12, [None, None], weigh, 5) == ranges(0, 5, 12)
    plan = make_plan(
        target_devices="cpu,cpu,cpu", layer_split=None, draft_device=None, num_layers=12, has_draft=False, last_cut=5
    )
    assert plan.last_cut == plan.stages[-1].layers.first == 5


def test_room_is_what_is_free_and_what_weights_have() -> None:
    """Not all that is free: activations and sessions need some."""
    assert WORKER.target is not None
    free = sum(device.free_bytes for device in WORKER.devices)
    assert free
    assert weight_room(WORKER) == int(FREE_SHARE * free) + WORKER.target.weight_bytes
    assert weight_room(replace(WORKER, target=None)) == int(FREE_SHARE * free)
    assert weight_room(replace(WORKER, devices=())) is None
