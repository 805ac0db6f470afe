"""Typed frames from the messages of a stream: which frames it may carry, and tensors that come in pieces put together.

Every stream of frames is read by a `FrameReader`, whether its messages come through gRPC, a frame socket or a step
socket. This module must not know what a frame means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.errors import InvalidArgument
from services.messages.tensors import IncomingTensor, TensorAssembler
from services.same_host.link import NO_LINKS, PayloadReader

FrameT = TypeVar("FrameT")
FrameT_co = TypeVar("FrameT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class TensorLimits:
    """What the frames of a stream may announce: the largest tensor in bytes, and the most feature slices of a frame."""

    max_tensor_bytes: int = 0
    max_feature_slices: int = 0


NO_TENSORS = TensorLimits()
"""For streams whose frames have no tensors."""


@dataclass(frozen=True, slots=True)
class FrameKind(Generic[FrameT_co]):
    """How one kind of frame is read.

    from_message: makes the frame of its message and of its whole tensors, as further arguments. tensors: returns the
    tensors that a message announces, in field order, or refuses them with InvalidArgument; None for a kind that has
    none.
    """

    from_message: Callable[..., FrameT_co]
    tensors: Callable[[Any, TensorLimits, PayloadReader], list[IncomingTensor]] | None = None


FrameKinds = Mapping[str, FrameKind[FrameT]]
"""The frames that a stream may carry, by their field in the message's `oneof frame`."""


class FrameReader(Generic[FrameT]):
    """Makes typed frames of one stream's messages, in their order."""

    def __init__(
        self,
        kinds: FrameKinds[FrameT],
        limits: TensorLimits = NO_TENSORS,
        payloads: PayloadReader = NO_LINKS,
    ) -> None:
        """payloads: reads what messages refer to in shared memory."""
        self._kinds, self._limits, self._payloads = kinds, limits, payloads
        self._unfinished: tuple[FrameKind[FrameT], Any, TensorAssembler] | None = None

    @property
    def unfinished(self) -> bool:
        """Whether the stream is in the midst of a frame: pieces of its tensors are still to come."""
        return self._unfinished is not None

    def read(self, message: Any) -> FrameT | None:
        """Return the frame that this message completes, None where pieces of its tensors are still to come.

        Raises InvalidArgument for a frame that the stream may not carry, for tensors beyond the limits, and for a piece
        that is out of order or missing.
        """
        name = message.WhichOneof("frame")
        kind: FrameKind[FrameT] | None
        if self._unfinished is not None:
            kind, body, assembler = self._unfinished
            if name != "chunk":
                raise InvalidArgument("the pieces of a tensor are missing: expected a chunk", field="frame")
            assembler.add(message.chunk)
        else:
            kind = self._kinds.get(name)
            if kind is None:
                raise InvalidArgument(f"frame {name} is not expected here", field="frame")
            body = getattr(message, name)
            if kind.tensors is None:
                return kind.from_message(body)
            incoming = kind.tensors(body, self._limits, self._payloads)
            # Most tensors come whole, and need nothing that puts them together.
            whole = [tensor.tensor() for tensor in incoming if tensor.complete]
            if len(whole) == len(incoming):
                return kind.from_message(body, *whole)
            assembler = TensorAssembler(incoming, self._payloads)
        if not assembler.complete:
            self._unfinished = kind, body, assembler
            return None
        self._unfinished = None
        return kind.from_message(body, *assembler.tensors())
