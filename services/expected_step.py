"""A step that is known but for its activation, before it comes: its packet is recognised instead of parsed.

The other side writes the same message for the same step. Where it does not, the step is parsed as any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from services import stage_frames as frames
from services.steps import Forward
from services.tensors import ITEM_BYTES, WireTensor

_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """before, behind: what stands around the activation's bytes in the packet."""

    forward: Forward
    dtype: str
    shape: tuple[int, ...]
    before: bytes
    behind: bytes

    @classmethod
    def of(cls, forward: Forward, dtype: str, rows: int, hidden_size: int) -> ExpectedStep | None:
        """None where the activation is too small to be found. dtype: of the activation, [rows, hidden_size]."""
        size = rows * hidden_size * ITEM_BYTES[dtype]
        mark = os.urandom(_MARK_BYTES)
        if size < _MARK_BYTES:
            return None
        tensor = WireTensor(dtype, (rows, hidden_size), mark.ljust(size, b"\0"))
        [message] = frames.forward_to_messages(replace(forward, activation=tensor))
        packet = message.SerializeToString()
        first = packet.index(mark)
        return cls(forward, dtype, tensor.shape, packet[:first], packet[first + size :])

    def read(self, packet: memoryview) -> Forward | None:
        """The step with the activation of this packet; None for another step."""
        first, last = len(self.before), len(packet) - len(self.behind)
        if packet[:first] != self.before or packet[last:] != self.behind:
            return None
        tensor = WireTensor(self.dtype, self.shape, bytes(packet[first:last]))
        if len(tensor.data) != tensor.size_bytes:
            return None
        return replace(self.forward, activation=tensor)
