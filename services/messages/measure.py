"""How fast a worker's devices and the way to it are: frozen dataclasses, and their protobuf form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flashsplit.shard.v1 import measure_pb2 as pb
from services.dtypes import WEIGHT_DTYPES
from services.errors import InvalidArgument
from services.messages.tensors import dtype_name, dtype_number

ECHO_BYTES = 1 << 20
"""Most bytes of one echo: larger payloads travel in pieces of this size anyway."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What to measure for. resident_bytes: about how many bytes of weights each device would hold. stages: of how
    many it would be one, so that it rests between its steps while the others compute."""

    model_path: str
    dtype: str
    resident_bytes: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """One device, measured. Bytes, bytes a second, operations a second; times in seconds at one row.

    layer_s: by kind of layer, what one costs beside reading its weights. step_s: what a step costs once. choose_s: what
    choosing a token costs on the last stage.
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
    """Of a large copy on the device, what is read and what is written: the floor of what reads memory."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The way to a worker. round_trip_s: a row there and its answer back. bytes_per_s: of what is large, one way."""

    round_trip_s: float
    bytes_per_s: float


def request_to_message(wanted: MeasureRequest) -> pb.MeasureRequest:
    return pb.MeasureRequest(
        model_path=wanted.model_path,
        dtype=dtype_number(wanted.dtype),
        resident_bytes=wanted.resident_bytes,
        stages=wanted.stages,
    )


def request_from_message(message: pb.MeasureRequest) -> MeasureRequest:
    """Raises InvalidArgument without an element type that weights can have."""
    dtype = dtype_name(message.dtype)
    if dtype not in WEIGHT_DTYPES:
        raise InvalidArgument(f"dtype is {dtype or 'missing'}: name one of {', '.join(WEIGHT_DTYPES)}", field="dtype")
    return MeasureRequest(message.model_path, dtype, message.resident_bytes, max(message.stages, 1))


def speed_to_message(speed: DeviceSpeed) -> pb.DeviceSpeed:
    message = pb.DeviceSpeed(
        name=speed.name,
        total_bytes=speed.total_bytes,
        free_bytes=speed.free_bytes,
        read_bytes_per_s=speed.read_bytes_per_s,
        matmul_flops_per_s=speed.matmul_flops_per_s,
        step_nanoseconds=round(speed.step_s * 1e9),
        choose_nanoseconds=round(speed.choose_s * 1e9),
        copy_bytes_per_s=speed.copy_bytes_per_s,
    )
    for kind, seconds in speed.layer_s.items():
        message.layers.add(kind=kind, nanoseconds=round(seconds * 1e9))
    return message


def speed_from_message(message: pb.DeviceSpeed) -> DeviceSpeed:
    """Raises InvalidArgument for a rate that is none."""
    for field in ("read_bytes_per_s", "matmul_flops_per_s"):
        rate = getattr(message, field)
        if not math.isfinite(rate) or rate <= 0:
            raise InvalidArgument(f"{field} of {message.name} is {rate}; it must be finite and above 0", field=field)
    return DeviceSpeed(
        name=message.name,
        total_bytes=message.total_bytes,
        free_bytes=message.free_bytes,
        read_bytes_per_s=message.read_bytes_per_s,
        matmul_flops_per_s=message.matmul_flops_per_s,
        layer_s={layer.kind: layer.nanoseconds / 1e9 for layer in message.layers},
        step_s=message.step_nanoseconds / 1e9,
        choose_s=message.choose_nanoseconds / 1e9,
        copy_bytes_per_s=message.copy_bytes_per_s,
    )
