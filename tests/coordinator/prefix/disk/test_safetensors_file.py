"""The file format against the real package, in both directions, and against files that are none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.prefix.disk.safetensors_file import PlacedTensor, SafetensorsWriter, place, read_placed
from services.errors import DataLoss

TENSORS = {
    "layers.0.k": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "layers.0.v": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4) / 7,
    "layers.1.recurrent": torch.zeros(0, 5),
    "layers.2.counts": torch.arange(6, dtype=torch.int32),
    "half": torch.arange(8, dtype=torch.float16),
    "layers.3.k": torch.arange(-12, 12).reshape(2, 3, 4).to(torch.float8_e4m3fn),
    "logits": torch.tensor(1.5),
}


def described(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def written(tensors: dict[str, torch.Tensor], chunk: int = 7) -> bytes:
    output = BytesIO()
    writer = SafetensorsWriter(output, described(tensors))
    whole = b"".join(raw(tensor) for tensor in tensors.values())
    for start in range(0, len(whole), chunk):
        writer.write(whole[start : start + chunk])
    writer.finish()
    return output.getvalue()


def test_the_real_package_reads_what_is_written(tmp_path: Path) -> None:
    """Names, types, shapes and bytes, however the bytes were cut."""
    for chunk in (1, 7, 1000):
        path = tmp_path / "part.safetensors"
        path.write_bytes(written(TENSORS, chunk))
        loaded = load_file(path)
        assert set(loaded) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert loaded[name].dtype == tensor.dtype
            assert raw(loaded[name]) == raw(tensor)


def test_what_the_real_package_writes_is_read(tmp_path: Path) -> None:
    """Its own order, alignment and metadata."""
    path = tmp_path / "part.safetensors"
    save_file(TENSORS, path, metadata={"made": "elsewhere"})
    data = path.read_bytes()
    placed = read_placed(reader(data), len(data))
    assert {tensor.name for tensor in placed} == set(TENSORS)
    for tensor in placed:
        assert data[tensor.offset : tensor.end] == raw(TENSORS[tensor.name])


def test_places_are_those_that_reading_finds() -> None:
    """Planned and read places agree; the header is padded, so that data starts at a multiple of eight."""
    first, placed = place(described(TENSORS))
    data = written(TENSORS)
    assert data.startswith(first)
    assert len(first) % 8 == 0
    assert placed[0].offset == len(first)
    loaded = {tensor.name: tensor for tensor in read_placed(reader(data), len(data))}
    assert loaded == {tensor.name: tensor for tensor in placed}


def test_too_many_or_too_few_bytes_are_refused() -> None:
    """What was announced must come, no more and no less."""
    writer = SafetensorsWriter(BytesIO(), [("a", "float32", (2,))])
    writer.write(b"1234567")
    with pytest.raises(ValueError, match="missing"):
        writer.finish()
    with pytest.raises(ValueError, match="came"):
        writer.write(b"89")
    writer.write(b"8")
    writer.finish()


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_the_format_cannot_hold(names: tuple[str, ...]) -> None:
    """Twice the same, and the format's own."""
    with pytest.raises(ValueError, match="unique"):
        place([(name, "float32", (1,)) for name in names])


def test_files_that_are_none() -> None:
    """Cut anywhere, longer than they say, with gaps, of unknown types, or not JSON at all."""
    data = written(TENSORS)
    for end in range(len(data)):
        with pytest.raises(DataLoss):
            read_placed(reader(data[:end]), end)
    longer = data + b"x"
    with pytest.raises(DataLoss):
        read_placed(reader(longer), len(longer))
    for header in (
        b"[]",
        b"{}{}",
        b'{"a":1}',
        b"null",
        b"[" * 10_000,
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
        b'{"a":{"dtype":"F8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}).encode(),
    ):
        file = len(header).to_bytes(8, "little") + header + bytes(4)
        with pytest.raises(DataLoss):
            read_placed(reader(file), len(file))


def test_random_damage_is_found_or_harmless() -> None:
    """A header with flipped bits either raises DataLoss or describes the same bytes under other words."""
    rng = random.Random(1)
    data = written(TENSORS)
    start = int.from_bytes(data[:8], "little") + 8
    for _ in range(2000):
        damaged = bytearray(data)
        damaged[rng.randrange(start)] ^= 1 << rng.randrange(8)
        try:
            placed = read_placed(reader(bytes(damaged)), len(damaged))
        except DataLoss:
            continue
        assert all(isinstance(tensor, PlacedTensor) for tensor in placed)
        assert sum(tensor.size_bytes for tensor in placed) == len(data) - start
