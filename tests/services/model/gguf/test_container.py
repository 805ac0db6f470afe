"""GGUF headers that the format's own library wrote are read as it reads them; damaged ones are refused."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, strategies as st

from services.errors import DataLoss, FlashsplitError, InvalidArgument, NotFound, Unimplemented
from services.model.gguf.blocks import BLOCK_TYPES
from services.model.gguf.container import GgufArray, GgufFile, read_gguf, read_header


def write(path: Path, split_max_tensors: int = 0) -> None:
    """Write a file with every kind of value, and with tensors of several types."""
    writer = gguf.GGUFWriter(path, "qwen3", split_max_tensors=split_max_tensors)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_float32("a.f32", 0.5)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float64("a.f64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Größe")
    writer.add_array("a.strings", ["", "größer", "Ġthe"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("plain", np.arange(15, dtype=np.float32).reshape(3, 5))
    writer.add_tensor("half", np.ones((2, 64), dtype=np.float16))
    rows = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    writer.add_tensor(
        "packed", gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("cube", np.ones((2, 3, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path)
    return path


def parsed(content: bytes) -> GgufFile:
    return read_header(io.BytesIO(content), len(content), Path("model.gguf"))


def test_block_types_are_the_librarys() -> None:
    sizes = {number.value: size for number, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.values, kind.bytes) for number, kind in BLOCK_TYPES.items()} == sizes
    assert {number: kind.name for number, kind in BLOCK_TYPES.items()} == {
        number.value: number.name for number in gguf.GGML_QUANT_SIZES
    }


def test_metadata_and_tensors_are_those_that_were_written(path: Path) -> None:
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = file.metadata[key]
            assert (value.items() if isinstance(value, GgufArray) else value) == field.contents(), key
    assert len(file.metadata) == len(reader.fields) - 3
    content = path.read_bytes()
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.type.name, ours.shape) == (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())))
        assert content[ours.begin : ours.begin + ours.nbytes] == tensor.data.tobytes()


def test_a_split_model_is_read_from_its_first_file(tmp_path: Path, path: Path) -> None:
    write(tmp_path / "model.gguf", split_max_tensors=2)
    first = tmp_path / "model-00001-of-00002.gguf"
    file = read_gguf(first)
    assert [part.name for part in file.paths] == [first.name, "model-00002-of-00002.gguf"]
    whole = read_gguf(path)
    assert list(file.tensors) == list(whole.tensors)
    for name, tensor in file.tensors.items():
        expected = whole.tensors[name]
        assert (tensor.type, tensor.shape) == (expected.type, expected.shape)
        stored, in_whole = tensor.path.read_bytes(), expected.path.read_bytes()
        assert stored[tensor.begin :][: tensor.nbytes] == in_whole[expected.begin :][: expected.nbytes]

    with pytest.raises(InvalidArgument, match=r"not the first of its model's 2 files: name NAME-00001-of-00002\.gguf"):
        read_gguf(file.paths[1])
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(InvalidArgument, match="found by names like"):
        read_gguf(renamed)
    second = file.paths[1].read_bytes()
    file.paths[1].unlink()
    with pytest.raises(NotFound, match="no file .*00002-of-00002"):
        read_gguf(first)
    file.paths[1].write_bytes(first.read_bytes())
    with pytest.raises(DataLoss, match="split.no and split.count are 0 and 2, its place is 1 of 2"):
        read_gguf(first)
    file.paths[1].write_bytes(second.replace(b"cube", b"half"))
    with pytest.raises(DataLoss, match="tensor half is in .*00001-of-00002.gguf and in .*00002-of-00002.gguf"):
        read_gguf(first)


def header(tensors: bytes = b"", count: int = 0, pairs: bytes = b"", pair_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, pair_count) + pairs + tensors


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def tensor(name: str, *extents: int, kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


U32 = struct.pack("<I", 5)


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        (b"", DataLoss, "the magic ends at byte 4; the file has 0 bytes"),
        (b"GGML" + bytes(20), DataLoss, "begins with b'GGML'"),
        (header(version=1), Unimplemented, "version 1 of GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), Unimplemented, "big-endian version 3"),
        (header(version=4), Unimplemented, "version 4 of GGUF"),
        (header(count=2**62), DataLoss, "4611686018427387904 tensors cannot be in"),
        (header(pair_count=2**40), DataLoss, "key/value pairs cannot be in"),
        (header(pairs=pair("a", 4, U32) * 2, pair_count=2), DataLoss, "key 'a' is there twice"),
        (header(pairs=pair("a", 13, U32), pair_count=1), DataLoss, "a is of type 13"),
        (header(pairs=pair("a", 4, b""), pair_count=1), DataLoss, "a ends at byte"),
        (header(pairs=pair("a", 8, struct.pack("<Q", 2**63)), pair_count=1), DataLoss, "a has 9223372036854775808 by"),
        (header(pairs=pair("a", 8, struct.pack("<Q", 2) + b"\xff\xff"), pair_count=1), DataLoss, "a is not UTF-8"),
        (header(pairs=pair("a", 9, struct.pack("<IQ", 9, 1)), pair_count=1), DataLoss, "items of type 9"),
        (header(pairs=pair("a", 9, struct.pack("<IQ", 4, 2**62)), pair_count=1), DataLoss, "items of a cannot be in"),
        (header(pairs=pair("a", 9, struct.pack("<IQQ", 8, 1, 2**60)), pair_count=1), DataLoss, "a ends at byte"),
        (header(pairs=pair("general.alignment", 4, U32), pair_count=1), DataLoss, "alignment is 5; it must be a power"),
        (header(tensor("w"), 1), DataLoss, "tensor w has 0 dimensions"),
        (header(tensor("w", 1, 1, 1, 1, 1), 1), DataLoss, "tensor w has 5 dimensions"),
        (header(tensor("w", 0, 4), 1), DataLoss, r"tensor w has the extents \[0, 4\]"),
        (header(tensor("w", 32, kind=4), 1), Unimplemented, "tensor w is of type 4, which is unknown; known are F32"),
        (header(tensor("w", 48, 4, kind=8), 1), DataLoss, "rows of 48 values; in Q8_0 they must be a multiple of 32"),
        (header(tensor("w", 2**62, 2**62), 1), DataLoss, "tensor w has .* bytes from"),
        (header(tensor("w", 4, offset=2**64 - 32), 1), DataLoss, "tensor w has 16 bytes from 18446744073709"),
        (header(tensor("w", 4, offset=16), 1) + bytes(99), DataLoss, "offset 16, which must be a multiple of 32"),
        (header(tensor("w", 4) * 2, 2) + bytes(99), DataLoss, "tensor w is there twice"),
        (header(tensor("v", 9) + tensor("w", 9, offset=32), 2) + bytes(200), DataLoss, "w begins at .*, within v"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, error: type[FlashsplitError], reason: str) -> None:
    with pytest.raises(error, match=reason) as raised:
        parsed(content)
    assert "model.gguf" in str(raised.value)


def test_every_cut_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    last = max(tensor.begin + tensor.nbytes for tensor in parsed(content).tensors.values())
    for size in [*range(400), *range(400, last, 37)]:
        with pytest.raises(DataLoss):
            parsed(content[:size])


@given(data=st.data())
def test_damaged_bytes_end_in_a_header_within_the_file_or_in_an_error(data: st.DataObject, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 1400))
        piece = data.draw(st.binary(min_size=1, max_size=9))
        content[at : at + len(piece)] = piece
    try:
        file = parsed(bytes(content))
        for value in file.metadata.values():
            if isinstance(value, GgufArray):
                assert len(value.items()) == value.count
    except FlashsplitError:
        return
    assert all(tensor.begin + tensor.nbytes <= len(content) for tensor in file.tensors.values())
