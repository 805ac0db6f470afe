"""How fast a worker's devices and the way to them are: frozen dataclasses, and their protobuf form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashsplit.shard.v1 import measure_pb2 as pb
from services.dtypes import WEIGHT_DTYPES
from services.errors import InvalidArgument
from services.messages.tensors import dtype_name, dtype_number

ECHO_BYTES = 1 << 20
"""The most bytes of one echo: larger payloads travel in pieces of this size anyway."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """The model to measure devices for.

    resident_bytes: about how many bytes of weights each device would hold. stages: the number of stages that the model
    would be split into, as a device rests between its steps while the others compute.
    """

    model_path: str
    dtype: str
    resident_bytes: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """The speed of routed experts on a host's CPU, beside a GPU that has all else of their layers, for steps of one
    row; times in seconds.

    total_bytes, free_bytes: the host's memory. read_bytes_per_s: how fast products with experts read them there.
    layer_s: as of `DeviceSpeed`, with the operators of both and the row's way to the host and back. copy_bytes_per_s:
    as of `DeviceSpeed`.
    """

    total_bytes: int
    free_bytes: int
    read_bytes_per_s: float
    layer_s: Mapping[str, float]
    copy_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of one device, for steps of one row; times in seconds.

    read_bytes_per_s: how fast a step reads weights. matmul_flops_per_s: operations a second of a large product.
    layer_s: what a layer of each kind costs beside reading its weights. step_s: what a step costs once. choose_s: what
    choosing a token costs on the last stage. copy_bytes_per_s: the rate of a large copy on the device, reading and
    writing counted, which no step can read faster than; 0 where it was not measured. limited: whether the worker keeps
    to a part of the device's memory, of which no other worker takes anything. host: of a GPU, for a model with routed
    experts, how fast these are in the host's memory.
    """

    name: str
    total_bytes: int
    free_bytes: int
    read_bytes_per_s: float
    matmul_flops_per_s: float
    layer_s: Mapping[str, float]
    step_s: float
    choose_s: float
    copy_bytes_per_s: float = 0.0
    limited: bool = False
    host: HostSpeed | None = None


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of the way to a worker.

    round_trip_s: the time of a row on its way there and of its answer back. bytes_per_s: the rate of large payloads,
    one way.
    """

    round_trip_s: float
    bytes_per_s: float


def request_to_message(request: MeasureRequest) -> pb.MeasureRequest:
    """Return the request's message."""
    return pb.MeasureRequest(
        model_path=request.model_path,
        dtype=dtype_number(request.dtype),
        resident_bytes=request.resident_bytes,
        stages=request.stages,
    )


def request_from_message(message: pb.MeasureRequest) -> MeasureRequest:
    """Return the request. Raises InvalidArgument where it names no element type that weights can have."""
    dtype = dtype_name(message.dtype)
    if dtype not in WEIGHT_DTYPES:
        raise InvalidArgument(f"dtype is {dtype or 'missing'}: name one of {', '.join(WEIGHT_DTYPES)}", field="dtype")
    return MeasureRequest(message.model_path, dtype, message.resident_bytes, max(message.stages, 1))


def speed_to_message(speed: DeviceSpeed) -> pb.DeviceSpeed:
    """Return the device's message."""
    message = pb.DeviceSpeed(
        name=speed.name,
        total_bytes=speed.total_bytes,
        free_bytes=speed.free_bytes,
        read_bytes_per_s=speed.read_bytes_per_s,
        matmul_flops_per_s=speed.matmul_flops_per_s,
        step_nanoseconds=round(speed.step_s * 1e9),
        choose_nanoseconds=round(speed.choose_s * 1e9),
        copy_bytes_per_s=speed.copy_bytes_per_s,
        limited=speed.limited,
    )
    message.layers.extend(_costs(speed.layer_s))
    if (host := speed.host) is not None:
        message.host.CopyFrom(
            pb.HostSpeed(
                total_bytes=host.total_bytes,
                free_bytes=host.free_bytes,
                read_bytes_per_s=host.read_bytes_per_s,
                layers=_costs(host.layer_s),
                copy_bytes_per_s=host.copy_bytes_per_s,
            )
        )
    return message


def speed_from_message(message: pb.DeviceSpeed) -> DeviceSpeed:
    """Return the device's speed. Raises InvalidArgument for a rate that is not finite and above 0."""
    for field in ("read_bytes_per_s", "matmul_flops_per_s"):
        _check_rate(getattr(message, field), field, message.name)
    return DeviceSpeed(
        name=message.name,
        total_bytes=message.total_bytes,
        free_bytes=message.free_bytes,
        read_bytes_per_s=message.read_bytes_per_s,
        matmul_flops_per_s=message.matmul_flops_per_s,
        layer_s=_seconds(message.layers),
        step_s=message.step_nanoseconds / 1e9,
        choose_s=message.choose_nanoseconds / 1e9,
        copy_bytes_per_s=message.copy_bytes_per_s,
        limited=message.limited,
        host=_host_from_message(message) if message.HasField("host") else None,
    )


def _host_from_message(message: pb.DeviceSpeed) -> HostSpeed:
    host = message.host
    _check_rate(host.read_bytes_per_s, "host.read_bytes_per_s", message.name)
    return HostSpeed(
        host.total_bytes, host.free_bytes, host.read_bytes_per_s, _seconds(host.layers), host.copy_bytes_per_s
    )


def _check_rate(rate: float, field: str, device: str) -> None:
    if not math.isfinite(rate) or rate <= 0:
        raise InvalidArgument(f"{field} of {device} is {rate}; it must be finite and above 0", field=field)


def _costs(layer_s: Mapping[str, float]) -> list[pb.LayerCost]:
    return [pb.LayerCost(kind=kind, nanoseconds=round(seconds * 1e9)) for kind, seconds in layer_s.items()]


def _seconds(costs: Iterable[pb.LayerCost]) -> dict[str, float]:
    return {cost.kind: cost.nanoseconds / 1e9 for cost in costs}
