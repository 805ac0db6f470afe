"""Which worker holds what: parses --target-devices, its split and --draft-device into a checked plan.

The language is lucebox's: proportional weights, rounded, at least one layer each; or the layers themselves, or "auto".
Contradictions and options without effect are refused with a sentence that says what to change.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.addresses import parse_address
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.description import Role
from services.processes.device_memory import parse_limit

AUTO = "auto"

AWAKE_THREADS = 2
"""The threads of a worker with a GPU that don't sleep: that of the device, and its event loop."""

SMT_FILE = Path("/sys/devices/system/cpu/smt/active")
"""Where Linux says whether the cores run two threads each: "1" or "0"."""

_RANGE = re.compile(r"^\s*(\d{1,9}):(\d{1,9})\s*$")
_DEVICE = re.compile(r"^(cpu|best|(cuda|hip):\d{1,3})$")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker is: a device expression to start one on, or the address of a running one.

    memory: how much of each device's memory the started one keeps to, like "8GiB"; None for all of it.
    """

    devices: str | None
    address: str | None
    memory: str | None = None

    def __str__(self) -> str:
        if self.devices is not None and self.memory is not None:
            return f"{self.devices}@{self.memory}"
        return self.devices or self.address or ""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: where its worker is, and its layers.

    host_experts: the share of each layer's routed experts, 0 to 1, that a GPU leaves to its host's memory and CPU.
    """

    place: WorkerPlace
    layers: LayerRange
    host_experts: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages in order, and the draft.

    draft: where the draft has a worker of its own; None where it is beside the last stage or there is none. has_draft:
    whether there is one. auto: the layers are to be chosen from measurements; until then they are equal shares.
    last_cut: as of `make_plan`. expert_devices: where experts are, as --expert-devices takes it; None where each
    stage's are with its other weights.
    """

    stages: tuple[StagePlan, ...]
    draft: WorkerPlace | None
    has_draft: bool
    auto: bool = False
    last_cut: int | None = None
    expert_devices: str | None = None

    @property
    def draft_beside(self) -> bool:
        """Whether the draft is in the last stage's worker."""
        return self.has_draft and self.draft is None

    @property
    def host_computing(self) -> frozenset[WorkerPlace]:
        """The places of stages whose GPUs leave experts to the host's CPU."""
        return frozenset(stage.place for stage in self.stages if stage.host_experts)

    def host_experts_of(self, layers: LayerRange) -> float:
        """Return the share of experts that a worker leaves to the host which takes over these layers: the largest of
        the stages that they belong to."""
        return max(
            (
                stage.host_experts
                for stage in self.stages
                if stage.layers.first < layers.last and layers.first < stage.layers.last
            ),
            default=0.0,
        )

    def roles(self, index: int) -> list[Role]:
        """Return the roles of the worker of a stage, or of the draft's own worker behind the stages."""
        return [Role.DRAFT] if index == len(self.stages) else self.stage_roles

    @property
    def stage_roles(self) -> list[Role]:
        """The roles of a worker that can be any stage's, the last one's too where others are lost."""
        return [Role.TARGET, *([Role.DRAFT] if self.draft_beside else [])]


def make_plan(
    *,
    target_devices: str | None,
    layer_split: str | None,
    draft_device: str | None,
    num_layers: int,
    has_draft: bool,
    target_layers: str | None = None,
    last_cut: int | None = None,
    expert_devices: str | None = None,
    has_experts: bool = True,
) -> Plan:
    """Return the plan that the options describe; each parameter is the text of the option of its name.

    last_cut: the last layer that a stage may begin with, None for any: cuts behind it are moved there. has_experts:
    whether the model is a mixture of experts.
    Raises InvalidArgument naming the option, its value and what would be accepted.
    """
    for field, value in (("--target-layer-split", layer_split), ("--target-layers", target_layers)):
        if value is not None and target_devices is None:
            raise InvalidArgument(
                f"{field} has no effect without --target-devices: name the devices, or leave it out", field=field
            )
    if layer_split is not None and target_layers is not None:
        raise InvalidArgument(
            f"--target-layers {target_layers!r} and --target-layer-split {layer_split!r} both say who holds which "
            "layers: give one of them",
            field="--target-layers",
        )
    places = parse_places(target_devices or "best")
    if len(places) > num_layers:
        raise InvalidArgument(
            f"--target-devices names {len(places)} workers, the model has {num_layers} layers: name fewer",
            field="--target-devices",
        )
    last_cut = num_layers - 1 if last_cut is None else last_cut
    if len(places) > last_cut + 1:
        raise InvalidArgument(
            f"--target-devices names {len(places)} workers, and from layer {last_cut} on the model's layers share keys "
            f"and values, so that one worker must hold them: name at most {last_cut + 1}",
            field="--target-devices",
        )
    auto = layer_split is not None and layer_split.strip() == AUTO
    if auto and len(places) == 1:
        raise InvalidArgument(
            f"--target-layer-split auto has no effect on one worker, {places[0]}: name several in --target-devices, or "
            "leave it out",
            field="--target-layer-split",
        )
    if target_layers is not None:
        ranges = parse_ranges(target_layers, len(places), num_layers)
        if ranges[-1].first > last_cut:
            raise InvalidArgument(
                f"--target-layers {target_layers!r}: layers from {last_cut} on share keys and values, so that one "
                f"worker must hold them: let the last range begin at {last_cut} or before it",
                field="--target-layers",
            )
    else:
        ranges = split_layers(num_layers, parse_weights(None if auto else layer_split, len(places)), last_cut)
    if expert_devices is not None and not has_experts:
        raise InvalidArgument(
            f"--expert-devices {expert_devices!r} has no effect on a dense model, which has no routed experts: leave "
            "it out, or name a mixture of experts with --model",
            field="--expert-devices",
        )
    shares = [0.0] * len(places) if expert_devices is None else parse_expert_devices(expert_devices, places)
    stages = tuple(StagePlan(*stage) for stage in zip(places, ranges, shares, strict=True))
    draft = _draft_place(draft_device, places[-1], has_draft=has_draft)
    return Plan(stages, draft, has_draft, auto, last_cut, expert_devices)


def _draft_place(text: str | None, last: WorkerPlace, *, has_draft: bool) -> WorkerPlace | None:
    """Return where the draft's own worker is; None where the draft is beside the last stage or there is none."""
    field = "--draft-device"
    if text is None:
        return None
    if not has_draft:
        raise InvalidArgument(
            f"{field} {text!r} has no effect without --draft: name the draft checkpoint, or leave it out", field=field
        )
    if "+" in text:
        raise InvalidArgument(f"{field} {text!r} joins devices, a draft sits on one: name that one", field=field)
    place = parse_place(text, field)
    return None if place.address is not None and place.address == last.address else place


def parse_places(text: str) -> tuple[WorkerPlace, ...]:
    """Parse the places of several workers, joined by commas.

    Raises InvalidArgument for a GPU named twice without saying how much of it each worker may use, and for an entry
    that is neither a device nor an address.
    """
    field = "--target-devices"
    places = tuple(parse_place(entry.strip(), field) for entry in text.split(","))
    gpus = [(name, place) for place in places for name in (place.devices or "").split("+") if ":" in name]
    for name, place in gpus:
        if place.memory is None and sum(other == name for other, _ in gpus) > 1:
            raise InvalidArgument(
                f"{field} names {name} twice: say how much of its memory each worker may use, like {name}@8GiB; only "
                "cpu may repeat without",
                field=field,
            )
    addresses = [place.address for place in places if place.address is not None]
    for address in addresses:
        if addresses.count(address) > 1:
            raise InvalidArgument(f"{field} names {address} twice: only cpu may repeat", field=field)
    return places


def parse_place(text: str, field: str) -> WorkerPlace:
    """Parse the place of one worker, with how much memory it may use behind an @, like "cuda:0@8GiB".

    Raises InvalidArgument for a text that is neither a device nor an address, and for a size that is none.
    """
    devices, at, memory = text.partition("@")
    names = devices.split("+")
    if all(_DEVICE.match(name) for name in names):
        vendors = {name.partition(":")[0] for name in names}
        if len(vendors) > 1 or ("best" in vendors and len(names) > 1):
            raise InvalidArgument(
                f"{field} {text!r} joins devices of several vendors in one worker: separate them with a comma, "
                "which starts a worker each",
                field=field,
            )
        if at:
            for name in names:
                parse_limit(memory, name, f"{field} {text}: the size")
        return WorkerPlace(devices, None, memory if at else None)
    try:
        return WorkerPlace(None, parse_address(text, field))
    except InvalidArgument:
        raise InvalidArgument(
            f"{field} {text!r} is neither a device (cpu, cuda:N, hip:N, several of one vendor joined by +, with "
            "@SIZE for a part of its memory) nor the address of a running worker (HOST:PORT, unix:PATH)",
            field=field,
        ) from None


def parse_weights(text: str | None, count: int) -> tuple[float, ...]:
    """Return proportional weights, one a worker; equal ones where there is no text. Raises InvalidArgument."""
    if text is None:
        return (1.0,) * count
    field = "--target-layer-split"
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(
            f"{field} {text!r} must be numbers joined by commas, like 0.3,0.7, or auto", field=field
        ) from None
    if len(weights) != count:
        raise InvalidArgument(
            f"{field} has {len(weights)} weights, --target-devices names {count} workers: give one weight each",
            field=field,
        )
    if any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise InvalidArgument(f"{field} {text!r} must hold finite numbers above 0 only", field=field)
    return weights


def parse_expert_devices(text: str, places: Sequence[WorkerPlace]) -> list[float]:
    """Return for each of the stages' places the share of its experts, 0 to 1, that its host holds and computes.

    text: "cpu" for all of them at every place, or proportional weights of places and of the host, like
    "cuda:0=0.4,cpu=0.6"; places that it does not name keep all of theirs. Raises InvalidArgument.
    """
    field = "--expert-devices"
    if text.strip() == "cpu":
        return [1.0] * len(places)
    accepted = "write cpu for all experts, or a share for a device and one for the CPU, like cuda:0=0.4,cpu=0.6"
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, equals, number = (part.strip() for part in entry.rpartition("="))
        try:
            weight = float(number) if equals else math.nan
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or weight <= 0:
            raise InvalidArgument(
                f"{field} {text!r}: {entry.strip()!r} is no device with a finite share above 0; {accepted}", field=field
            )
        if name in weights:
            raise InvalidArgument(f"{field} {text!r} names {name} twice: name each device once", field=field)
        weights[name] = weight
    of_host = weights.pop("cpu", None)
    if of_host is None or not weights:
        missing = "cpu, where the others are to be" if of_host is None else "the device that keeps the others"
        raise InvalidArgument(f"{field} {text!r} does not name {missing}; {accepted}", field=field)
    names = [{str(place), place.devices or str(place)} for place in places]
    for name in weights:
        if not any(name in own for own in names):
            known = ", ".join(dict.fromkeys(place.devices or str(place) for place in places))
            raise InvalidArgument(
                f"{field} {text!r}: {name} is none of the workers of --target-devices: name one of {known}, or name it "
                "there",
                field=field,
            )
    kept = [next((weights[name] for name in own if name in weights), None) for own in names]
    return [0.0 if weight is None else of_host / (of_host + weight) for weight in kept]


def parse_ranges(text: str, count: int, num_layers: int) -> list[LayerRange]:
    """Return half-open ranges, one a worker, that hold every layer once and in order. Raises InvalidArgument."""
    field, ranges = "--target-layers", []
    for part in text.split(","):
        match = _RANGE.match(part)
        if match is None:
            raise InvalidArgument(
                f"{field} {text!r}: {part!r} is no range; write FIRST:BEHIND for each worker, like 0:5,5:{num_layers}",
                field=field,
            )
        ranges.append(LayerRange(int(match[1]), int(match[2])))
    if len(ranges) != count:
        raise InvalidArgument(
            f"{field} {text!r} has {len(ranges)} ranges, --target-devices names {count} workers: give one range each",
            field=field,
        )
    expected = 0
    for layers in ranges:
        written = f"{layers.first}:{layers.last}"
        if layers.first >= layers.last:
            raise InvalidArgument(
                f"{field} {text!r}: {written} holds no layer; the number behind the colon is the first layer that the "
                "worker does not hold and must be above the one before it",
                field=field,
            )
        if layers.first != expected:
            fault = "leaves out" if layers.first > expected else "repeats"
            low, high = sorted((expected, layers.first))
            raise InvalidArgument(
                f"{field} {text!r}: {written} {fault} layers {low}:{high}; begin it at {expected}", field=field
            )
        expected = layers.last
    if expected != num_layers:
        raise InvalidArgument(
            f"{field} {text!r} ends at layer {expected}, the model has {num_layers}: end it at {num_layers}",
            field=field,
        )
    return ranges


def split_layers(num_layers: int, weights: Sequence[float], last_cut: int | None = None) -> list[LayerRange]:
    """Return contiguous ranges of layers, proportional to the weights, rounded, of at least one layer each.

    last_cut: as of `make_plan`.
    """
    most = num_layers - 1 if last_cut is None else last_cut
    total, ranges, first, running = sum(weights), [], 0, 0.0
    for index, weight in enumerate(weights):
        running += weight
        behind = len(weights) - index - 1
        last = round(num_layers * running / total)
        last = min(max(last, first + 1), most + 1 - behind) if behind else num_layers
        ranges.append(LayerRange(first, last))
        first = last
    return ranges


def threads_each(places: Sequence[WorkerPlace], host_computing: Collection[WorkerPlace] = ()) -> int | None:
    """Return how many CPU threads each local worker should have; None, torch's default, for a single worker and where
    no CPU computes. host_computing: as of `Plan`.

    The workers share this host's cores, of which those with GPUs keep some busy; with more threads than cores each
    layer would wait for the slowest thread.
    """
    local = [place for place in places if place.devices is not None]
    cpu_workers = sum(1 for place in local if "cpu" in str(place.devices) or place in host_computing)
    if not cpu_workers or len(local) == 1:
        return None
    cores, gpu_workers = len(os.sched_getaffinity(0)), len(local) - cpu_workers
    if gpu_workers:
        cores = cores // _threads_of_a_core() - AWAKE_THREADS * gpu_workers
    return max(1, cores // cpu_workers)


def _threads_of_a_core() -> int:
    with contextlib.suppress(OSError):
        return 2 if SMT_FILE.read_text().strip() == "1" else 1
    return 1
