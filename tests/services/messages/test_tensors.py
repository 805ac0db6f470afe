"""Tensors on the wire: whole, in pieces, and refused."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from flashsplit.shard.v1 import tensor_pb2
from flashsplit.shard.v1.shared_memory_pb2 import SharedPayload
from services.errors import InvalidArgument
from services.messages.tensors import (
    CHUNK_BYTES,
    OutgoingTensors,
    TensorAssembler,
    WireTensor,
    dtype_name,
    dtype_number,
    incomplete,
)
from services.same_host.link import RING_BYTES
from tests.services.fakes import same_bytes, tensor

NO_LIMIT = 1 << 62


def send(*tensors: WireTensor) -> tuple[list[tensor_pb2.Tensor], list[tensor_pb2.TensorChunk]]:
    outgoing, messages = OutgoingTensors(), [tensor_pb2.Tensor() for _ in tensors]
    for one, message in zip(tensors, messages, strict=True):
        outgoing.put(one, message)
    return messages, list(outgoing.chunks())


def receive(messages: list[tensor_pb2.Tensor], chunks: list[tensor_pb2.TensorChunk]) -> list[WireTensor]:
    assembler = TensorAssembler([incomplete(message, "t", NO_LIMIT) for message in messages])
    for chunk in chunks:
        assert not assembler.complete
        assembler.add(chunk)
    assert assembler.complete
    return assembler.tensors()


def announced(dtype: int = 1, shape: tuple[int, ...] = (2, 3), data: bytes = b"") -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (3, 4), (2, 3, 4, 5)])
def test_every_type_and_shape_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    """A small tensor of any type and rank travels in its frame alone and comes back unchanged."""
    sent = tensor(*shape, dtype=dtype)
    messages, chunks = send(sent)
    assert chunks == []
    [got] = receive(messages, chunks)
    assert same_bytes(got, sent)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_taken(kind: type) -> None:
    """Bytes, bytearrays and memoryviews, of two dimensions too, travel alike."""
    sent = tensor(4, 8, dtype="float32")
    data = memoryview(sent.data).cast("B", (4, 32)) if kind is memoryview else kind(sent.data)
    [got] = receive(*send(WireTensor("float32", (4, 8), data)))
    assert same_bytes(got, sent)


@pytest.mark.parametrize("over", [-4, -2, 0, 2, 4, CHUNK_BYTES - 2, CHUNK_BYTES, CHUNK_BYTES + 2, 5 * CHUNK_BYTES])
def test_sizes_around_the_boundary(over: int) -> None:
    """Pieces are at most CHUNK_BYTES, as few as possible, and join to the tensor at every size around the limit."""
    sent = tensor((CHUNK_BYTES + over) // 2)
    messages, chunks = send(sent)
    sizes = [len(messages[0].data), *(len(chunk.data) for chunk in chunks)]
    assert max(sizes) <= CHUNK_BYTES
    assert len(sizes) == -(-sent.size_bytes // CHUNK_BYTES)
    [got] = receive(messages, chunks)
    assert same_bytes(got, sent)


def test_many_tensors_share_one_frame_size() -> None:
    """A frame holds CHUNK_BYTES of tensor bytes whatever their number, and all tensors still come back."""
    sent = [tensor(3 * CHUNK_BYTES // 8, fill=fill) for fill in range(20)] + [tensor(0), tensor(5)]
    messages, chunks = send(*sent)
    assert sum(len(message.data) for message in messages) == CHUNK_BYTES
    for got, one in zip(receive(messages, chunks), sent, strict=True):
        assert same_bytes(got, one)


def test_random_cuts_join() -> None:
    """However a sender cuts and interleaves the pieces, in-order pieces give the tensors."""
    rng = random.Random(5)
    for _ in range(50):
        sent = [tensor(rng.randrange(0, 200), fill=index) for index in range(3)]
        messages, queues = [], []
        for index, one in enumerate(sent):
            data, first = bytes(one.data), rng.randrange(0, one.size_bytes + 1)
            messages.append(tensor_pb2.Tensor(dtype=2, shape=one.shape, data=data[:first]))
            offsets = sorted({first, *(rng.randrange(first, len(data)) for _ in range(4) if first < len(data))})
            queues.append(
                [
                    tensor_pb2.TensorChunk(tensor_index=index, offset=start, data=data[start:end])
                    for start, end in zip(offsets, [*offsets[1:], len(data)], strict=True)
                    if start < end
                ]
            )
        chunks = []
        while any(queues):
            chunks.append(rng.choice([queue for queue in queues if queue]).pop(0))
        for got, one in zip(receive(messages, chunks), sent, strict=True):
            assert same_bytes(got, one)


def test_chunks_are_made_one_at_a_time() -> None:
    """Cutting a large tensor doesn't hold a second copy of it."""
    sent = WireTensor("int32", (8 * CHUNK_BYTES,), bytes(32 * CHUNK_BYTES))
    outgoing = OutgoingTensors()
    tracemalloc.start()
    outgoing.put(sent, tensor_pb2.Tensor())
    for _ in outgoing.chunks():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (announced(dtype=9), "t.dtype is 9, not one of 1 (float32), 2 (bfloat16), 3 (float16), 4 (int32)"),
        (announced(dtype=-1), "t.dtype is -1"),
        (announced(dtype=0), "t.dtype is missing"),
        (announced(shape=(2, -1)), "t.shape is [2, -1]"),
        (announced(shape=(-(2**63),)), "no extent may be negative"),
        (announced(shape=(1, 1, 1, 1, 1)), "t.shape has 5 extents, at most 4 are accepted"),
        (announced(shape=(1,) * 10_000), "t.shape has 10000 extents"),
        (announced(shape=(300,)), "t takes 1200 bytes, more than the 1024 accepted here"),
        (announced(shape=(2**62, 2**62, 2**62, 2**62)), "more than the 1024 accepted here"),
        (announced(data=bytes(25)), "t.data holds 25 bytes where shape [2, 3] of float32 takes 24"),
        (announced(shape=(0, 2**62), data=b"x"), "t.data holds 1 bytes"),
    ],
)
def test_refused_announcements(message: tensor_pb2.Tensor, text: str) -> None:
    """Type, rank, extent, size and surplus bytes are refused in words that name the field and the value."""
    with pytest.raises(InvalidArgument) as refused:
        incomplete(message, "t", 1024)
    assert text in refused.value.message
    assert refused.value.where["field"].startswith("t")
    assert len(refused.value.message) < 300


def test_the_limit_itself_is_accepted() -> None:
    """A tensor of exactly the accepted size passes; one byte less of a limit refuses it."""
    assert incomplete(announced(shape=(256,)), "t", 1024).complete is False
    with pytest.raises(InvalidArgument):
        incomplete(announced(shape=(256,)), "t", 1023)


@pytest.mark.parametrize(
    ("offset", "data"),
    [(9, b"x"), (7, b"x"), (0, b"12345678"), (8, bytes(17)), (8, b""), (2**63, b"x"), (24, b"")],
    ids=["gap", "overlap", "repeated", "overrun", "empty", "far", "empty-at-end"],
)
def test_refused_chunks(offset: int, data: bytes) -> None:
    """A gap, an overlap, an overrun and an empty piece are refused, naming where the tensor stands."""
    assembler = TensorAssembler([incomplete(announced(data=bytes(8)), "t", NO_LIMIT)])
    with pytest.raises(InvalidArgument, match="expected to go on at 8 of 24"):
        assembler.add(tensor_pb2.TensorChunk(offset=offset, data=data))


def test_a_chunk_for_a_whole_tensor_is_refused() -> None:
    """A tensor that is complete takes nothing more, even while another of the frame is not."""
    whole, begun = incomplete(announced(data=bytes(24)), "a", NO_LIMIT), incomplete(announced(), "b", NO_LIMIT)
    assembler = TensorAssembler([whole, begun])
    with pytest.raises(InvalidArgument, match="24 of 24"):
        assembler.add(tensor_pb2.TensorChunk(tensor_index=0, offset=24, data=b"x"))


@pytest.mark.parametrize("index", [1, 2**32 - 1])
def test_a_chunk_for_no_tensor_is_refused(index: int) -> None:
    """A tensor_index beyond the frame's tensors is refused."""
    assembler = TensorAssembler([incomplete(announced(), "t", NO_LIMIT)])
    with pytest.raises(InvalidArgument, match=f"chunk.tensor_index is {index}, the frame has 1 tensors"):
        assembler.add(tensor_pb2.TensorChunk(tensor_index=index, data=b"x"))


def test_an_announced_tensor_takes_no_memory() -> None:
    """Announcing a terabyte allocates nothing; memory grows with the bytes that come."""
    tracemalloc.start()
    message = announced(shape=(1 << 18, 1 << 20), data=b"x")
    assembler = TensorAssembler([incomplete(message, "t", NO_LIMIT)])
    assembler.add(tensor_pb2.TensorChunk(offset=1, data=b"y"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


class Shared:
    """Memory that the other side shares: pieces of tensors by their number, and where they are put. asked: for how many
    bytes memory was asked for."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.asked: list[int] = []

    def piece(self, data: bytes) -> SharedPayload:
        self.pieces[len(self.pieces) + 1] = data
        return SharedPayload(sequence=len(self.pieces), size_bytes=len(data))

    def memory_for(self, size_bytes: int) -> bytearray | memoryview:
        self.asked.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    def read_payload(self, message: SharedPayload, into: bytearray | memoryview) -> None:
        piece = self.pieces[message.sequence]
        if isinstance(into, memoryview):
            into[:] = piece
        else:
            into += piece


@pytest.mark.parametrize("first", [1, 8, 23, 24])
def test_pieces_fill_memory_for_all_of_a_tensor(first: int) -> None:
    """Whether they lie in shared memory or come within their messages."""
    shared, data = Shared(), bytes(range(24))
    message = announced()
    message.shared.CopyFrom(shared.piece(data[:first]))
    assembler = TensorAssembler([incomplete(message, "t", NO_LIMIT, shared)], shared)
    for at in range(first, 24):
        chunk = tensor_pb2.TensorChunk(offset=at)
        if at % 2:
            chunk.data = data[at : at + 1]
        else:
            chunk.shared.CopyFrom(shared.piece(data[at : at + 1]))
        assert not assembler.complete
        assembler.add(chunk)
    assert assembler.complete
    assert bytes(assembler.tensors()[0].data) == data
    assert shared.asked == [24]


def test_no_memory_is_asked_for_what_nobody_could_have_written() -> None:
    """Of a tensor larger than what is shared, and of one whose first piece came within its message."""
    shared = Shared()
    large = announced(shape=(RING_BYTES // 4 + 1,))
    large.shared.CopyFrom(shared.piece(bytes(8)))
    for message in (large, announced(data=bytes(8))):
        assert not incomplete(message, "t", NO_LIMIT, shared).complete
    assert shared.asked == []


def test_dtype_names_and_numbers() -> None:
    """Names and numbers map both ways; absent stays absent."""
    for name in ("float32", "bfloat16", "float16", "int32", "float8_e4m3fn", None):
        assert dtype_name(dtype_number(name)) == name
