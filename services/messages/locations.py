"""`services.messages.steps.Location` to its message and back."""

from __future__ import annotations

from flashsplit.shard.v1 import failure_pb2
from services.messages.steps import Location


def location_to_message(location: Location) -> failure_pb2.Location:
    return failure_pb2.Location(
        stage=location.stage,
        host=location.host,
        device=location.device,
        address=location.address,
    )


def location_from_message(message: failure_pb2.Location) -> Location:
    return Location(
        stage=message.stage if message.HasField("stage") else None,
        host=message.host,
        device=message.device,
        address=message.address,
    )
