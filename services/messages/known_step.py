"""A step of which all is known but some bytes, before they are there: who sends it has its message ready, and who
expects it recognises the message instead of parsing it.

The bytes are those of its activation or, where that is large, the name under which it lies in shared memory; of its
tokens where it has none. Both sides write the same message for the same step; where they do not, it is parsed as any
other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final

from flashsplit.shard.v1 import shared_memory_pb2
from services.messages import session_frames as frames
from services.messages.steps import Forward

_MARK_BYTES = 16
_TOKEN: Final = "I"
"""As tokens stand in a message, for `memoryview.cast`."""


@dataclass(frozen=True, slots=True)
class KnownStep:
    """before, behind: what stands around the unknown bytes in the message. forward: with others in their place, and
    without features, which follow where it says so. shared: the unknown bytes name a payload of the activation's."""

    forward: Forward
    before: bytes
    behind: bytes
    size: int
    features_follow: bool = False
    shared: bool = False

    @classmethod
    def of(
        cls,
        forward: Forward,
        *,
        features_follow: bool = False,
        payload: shared_memory_pb2.SharedPayload | None = None,
    ) -> KnownStep | None:
        """None where the bytes could not be found. forward: what its unknown bytes are does not matter, but for the
        number of tokens and the activation's type and shape. payload: where the activation lies, or may lie."""
        tensor, shared = forward.activation, payload is not None
        forward = replace(forward, features=())
        if payload is not None:
            mark = payload.SerializeToString()
            size, marked = len(mark), forward
        else:
            size = 4 * len(forward.token_ids) if tensor is None else tensor.size_bytes
            mark = os.urandom(min(size, _MARK_BYTES))
            marked = _with(forward, memoryview(mark.ljust(size, b"\0")))
        [message] = frames.forward_to_messages(marked, _Named(payload), features=not features_follow)
        text = message.SerializeToString()
        if text.count(mark) != 1:
            return None
        first = text.index(mark)
        return cls(forward, text[:first], text[first + size :], size, features_follow, shared)

    def is_for(self, forward: Forward, *, features_follow: bool) -> bool:
        """Whether this is the session's step of that number, sent that way."""
        return (forward.step, features_follow) == (self.forward.step, self.features_follow)

    def read(self, message: memoryview) -> memoryview | None:
        """The unknown bytes in this step's message; None in another one."""
        first, last = len(self.before), len(message) - len(self.behind)
        if last - first != self.size or message[:first] != self.before or message[last:] != self.behind:
            return None
        return message[first:last]

    def whole(self, data: memoryview) -> Forward:
        """The step with these bytes of its activation or tokens, of which it keeps a copy."""
        return _with(self.forward, memoryview(bytes(data)))


@dataclass(frozen=True, slots=True)
class _Named:
    """Puts all in one place, or nothing anywhere."""

    payload: shared_memory_pb2.SharedPayload | None

    def put(self, data: memoryview) -> shared_memory_pb2.SharedPayload | None:
        return self.payload


def token_bytes(token_ids: tuple[int, ...]) -> memoryview:
    """As they stand in a message."""
    tokens = memoryview(bytearray(4 * len(token_ids))).cast(_TOKEN)
    for index, token in enumerate(token_ids):
        tokens[index] = token
    return tokens.cast("B")


def tokens_of(data: memoryview) -> tuple[int, ...]:
    """Of such bytes."""
    return tuple(data.cast(_TOKEN))


def _with(forward: Forward, data: memoryview) -> Forward:
    if forward.activation is None:
        return replace(forward, token_ids=tokens_of(data))
    return replace(forward, activation=replace(forward.activation, data=data))
