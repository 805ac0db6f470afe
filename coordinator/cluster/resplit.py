"""Which layers each worker takes over where others are lost and do not come back.

It chooses ranges from what workers hold and have room for, and knows no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.cluster.placement import split_layers
from services.layers import LayerRange
from services.messages.description import WorkerDescription

FREE_SHARE = 0.9
"""Of the free memory of a worker's devices, what weights may take that it did not hold before."""

WeighLayers = Callable[[LayerRange], int]
"""Returns the bytes that a worker takes for these layers, with the ends that belong to them and a draft beside."""


def weight_room(worker: WorkerDescription) -> int | None:
    """Return the bytes that a worker has for weights, with those that it holds; None where its system does not say."""
    free = sum(device.free_bytes for device in worker.devices)
    held = 0 if worker.target is None else worker.target.weight_bytes
    return int(FREE_SHARE * free) + held if free else None


def split_anew(
    held: Sequence[LayerRange],
    num_layers: int,
    rooms: Sequence[int | None],
    weigh: WeighLayers | None,
    last_cut: int | None = None,
) -> list[LayerRange] | None:
    """Return the layers of each worker that is left, in order; None where they have no room for all.

    held: what each holds now, by which the layers are divided, since that says how fast each is. Where that does not
    fit, they are divided by room. rooms: as `weight_room` has them. weigh: None takes all for fitting.
    last_cut: the last layer that a stage may begin with, None for any.
    """
    shares = [[float(len(layers)) for layers in held]]
    known = [float(room) for room in rooms if room]
    if len(known) == len(rooms):
        shares.append(known)
    if len(held) > num_layers:
        return None
    for weights in shares:
        ranges = split_layers(num_layers, weights, last_cut)
        if weigh is None or all(
            room is None or weigh(layers) <= room for layers, room in zip(ranges, rooms, strict=True)
        ):
            return ranges
    return None
