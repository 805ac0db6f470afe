"""The frames in which a prefix's state travels between workers and stores: header, chunks, trailer.

Their sizes are checked here before anything is allocated; whether the tensors are those of the model at hand is for the
worker to say. Knows nothing of torch, files or sessions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from flashsplit.shard.v1 import snapshot_pb2 as pb
from services.dtypes import ITEM_BYTES
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.description import range_from_message, range_to_message
from services.messages.tensors import CHUNK_BYTES, MAX_RANK, dtype_name, dtype_number
from services.same_host.link import NO_LINKS, LinkSender, SharedLinks

MAX_ID_LENGTH = 128
MAX_TENSORS = 16384
SHA256_BYTES = 32


class SnapshotOwner(StrEnum):
    """Which of a worker's models a snapshot belongs to."""

    STAGE = "stage"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class SnapshotTensor:
    """One tensor, e.g. "layers.17.k", float32 or bfloat16, contiguous, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What comes: attention rows of tokens [first_token, token_count), other state as it is behind token_count.

    layers: None for a draft's. parent_id: the snapshot that holds the rows before first_token; None when that is 0.
    """

    snapshot_id: str
    owner: SnapshotOwner
    fingerprint: str
    layers: LayerRange | None
    first_token: int
    token_count: int
    parent_id: str | None
    tensors: tuple[SnapshotTensor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """The next bytes, at most 1 MiB. offset: of the first one, counted over all tensors in the header's order."""

    offset: int
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SnapshotTrailer:
    """The end. tensor_sha256: one digest of 32 bytes for each tensor, in the header's order."""

    total_bytes: int
    tensor_sha256: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotImported:
    """What an import left: the bytes kept, 0 when the name was kept already, and the snapshots given up for them."""

    stored_bytes: int
    evicted_ids: tuple[str, ...] = ()


SnapshotFrame = SnapshotHeader | SnapshotChunk | SnapshotTrailer


_OWNER_NUMBERS = {
    SnapshotOwner.STAGE: pb.SNAPSHOT_OWNER_STAGE,
    SnapshotOwner.DRAFT: pb.SNAPSHOT_OWNER_DRAFT,
}
_OWNERS: dict[int, SnapshotOwner] = {number: owner for owner, number in _OWNER_NUMBERS.items()}


def owner_to_number(owner: SnapshotOwner) -> pb.SnapshotOwner:
    return _OWNER_NUMBERS[owner]


def owner_from_number(number: int) -> SnapshotOwner:
    """Raises InvalidArgument for an unknown one."""
    if number not in _OWNERS:
        known = ", ".join(f"{key} ({owner})" for key, owner in _OWNERS.items())
        raise InvalidArgument(f"owner is {number}, not one of {known}", field="owner")
    return _OWNERS[number]


def check_id(snapshot_id: str, field: str = "snapshot_id") -> str:
    """Raises InvalidArgument for a name that is empty, too long or not plain ASCII."""
    if not 1 <= len(snapshot_id) <= MAX_ID_LENGTH or not (snapshot_id.isascii() and snapshot_id.isprintable()):
        raise InvalidArgument(
            f"{field} {snapshot_id[:MAX_ID_LENGTH]!r} must be 1 to {MAX_ID_LENGTH} printable ASCII characters",
            field=field,
        )
    return snapshot_id


def frame_to_message(
    frame: SnapshotFrame,
    message: pb.PrefixSnapshotExportResponse | pb.PrefixSnapshotImportRequest,
    sender: LinkSender | None = None,
) -> None:
    """Fill in the one of the message's frames that this is; bytes through the sender's shared memory, if given."""
    if isinstance(frame, SnapshotHeader):
        header = message.header
        header.snapshot_id, header.owner = frame.snapshot_id, _OWNER_NUMBERS[frame.owner]
        header.fingerprint = frame.fingerprint
        if frame.layers is not None:
            header.layers.CopyFrom(range_to_message(frame.layers))
        header.first_token, header.token_count = frame.first_token, frame.token_count
        if frame.parent_id is not None:
            header.parent_id = frame.parent_id
        for tensor in frame.tensors:
            header.tensors.add(
                name=tensor.name,
                dtype=dtype_number(tensor.dtype),
                shape=tensor.shape,
                size_bytes=tensor.size_bytes,
            )
    elif isinstance(frame, SnapshotChunk):
        message.chunk.offset = frame.offset
        payload = None if sender is None else sender.put(memoryview(frame.data).cast("B"))
        if payload is None:
            message.chunk.data = bytes(frame.data)
        else:
            message.chunk.shared.CopyFrom(payload)
    else:
        message.trailer.total_bytes = frame.total_bytes
        message.trailer.tensor_sha256.extend(frame.tensor_sha256)


def frame_from_message(
    message: pb.PrefixSnapshotExportResponse | pb.PrefixSnapshotImportRequest, links: SharedLinks = NO_LINKS
) -> SnapshotFrame:
    """Raises InvalidArgument for a frame that contradicts itself."""
    match message.WhichOneof("frame"):
        case "header":
            return _header_from_message(message.header)
        case "chunk":
            chunk = message.chunk
            data: bytes | bytearray = chunk.data
            if chunk.HasField("shared"):
                data = bytearray()
                links.read_payload(chunk.shared, data)
            if not 1 <= len(data) <= CHUNK_BYTES:
                raise InvalidArgument(
                    f"chunk.data holds {len(data)} bytes; expected 1 to {CHUNK_BYTES}", field="chunk.data"
                )
            return SnapshotChunk(chunk.offset, data)
        case "trailer":
            trailer = message.trailer
            if any(len(digest) != SHA256_BYTES for digest in trailer.tensor_sha256):
                raise InvalidArgument(
                    f"trailer.tensor_sha256 must hold digests of {SHA256_BYTES} bytes", field="trailer.tensor_sha256"
                )
            return SnapshotTrailer(trailer.total_bytes, tuple(trailer.tensor_sha256))
        case _:
            raise InvalidArgument("frame is missing: expected header, chunk or trailer", field="frame")


def _header_from_message(message: pb.PrefixSnapshotHeader) -> SnapshotHeader:
    first, count = message.first_token, message.token_count
    if first >= count:
        raise InvalidArgument(
            f"first_token is {first}, token_count {count}: there must be a token between them", field="first_token"
        )
    parent_id = check_id(message.parent_id, "parent_id") if message.HasField("parent_id") else None
    if (parent_id is None) != (first == 0):
        raise InvalidArgument(
            f"first_token is {first} and parent_id {parent_id!r}: a parent holds the tokens before first_token",
            field="parent_id",
        )
    if not 1 <= len(message.tensors) <= MAX_TENSORS:
        raise InvalidArgument(
            f"the header names {len(message.tensors)} tensors; expected 1 to {MAX_TENSORS}", field="tensors"
        )
    return SnapshotHeader(
        snapshot_id=check_id(message.snapshot_id),
        owner=owner_from_number(message.owner),
        fingerprint=message.fingerprint,
        layers=range_from_message(message.layers) if message.HasField("layers") else None,
        first_token=first,
        token_count=count,
        parent_id=parent_id,
        tensors=tuple(_tensor_from_message(tensor) for tensor in message.tensors),
    )


def _tensor_from_message(message: pb.SnapshotTensor) -> SnapshotTensor:
    field = f"tensors[{message.name[:MAX_ID_LENGTH]!r}]"
    dtype = dtype_name(message.dtype, f"{field}.dtype")
    shape = tuple(message.shape)
    if dtype is None or len(shape) > MAX_RANK or any(extent < 0 for extent in shape):
        raise InvalidArgument(
            f"{field} has type {dtype} and shape {list(shape)}: expected a type and at most {MAX_RANK} extents, none "
            "of them negative",
            field=field,
        )
    tensor = SnapshotTensor(message.name, dtype, shape)
    if message.size_bytes != tensor.size_bytes:
        raise InvalidArgument(
            f"{field}.size_bytes is {message.size_bytes} where shape {list(shape)} of {dtype} takes "
            f"{tensor.size_bytes}",
            field=field,
        )
    return tensor
