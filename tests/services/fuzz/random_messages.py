"""Protobuf messages with random and extreme values, built field by field from their descriptors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = [0, 1, 2, 3, 5, 16, 64, 65, 4096, 8193, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]
FLOATS = [0.0, -0.0, 1e-45, 1e-30, 0.5, 1.0, 2.0, -1.0, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "x", "ü\n", "\0", "../../etc", "unix:/no/such.sock", "unix:", "127.0.0.1:1", "host", "x" * 70_000]
SIZES = [0, 1, 3, 4, 16, 128, 256, 1024, 100_000]
MAX_DEPTH = 6
"""Of messages within messages; some hold their own kind."""

Field = FieldDescriptor
RANGES: Mapping[int, tuple[int, int]] = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
    Field.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


class RandomMessages:
    """Fills and changes messages. hints: field name -> values that get past the first checks."""

    def __init__(self, rng: random.Random, hints: Mapping[str, Sequence[Any]]) -> None:
        self._rng, self._hints = rng, hints

    def fill(self, message: Message, depth: int = 0) -> Any:
        """Set a random selection of fields, of one-ofs too."""
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < 0.7:
                self._set(message, field, depth)
        return message

    def change(self, message: Message) -> None:
        """Change one random field, here or in a message within."""
        field = self._rng.choice(message.DESCRIPTOR.fields)
        inner = self._messages(message, field)
        if inner and self._rng.random() < 0.8:
            self.change(self._rng.choice(inner))
            return
        if self._rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            self._set(message, field, 1)

    @staticmethod
    def _messages(message: Message, field: Field) -> list[Message]:
        if field.cpp_type != Field.CPPTYPE_MESSAGE or is_map(field):
            return []
        if field.is_repeated:
            return list(getattr(message, field.name))
        return [getattr(message, field.name)] if message.HasField(field.name) else []

    def _set(self, message: Message, field: Field, depth: int) -> None:
        rng, value = self._rng, getattr(message, field.name)
        if is_map(field):
            kinds = field.message_type.fields_by_name
            for _ in range(rng.choice([1, 3, 40])):
                key = self._scalar(kinds["key"])
                if kinds["value"].cpp_type != Field.CPPTYPE_MESSAGE:
                    value[key] = self._scalar(kinds["value"])
                elif depth < MAX_DEPTH:
                    self.fill(value[key], depth + 1)
        elif field.is_repeated:
            count = rng.choice([0, 1, 2, 4, 20])
            message.ClearField(field.name)
            for _ in range(count if depth < 4 else 0):
                if field.cpp_type == Field.CPPTYPE_MESSAGE:
                    self.fill(getattr(message, field.name).add(), depth + 1)
                else:
                    getattr(message, field.name).append(self._scalar(field))
        elif field.cpp_type == Field.CPPTYPE_MESSAGE:
            value.SetInParent()
            if depth < MAX_DEPTH:
                self.fill(value, depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: Field) -> Any:
        rng = self._rng
        if field.name in self._hints and rng.random() < 0.6:
            return rng.choice(self._hints[field.name])
        if field.cpp_type in RANGES:
            low, high = RANGES[field.cpp_type]
            value = rng.choice([rng.randrange(8), rng.choice(INTEGERS), -rng.choice(INTEGERS)])
            return value if low <= value <= high else rng.choice([low, high])
        if field.cpp_type in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
            return rng.choice(FLOATS)
        if field.cpp_type == Field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if field.type == Field.TYPE_BYTES:
            return rng.randbytes(rng.choice(SIZES))
        return rng.choice(TEXTS)


def is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


class RandomStreams:
    """Whole streams of request bytes: valid ones with a few things wrong, senseless ones, and noise."""

    def __init__(self, seed: str, kind: type[Message], hints: Mapping[str, Sequence[Any]]) -> None:
        self._rng, self._kind = random.Random(seed), kind
        self._messages = RandomMessages(self._rng, hints)

    def one(self, valid: Sequence[Message]) -> list[bytes]:
        """The frames of a stream, made from a valid one or from nothing."""
        rng, frames = self._rng, []
        for frame in valid:
            frames.append(self._kind())
            frames[-1].CopyFrom(frame)
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(len(frames) + 1)
            match rng.randrange(8):
                case 0:
                    frames.insert(at, self._messages.fill(self._kind()))
                case 1:
                    frames[at:] = [self._messages.fill(self._kind()) for _ in range(rng.randrange(4))]
                case 2 if frames:
                    frames.insert(at, rng.choice(frames))
                case 3 if frames:
                    del frames[rng.randrange(len(frames))]
                case 4 if frames:
                    rng.shuffle(frames)
                case _ if frames:
                    for _ in range(rng.choice([1, 1, 2, 4])):
                        self._messages.change(rng.choice(frames))
        raw = [frame.SerializeToString() for frame in frames]
        if rng.random() < 0.15:
            raw.insert(rng.randrange(len(raw) + 1), rng.randbytes(rng.choice(SIZES)))
        if raw and rng.random() < 0.1:
            at = rng.randrange(len(raw))
            raw[at] = self._damaged(raw[at])
        return raw

    def _damaged(self, raw: bytes) -> bytes:
        if not raw:
            return b"\xff"
        at = self._rng.randrange(len(raw))
        return raw[:at] if self._rng.random() < 0.5 else raw[:at] + self._rng.randbytes(1) + raw[at + 1 :]
