"""The frames of a snapshot on its way, to protobuf and back, and what is refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashsplit.shard.v1 import snapshot_pb2 as pb
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.snapshots import (
    MAX_ID_LENGTH,
    MAX_TENSORS,
    OWNERS,
    SnapshotChunk,
    SnapshotFrame,
    SnapshotOwner,
    SnapshotTensor,
    SnapshotTrailer,
    check_id,
    frame_from_message,
    frame_to_message,
)
from services.messages.tensors import CHUNK_BYTES
from tests.services.fakes import HEADER

Message = pb.PrefixSnapshotExportResponse | pb.PrefixSnapshotImportRequest
BOTH = pytest.mark.parametrize("kind", [pb.PrefixSnapshotExportResponse, pb.PrefixSnapshotImportRequest])
LARGEST = 2**32 - 1


@BOTH
@pytest.mark.parametrize(
    "frame",
    [
        HEADER,
        replace(HEADER, layers=None, owner=SnapshotOwner.DRAFT),
        replace(HEADER, first_token=39, parent_id="p" * MAX_ID_LENGTH, snapshot_id="~ !"),
        replace(HEADER, token_count=LARGEST, layers=LayerRange(0, LARGEST), fingerprint=""),
        replace(HEADER, first_token=LARGEST - 1, token_count=LARGEST, parent_id="p"),
        replace(HEADER, tensors=(SnapshotTensor("x", "float16", (1, 2, 3, 4)), SnapshotTensor("", "int32", (2**20,)))),
        SnapshotChunk(0, b"\0"),
        SnapshotChunk(2**64 - 1, bytes(range(256)) * (CHUNK_BYTES // 256)),
        SnapshotTrailer(0, ()),
        SnapshotTrailer(2**64 - 1, (bytes(32), bytes(range(32)))),
    ],
)
def test_round_trip(frame: SnapshotFrame, kind: type[Message]) -> None:
    """Every field of every frame survives the wire in both directions; absent and zero stay different."""
    message = kind()
    frame_to_message(frame, message)
    assert frame_from_message(kind.FromString(message.SerializeToString())) == frame


@pytest.mark.parametrize("buffer", [bytearray, memoryview])
def test_chunks_of_any_buffer(buffer: Callable[[bytes], bytearray | memoryview]) -> None:
    """A piece of an array travels as its bytes."""
    message = pb.PrefixSnapshotImportRequest()
    frame_to_message(SnapshotChunk(7, buffer(b"abc")), message)
    assert frame_from_message(message) == SnapshotChunk(7, b"abc")


def test_sizes_are_those_of_the_tensors() -> None:
    """A tensor's bytes are extents times item size, a scalar's one item, an empty one's none."""
    assert [tensor.size_bytes for tensor in HEADER.tensors] == [2 * 40 * 8 * 4, 4, 0, 6]
    assert HEADER.size_bytes == 2570


def test_every_owner_has_a_number() -> None:
    """All owners travel under numbers of their own; others are refused, naming what is known."""
    assert {OWNERS.value(OWNERS.number(owner), "owner") for owner in SnapshotOwner} == set(SnapshotOwner)
    for number in (0, 3, -1):
        with pytest.raises(InvalidArgument, match=rf"owner is {number}, not one of 1 \(stage\), 2 \(draft\)"):
            OWNERS.value(number, "owner")


@pytest.mark.parametrize("name", ["", "x" * (MAX_ID_LENGTH + 1), "a\n", "\0", "ü", "\x7f", "a\u2028b", "x" * 100_000])
def test_names_that_are_none_are_refused(name: str) -> None:
    """Empty, long and unprintable names are refused with the field, without their whole text."""
    with pytest.raises(InvalidArgument, match="must be 1 to 128 printable ASCII characters") as refused:
        check_id(name, "parent_id")
    assert refused.value.where["field"] == "parent_id"
    assert len(refused.value.message) < 900


def header(**changes: object) -> pb.PrefixSnapshotImportRequest:
    """HEADER as a message, with fields changed; None clears one."""
    message = pb.PrefixSnapshotImportRequest()
    frame_to_message(HEADER, message)
    for name, value in changes.items():
        if value is None:
            message.header.ClearField(name)
        else:
            setattr(message.header, name, value)
    return message


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        (header(first_token=40, parent_id="p"), "first_token", "first_token is 40, token_count 40"),
        (header(first_token=LARGEST, parent_id="p"), "first_token", f"first_token is {LARGEST}, token_count 40"),
        (header(token_count=0), "first_token", "there must be a token between them"),
        (header(first_token=3), "parent_id", "first_token is 3 and parent_id None"),
        (header(parent_id="p"), "parent_id", "first_token is 0 and parent_id 'p'"),
        (header(first_token=3, parent_id=""), "parent_id", "parent_id '' must be 1 to 128"),
        (header(snapshot_id=""), "snapshot_id", "snapshot_id '' must be 1 to 128"),
        (header(owner=0), "owner", "owner is 0, not one of"),
        (header(owner=9), "owner", "owner is 9, not one of"),
        (header(tensors=None), "tensors", f"the header names 0 tensors; expected 1 to {MAX_TENSORS}"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(message: Message, field: str, text: str) -> None:
    """Each contradiction is refused with its field and values."""
    with pytest.raises(InvalidArgument) as refused:
        frame_from_message(message)
    assert text in refused.value.message
    assert refused.value.where["field"] == field


def test_headers_of_too_many_tensors_are_refused() -> None:
    """The number of tensors is bounded, whatever each of them says."""
    message = header()
    message.header.tensors.extend([message.header.tensors[0]] * (MAX_TENSORS - len(HEADER.tensors)))
    assert len(frame_from_message(message).tensors) == MAX_TENSORS
    message.header.tensors.add()
    with pytest.raises(InvalidArgument, match=f"names {MAX_TENSORS + 1} tensors"):
        frame_from_message(message)


def test_empty_layers_are_refused() -> None:
    """A range without a layer is none; no range at all is the draft's."""
    message = header()
    message.header.layers.last = 3
    with pytest.raises(InvalidArgument, match="layers is"):
        frame_from_message(message)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ({"dtype": 0}, "has type None"),
        ({"dtype": 77}, "dtype is 77, not one of"),
        ({"shape": [1, 1, 1, 1, 1]}, "at most 4 extents"),
        ({"shape": [2, -40, 8]}, "none of them negative"),
        ({"shape": [-2, -40, 8]}, "none of them negative"),
        ({"shape": [2, 40, 9]}, "size_bytes is 2560 where shape [2, 40, 9] of float32 takes 2880"),
        ({"dtype": 2}, "size_bytes is 2560 where shape [2, 40, 8] of bfloat16 takes 1280"),
        ({"size_bytes": 0}, "size_bytes is 0 where"),
        # What would be 0 in 64 bits is not.
        ({"shape": [2**32, 2**32], "size_bytes": 0}, "takes 73786976294838206464"),
        ({"shape": [2**62, 4], "size_bytes": 0}, "takes 73786976294838206464"),
    ],
)
def test_tensors_of_other_sizes_than_announced_are_refused(tensor: dict[str, object], text: str) -> None:
    """Type, extents and bytes of a tensor must agree, whatever they add up to; the refusal names the tensor."""
    message = header()
    announced = message.header.tensors[0]
    for name, value in tensor.items():
        if name == "shape":
            announced.ClearField("shape")
            announced.shape.extend(value)
        else:
            setattr(announced, name, value)
    with pytest.raises(InvalidArgument) as refused:
        frame_from_message(message)
    assert text in refused.value.message
    assert refused.value.where["field"].startswith("tensors['layers.3.k']")


def test_chunks_are_bounded() -> None:
    """An empty chunk and one above 1 MiB are refused; one of exactly 1 MiB passes."""
    for size in (0, CHUNK_BYTES + 1):
        message = pb.PrefixSnapshotImportRequest(chunk={"data": bytes(size)})
        with pytest.raises(InvalidArgument, match=rf"chunk.data holds {size} bytes; expected 1 to {CHUNK_BYTES}"):
            frame_from_message(message)


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33), bytes(64)])
def test_digests_of_other_lengths_are_refused(digest: bytes) -> None:
    """Every digest of a trailer has 32 bytes."""
    message = pb.PrefixSnapshotImportRequest(trailer={"total_bytes": 3, "tensor_sha256": [bytes(32), digest]})
    with pytest.raises(InvalidArgument, match="must hold digests of 32 bytes") as refused:
        frame_from_message(message)
    assert refused.value.where["field"] == "trailer.tensor_sha256"


@BOTH
def test_no_frame_is_refused(kind: type[Message]) -> None:
    """A message that holds none of the frames is refused, naming them."""
    with pytest.raises(InvalidArgument, match="frame is missing: expected header, chunk or trailer"):
        frame_from_message(kind())
