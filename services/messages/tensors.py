"""Tensors on the wire: from protobuf to a checked run of bytes and back, in pieces where they are large.

This module knows element types and sizes; it must not know torch or what the numbers mean. Remote sizes are checked
here, before anything is allocated for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from flashsplit.shard.v1 import tensor_pb2
from services.dtypes import FLOAT8, ITEM_BYTES
from services.errors import InvalidArgument
from services.records import record
from services.same_host.link import NO_LINKS, PIECE_BYTES, RING_BYTES, PayloadReader, PayloadSender

CHUNK_BYTES = 1 << 20
"""The size of the pieces into which larger tensors are cut: larger messages travel 2 to 4 times slower."""

MAX_RANK = 4

_DTYPE_NUMBERS = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "int32": tensor_pb2.DTYPE_INT32,
    FLOAT8: tensor_pb2.DTYPE_FLOAT8_E4M3FN,
}
_DTYPE_NAMES: Mapping[int, str] = {number: name for name, number in _DTYPE_NUMBERS.items()}


@record(frozen=True, slots=True)
class WireTensor:
    """A dense tensor as bytes: row-major, little-endian.

    dtype: "float32", "bfloat16", "float16", "int32" or "float8_e4m3fn".
    data: exactly `prod(shape) * itemsize` bytes; any object with the buffer protocol.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def dtype_number(name: str | None) -> tensor_pb2.Dtype:
    """Return the enum number of an element type; None is unspecified."""
    return tensor_pb2.DTYPE_UNSPECIFIED if name is None else _DTYPE_NUMBERS[name]


def dtype_name(number: int, field: str = "dtype") -> str | None:
    """Return the element type of an enum number, None for unspecified. Raises InvalidArgument for an unknown one."""
    if number == tensor_pb2.DTYPE_UNSPECIFIED:
        return None
    if number not in _DTYPE_NAMES:
        known = ", ".join(f"{known} ({name})" for known, name in _DTYPE_NAMES.items())
        raise InvalidArgument(f"{field} is {number}, not one of {known}", field=field)
    return _DTYPE_NAMES[number]


def kv_dtype_name(number: int, field: str = "kv_dtype") -> str | None:
    """Return the element type of attention keys and values, None for that of the weights.

    Raises InvalidArgument for a type that they cannot have.
    """
    if number not in (tensor_pb2.DTYPE_UNSPECIFIED, tensor_pb2.DTYPE_FLOAT8_E4M3FN):
        raise InvalidArgument(
            f"{field} is {number}, not one of {tensor_pb2.DTYPE_UNSPECIFIED} (that of the weights), "
            f"{tensor_pb2.DTYPE_FLOAT8_E4M3FN} ({FLOAT8})",
            field=field,
        )
    return dtype_name(number, field)


class OutgoingTensors:
    """Spreads the tensors of one frame over the frame itself, the chunks behind it, and shared memory.

    What goes into the frame takes at most CHUNK_BYTES in all, so that its size does not grow with the number of
    tensors.
    """

    def __init__(self, sender: PayloadSender | None = None) -> None:
        """sender: puts large tensors into memory that the other side shares; None where there is none."""
        self._sender = sender
        self._room = CHUNK_BYTES
        self._begun: list[tuple[memoryview, int]] = []

    def put(self, tensor: WireTensor, message: tensor_pb2.Tensor) -> None:
        """Write a tensor into the frame: all of it, or as much as there is still room for.

        Call it for a frame's tensors in field order, as chunks name a tensor by its place in that order.
        """
        whole = memoryview(tensor.data).cast("B")
        message.dtype = _DTYPE_NUMBERS[tensor.dtype]
        message.shape.extend(tensor.shape)
        first = self._share(whole, 0, message)
        if not first:
            first = min(len(whole), self._room)
            self._room -= first
            message.data = bytes(whole[:first])
        self._begun.append((whole, first))

    def chunks(self) -> Iterator[tensor_pb2.TensorChunk]:
        """Yield what must follow the frame; each chunk is copied out of its tensor only when it is asked for."""
        for index, (whole, sent) in enumerate(self._begun):
            while sent < len(whole):
                chunk = tensor_pb2.TensorChunk(tensor_index=index, offset=sent)
                size = self._share(whole, sent, chunk)
                if not size:
                    chunk.data = bytes(whole[sent : sent + CHUNK_BYTES])
                    size = len(chunk.data)
                sent += size
                yield chunk

    def _share(self, whole: memoryview, offset: int, message: tensor_pb2.Tensor | tensor_pb2.TensorChunk) -> int:
        """Put the next piece into shared memory and return its size, 0 where it should go within the message."""
        if self._sender is None:
            return 0
        piece = whole[offset : offset + PIECE_BYTES]
        payload = self._sender.put(piece)
        if payload is None:
            return 0
        message.shared.CopyFrom(payload)
        return len(piece)


def incomplete(
    message: tensor_pb2.Tensor, field: str, max_bytes: int, links: PayloadReader = NO_LINKS
) -> IncomingTensor:
    """Return the tensor that a message announces, with the piece that the message brings.

    field: the tensor's name in error messages. max_bytes: the largest tensor to accept. links: reads a piece that lies
    in shared memory. Raises InvalidArgument when type, shape or size is not acceptable.
    """
    dtype = dtype_name(message.dtype, f"{field}.dtype")
    if dtype is None:
        raise InvalidArgument(f"{field}.dtype is missing", field=f"{field}.dtype")
    if len(message.shape) > MAX_RANK:
        raise InvalidArgument(
            f"{field}.shape has {len(message.shape)} extents, at most {MAX_RANK} are accepted", field=f"{field}.shape"
        )
    shape = tuple(message.shape)
    if any(extent < 0 for extent in shape):
        raise InvalidArgument(f"{field}.shape is {list(shape)}: no extent may be negative", field=f"{field}.shape")
    total = math.prod(shape) * ITEM_BYTES[dtype]
    if total > max_bytes:
        raise InvalidArgument(f"{field} takes {total} bytes, more than the {max_bytes} accepted here", field=field)
    size = piece_bytes(message)
    if size > total:
        raise InvalidArgument(
            f"{field}.data holds {size} bytes where shape {list(shape)} of {dtype} takes {total}",
            field=f"{field}.data",
        )
    data: bytes | bytearray | memoryview = message.data
    if message.HasField("shared"):
        # Of what is announced no more is believed than there might be in shared memory.
        data = links.memory_for(total) if total <= RING_BYTES else bytearray()
        links.read_payload(message.shared, data[:size] if isinstance(data, memoryview) else data)
    return IncomingTensor(field, dtype, shape, total, data, size)


def piece_bytes(message: tensor_pb2.Tensor | tensor_pb2.TensorChunk) -> int:
    """Return the size of the piece in a message, or of the one in shared memory that it names."""
    return message.shared.size_bytes if message.HasField("shared") else len(message.data)


class IncomingTensor:
    """A tensor whose pieces are arriving. It takes memory for the bytes that came, not for those that are announced,
    unless its reader has had memory for all of them."""

    def __init__(
        self,
        field: str,
        dtype: str,
        shape: Sequence[int],
        total: int,
        data: bytes | bytearray | memoryview,
        received: int,
    ) -> None:
        """data: what came, or memory for all of the tensor. received: how many bytes came."""
        self._field, self._dtype, self._shape, self._total = field, dtype, tuple(shape), total
        self._data, self._received = data, received

    @property
    def complete(self) -> bool:
        """Whether all pieces have come."""
        return self._received == self._total

    def add(self, chunk: tensor_pb2.TensorChunk, links: PayloadReader = NO_LINKS) -> None:
        """Append the next piece. Raises InvalidArgument for a gap, an overlap, an overrun or an empty piece."""
        offset, size = chunk.offset, piece_bytes(chunk)
        received, end = self._received, offset + size
        if offset != received or end > self._total or not size:
            raise InvalidArgument(
                f"chunk [{offset}, {end}) of {self._field} is out of order: expected to go on at "
                f"{received} of {self._total}",
                field=self._field,
            )
        # A tensor that came whole is used where it lies; only one in pieces needs a buffer of its own.
        if isinstance(self._data, bytes):
            self._data = bytearray(self._data)
        into = self._data[received:end] if isinstance(self._data, memoryview) else self._data
        if chunk.HasField("shared"):
            links.read_payload(chunk.shared, into)
        elif isinstance(into, memoryview):
            into[:] = chunk.data
        else:
            into += chunk.data
        self._received = end

    def tensor(self) -> WireTensor:
        """Return the tensor, which must be complete."""
        return WireTensor(self._dtype, self._shape, self._data)


class TensorAssembler:
    """Puts the tensors of one frame together, from the frame itself and the chunks behind it."""

    def __init__(self, tensors: Sequence[IncomingTensor], links: PayloadReader = NO_LINKS) -> None:
        self._tensors, self._links = tensors, links

    @property
    def complete(self) -> bool:
        """Whether all pieces of all tensors have come."""
        return all(tensor.complete for tensor in self._tensors)

    def add(self, chunk: tensor_pb2.TensorChunk) -> None:
        """Append one chunk to its tensor. Raises InvalidArgument when it fits none of the tensors."""
        if chunk.tensor_index >= len(self._tensors):
            raise InvalidArgument(
                f"chunk.tensor_index is {chunk.tensor_index}, the frame has {len(self._tensors)} tensors",
                field="chunk.tensor_index",
            )
        self._tensors[chunk.tensor_index].add(chunk, self._links)

    def tensors(self) -> list[WireTensor]:
        """Return the tensors, which must be complete, in field order."""
        return [tensor.tensor() for tensor in self._tensors]
