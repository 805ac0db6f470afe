"""Who holds what: parses --target-devices, --target-layer-split and --draft-device into a checked plan.

The language is lucebox's: proportional weights, rounded, at least one layer each. Contradictions and options without
effect are refused with a sentence that says what to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.addresses import parse_address
from services.errors import InvalidArgument
from services.layers import LayerRange

_DEVICE = re.compile(r"^(cpu|best|(cuda|hip):\d{1,3})$")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is: a device expression to start one on, or the address of a running one."""

    devices: str | None
    address: str | None

    def __str__(self) -> str:
        return self.devices or self.address or ""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its worker and its layers."""

    place: Place
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages in order. draft: a worker of its own, or None: beside the last stage (or no draft at all)."""

    stages: tuple[StagePlan, ...]
    draft: Place | None
    has_draft: bool


def make_plan(
    *,
    target_devices: str | None,
    layer_split: str | None,
    draft_device: str | None,
    num_layers: int,
    has_draft: bool,
) -> Plan:
    """Raises InvalidArgument naming the option, its value and what would be accepted."""
    if layer_split is not None and target_devices is None:
        raise InvalidArgument(
            "--target-layer-split has no effect without --target-devices: name the devices, or leave it out",
            field="--target-layer-split",
        )
    places = parse_places(target_devices or "best")
    if len(places) > num_layers:
        raise InvalidArgument(
            f"--target-devices names {len(places)} workers, the model has {num_layers} layers: name fewer",
            field="--target-devices",
        )
    weights = parse_weights(layer_split, len(places))
    draft = None
    if draft_device is not None:
        if not has_draft:
            raise InvalidArgument(
                "--draft-device has no effect without --draft: name the draft checkpoint, or leave it out",
                field="--draft-device",
            )
        draft = parse_place(draft_device, "--draft-device")
        if draft.address is not None and draft.address == places[-1].address:
            draft = None
    stages = tuple(
        StagePlan(place, layers) for place, layers in zip(places, split_layers(num_layers, weights), strict=True)
    )
    return Plan(stages, draft, has_draft)


def parse_places(text: str) -> tuple[Place, ...]:
    """A comma starts a new worker. Raises InvalidArgument for a GPU named twice or an entry that is neither form."""
    places = tuple(parse_place(entry.strip(), "--target-devices") for entry in text.split(","))
    gpus = [name for place in places for name in (place.devices or "").split("+") if ":" in name]
    addresses = [place.address for place in places if place.address is not None]
    for name in (*gpus, *addresses):
        if (gpus + addresses).count(name) > 1:
            raise InvalidArgument(f"--target-devices names {name} twice: only cpu may repeat", field="--target-devices")
    return places


def parse_place(text: str, field: str) -> Place:
    """One worker. Raises InvalidArgument naming the field for an entry that is neither form."""
    names = text.split("+")
    if all(_DEVICE.match(name) for name in names):
        vendors = {name.partition(":")[0] for name in names}
        if len(vendors) > 1 or ("best" in vendors and len(names) > 1):
            raise InvalidArgument(
                f"{field} {text!r} joins devices of several vendors in one worker: separate them with a comma, "
                "which starts a worker each",
                field=field,
            )
        return Place(text, None)
    try:
        return Place(None, parse_address(text, field))
    except InvalidArgument:
        raise InvalidArgument(
            f"{field} {text!r} is neither a device (cpu, cuda:N, hip:N, several of one vendor joined by +) nor the "
            "address of a running worker (HOST:PORT, unix:PATH)",
            field=field,
        ) from None


def parse_weights(text: str | None, count: int) -> tuple[float, ...]:
    """Proportional weights, one a worker; equal ones by default."""
    if text is None:
        return (1.0,) * count
    field = "--target-layer-split"
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(f"{field} {text!r} must be numbers joined by commas, like 0.3,0.7", field=field) from None
    if len(weights) != count:
        raise InvalidArgument(
            f"{field} has {len(weights)} weights, --target-devices names {count} workers: give one weight each",
            field=field,
        )
    if any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise InvalidArgument(f"{field} {text!r} must hold finite numbers above 0 only", field=field)
    return weights


def split_layers(num_layers: int, weights: Sequence[float]) -> list[LayerRange]:
    """Contiguous ranges proportional to the weights, rounded, at least one layer each."""
    total, ranges, first, running = sum(weights), [], 0, 0.0
    for index, weight in enumerate(weights):
        running += weight
        behind = len(weights) - index - 1
        last = round(num_layers * running / total)
        last = min(max(last, first + 1), num_layers - behind)
        ranges.append(LayerRange(first, last))
        first = last
    return ranges
