"""The frames in which a prefix's state travels between workers and stores: a header, chunks, and a trailer.

Their sizes are checked here before anything is allocated; whether the tensors are those of the model at hand the worker
checks. This module must not know torch, files or sessions.
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
from services.messages.enums import EnumNumbers
from services.messages.tensors import CHUNK_BYTES, MAX_RANK, dtype_name, dtype_number
from services.same_host.link import NO_LINKS, LinkSender, SharedLinks

MAX_ID_LENGTH = 128
"""The most characters of a snapshot's name."""

MAX_TENSORS = 16384
"""The most tensors of a snapshot."""

SHA256_BYTES = 32


class SnapshotOwner(StrEnum):
    """Which of a worker's models a snapshot belongs to."""

    STAGE = "stage"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class SnapshotTensor:
    """One tensor's name ("layers.17.k"), element type and shape; its bytes are row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a snapshot's frames bring: attention rows of the tokens [first_token, token_count), and all other state as
    it is behind token_count tokens.

    layers: the stage's layers, None for a draft. parent_id: the snapshot that holds the rows before first_token, None
    when that is 0.
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
    """The next bytes, at most 1 MiB. offset: the first one's place in all tensors, one after the other as the header
    lists them."""

    offset: int
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SnapshotTrailer:
    """The end of a snapshot. tensor_sha256: one digest of 32 bytes for each tensor, in the header's order."""

    total_bytes: int
    tensor_sha256: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotImported:
    """What an import left: the bytes kept, 0 when the name was kept already, and the snapshots given up for them."""

    stored_bytes: int
    evicted_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A state that a worker keeps, as it tells of it.

    token_count: of the prefix, with those of what it builds on. parent_id: what it builds on, None for nothing.
    """

    snapshot_id: str
    owner: SnapshotOwner
    token_count: int
    parent_id: str | None


SnapshotFrame = SnapshotHeader | SnapshotChunk | SnapshotTrailer


OWNERS = EnumNumbers(
    {SnapshotOwner.STAGE: pb.SNAPSHOT_OWNER_STAGE, SnapshotOwner.DRAFT: pb.SNAPSHOT_OWNER_DRAFT},
)


def check_id(snapshot_id: str, field: str = "snapshot_id") -> str:
    """Return a snapshot's name. Raises InvalidArgument for one that is empty, too long or not printable ASCII."""
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
    """Fill the message with a frame. sender: puts a chunk's bytes into memory that the other side shares."""
    match frame:
        case SnapshotHeader():
            _fill_header(frame, message.header)
        case SnapshotChunk():
            message.chunk.offset = frame.offset
            payload = None if sender is None else sender.put(memoryview(frame.data).cast("B"))
            if payload is None:
                message.chunk.data = bytes(frame.data)
            else:
                message.chunk.shared.CopyFrom(payload)
        case SnapshotTrailer():
            message.trailer.total_bytes = frame.total_bytes
            message.trailer.tensor_sha256.extend(frame.tensor_sha256)


def frame_from_message(
    message: pb.PrefixSnapshotExportResponse | pb.PrefixSnapshotImportRequest, links: SharedLinks = NO_LINKS
) -> SnapshotFrame:
    """Return the frame. links: the memory in which a chunk's bytes may lie.

    Raises InvalidArgument for a frame that contradicts itself.
    """
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


def kept_to_message(kept: KeptSnapshot) -> pb.SnapshotListResponse:
    """Return the message that tells of a kept state."""
    return pb.SnapshotListResponse(
        snapshot_id=kept.snapshot_id,
        owner=OWNERS.number(kept.owner),
        token_count=kept.token_count,
        parent_id=kept.parent_id,
    )


def kept_from_message(message: pb.SnapshotListResponse) -> KeptSnapshot:
    """Return what a message tells of a kept state. Raises InvalidArgument for one that cannot be."""
    if not message.token_count:
        raise InvalidArgument("token_count is 0: a kept prefix has at least one token", field="token_count")
    return KeptSnapshot(
        snapshot_id=check_id(message.snapshot_id),
        owner=OWNERS.value(message.owner, "owner"),
        token_count=message.token_count,
        parent_id=check_id(message.parent_id, "parent_id") if message.HasField("parent_id") else None,
    )


def _fill_header(header: SnapshotHeader, message: pb.PrefixSnapshotHeader) -> None:
    message.snapshot_id, message.owner = header.snapshot_id, OWNERS.number(header.owner)
    message.fingerprint = header.fingerprint
    if header.layers is not None:
        message.layers.CopyFrom(range_to_message(header.layers))
    message.first_token, message.token_count = header.first_token, header.token_count
    if header.parent_id is not None:
        message.parent_id = header.parent_id
    for tensor in header.tensors:
        message.tensors.add(
            name=tensor.name, dtype=dtype_number(tensor.dtype), shape=tensor.shape, size_bytes=tensor.size_bytes
        )


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
        owner=OWNERS.value(message.owner, "owner"),
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
