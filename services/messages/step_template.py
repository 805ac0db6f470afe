"""The message of a step of which all is known but some bytes, before they are there.

Most steps follow from the one before: only the activation is new, or the tokens where the first stage embeds them. So
the sender has the message ready around a gap and puts the missing bytes in, and the receiver compares what comes with
what it expects around the gap, which takes less time than parsing it. Where a message differs, it is parsed as any
other; both sides write the same message for the same step, so that this is rare.

The gap holds the activation or, where that is large, the name under which it lies in shared memory; for a step without
an activation it holds the tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final

from flashsplit.shard.v1 import shared_memory_pb2
from services.messages.session_frames import request_to_messages
from services.messages.steps import TOKEN_BYTES, Forward, ForwardWithoutFeatures

_MARK_BYTES = 16
_TOKEN_FORMAT: Final = "I"
"""A token as it stands in a message, for `memoryview.cast`."""


@dataclass(frozen=True, slots=True)
class StepTemplate:
    """A step's message with a gap in it.

    forward: the step, with any bytes in place of the missing ones, and without features. before, after: the message's
    bytes around the gap. gap_bytes: the gap's size. features_follow: whether the step's features come in a message of
    their own. shared: whether the gap holds the name of a payload in shared memory.
    """

    forward: Forward
    before: bytes
    after: bytes
    gap_bytes: int
    features_follow: bool = False
    shared: bool = False

    @classmethod
    def of(
        cls,
        forward: Forward,
        *,
        features_follow: bool = False,
        payload: shared_memory_pb2.SharedPayload | None = None,
    ) -> StepTemplate | None:
        """Return the template of a step, None where the gap cannot be found in its message.

        forward: of the missing bytes only their number matters, and the activation's type and shape. payload: the name
        in shared memory that the activation has, or any other one, as all of them are equally long.
        """
        tensor, shared = forward.activation, payload is not None
        forward = replace(forward, features=())
        if payload is not None:
            mark = payload.SerializeToString()
            size, marked = len(mark), forward
        else:
            size = TOKEN_BYTES * len(forward.token_ids) if tensor is None else tensor.size_bytes
            mark = os.urandom(min(size, _MARK_BYTES))
            marked = _with_gap_filled(forward, memoryview(mark.ljust(size, b"\0")))
        frame = ForwardWithoutFeatures(marked) if features_follow else marked
        [message] = request_to_messages(frame, _OnePlace(payload))
        text = message.SerializeToString()
        if text.count(mark) != 1:
            return None
        first = text.index(mark)
        return cls(forward, text[:first], text[first + size :], size, features_follow, shared)

    def is_for(self, forward: Forward, *, features_follow: bool) -> bool:
        """Return whether this is the template of the session's step of that number, sent that way."""
        return (forward.step, features_follow) == (self.forward.step, self.features_follow)

    def gap(self, message: memoryview) -> memoryview | None:
        """Return the bytes in the gap where this is the expected step's message, None for any other one."""
        first, last = len(self.before), len(message) - len(self.after)
        if last - first != self.gap_bytes or message[:first] != self.before or message[last:] != self.after:
            return None
        return message[first:last]

    def filled(self, data: memoryview) -> Forward:
        """Return the step with a copy of these bytes as its activation or its tokens."""
        return _with_gap_filled(self.forward, memoryview(bytes(data)))


@dataclass(frozen=True, slots=True)
class _OnePlace:
    """A `PayloadSender` that names one place for whatever it is given, or none, and copies nothing."""

    payload: shared_memory_pb2.SharedPayload | None

    def put(self, data: memoryview) -> shared_memory_pb2.SharedPayload | None:
        return self.payload


def tokens_to_bytes(token_ids: tuple[int, ...]) -> memoryview:
    """Return the tokens as they stand in a step's message: 4 bytes each."""
    tokens = memoryview(bytearray(TOKEN_BYTES * len(token_ids))).cast(_TOKEN_FORMAT)
    for index, token in enumerate(token_ids):
        tokens[index] = token
    return tokens.cast("B")


def tokens_from_bytes(data: memoryview) -> tuple[int, ...]:
    """Return the tokens of such bytes."""
    return tuple(data.cast(_TOKEN_FORMAT))


def _with_gap_filled(forward: Forward, data: memoryview) -> Forward:
    if forward.activation is None:
        return replace(forward, token_ids=tokens_from_bytes(data))
    return replace(forward, activation=replace(forward.activation, data=data))
