"""How matrices are packed while a checkpoint is loaded, as a message and back."""

from __future__ import annotations

from google.protobuf.message import Message

from flashsplit.shard.v1 import model_pb2
from services.messages.enums import EnumNumbers
from services.model.quantization import Quantization, QuantizedTo

_TYPES = EnumNumbers(
    {
        QuantizedTo.INT8: model_pb2.QUANTIZATION_TYPE_INT8,
        QuantizedTo.INT4: model_pb2.QUANTIZATION_TYPE_INT4,
        QuantizedTo.FP8: model_pb2.QUANTIZATION_TYPE_FP8,
    }
)


def quantization_to_message(quantization: Quantization | None) -> model_pb2.Quantization | None:
    """Return the message, None for none."""
    if quantization is None:
        return None
    return model_pb2.Quantization(type=_TYPES.number(quantization.to), ends=quantization.ends)


def quantization_from_message(message: Message, name: str = "quantization") -> Quantization | None:
    """Return what a field of a message asks for, None where it is absent.

    Raises InvalidArgument for a type that this version doesn't know.
    """
    if not message.HasField(name):
        return None
    found = getattr(message, name)
    return Quantization(_TYPES.value(found.type, f"{name}.type"), found.ends)
