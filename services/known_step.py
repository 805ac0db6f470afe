"""A step that is known but for its activation's bytes, before they are there: who sends it has its message ready, and
who expects it recognises the message instead of parsing it.

Both sides write the same message for the same step. Where they do not, the step is parsed as any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from services import stage_frames as frames
from services.steps import Forward
from services.tensors import WireTensor

_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class KnownStep:
    """before, behind: what stands around the activation's bytes in the message."""

    forward: Forward
    activation: WireTensor
    before: bytes
    behind: bytes

    @classmethod
    def of(cls, forward: Forward, dtype: str, shape: tuple[int, ...]) -> KnownStep | None:
        """None where the activation is too small to be found. forward: without features, and without its activation,
        which has that element type and shape."""
        empty = WireTensor(dtype, shape, b"")
        if empty.size_bytes < _MARK_BYTES:
            return None
        mark = os.urandom(_MARK_BYTES)
        marked = replace(empty, data=mark.ljust(empty.size_bytes, b"\0"))
        [message] = frames.forward_to_messages(replace(forward, activation=marked))
        text = message.SerializeToString()
        first = text.index(mark)
        return cls(forward, empty, text[:first], text[first + empty.size_bytes :])

    def read(self, message: memoryview) -> Forward | None:
        """The step with the activation in this message, which it does not copy; None of another step's."""
        first, last = len(self.before), len(message) - len(self.behind)
        if last - first != self.activation.size_bytes:
            return None
        if message[:first] != self.before or message[last:] != self.behind:
            return None
        return replace(self.forward, activation=replace(self.activation, data=message[first:last]))
