"""What a checkpoint directory says without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.errors import DataLoss, InvalidArgument, NotFound, Unimplemented
from services.model.checkpoint_files import INDEX, SINGLE, read_config, read_headers, read_json_object, weight_files


def write_weights(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a safetensors file of zeros; tensors: code, shape and bytes by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (code, shape, size) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_headers_of_all_files_are_joined(tmp_path: Path) -> None:
    """An index names the files; without one there is a single file."""
    write_weights(tmp_path / "a.safetensors", {"x": ("BF16", [2, 3], 12)})
    write_weights(tmp_path / "b.safetensors", {"y": ("F32", [4], 16)})
    write_weights(tmp_path / SINGLE, {"z": ("F16", [], 2)})
    alone = read_headers(tmp_path, {}, "--model")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))

    headers = read_headers(tmp_path, {}, "--model")

    assert [(name, header.shape) for name, header in alone.items()] == [("z", ())]
    assert {name: (header.dtype(name), header.shape) for name, header in headers.items()} == {
        "x": ("bfloat16", (2, 3)),
        "y": ("float32", (4,)),
    }


def test_an_element_type_that_is_not_served_is_named(tmp_path: Path) -> None:
    """A header may hold any code; asking for its type names the tensor and what is served."""
    write_weights(tmp_path / SINGLE, {"q": ("F8_E4M3", [2], 2), "n": ("I32", [1], 4)})
    headers = read_headers(tmp_path, {}, "--model")

    for name, code in (("q", "F8_E4M3"), ("n", "I32")):
        with pytest.raises(Unimplemented, match=f"tensor {name} is stored as {code}: only F32, BF16 and F16"):
            headers[name].dtype(name)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\4\0\0\0\0\0\0\0null"])
def test_what_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    """A file that is cut off, or whose header is none, is refused with its path."""
    (tmp_path / SINGLE).write_bytes(content)

    with pytest.raises(DataLoss, match=r"model\.safetensors cannot be read") as caught:
        read_headers(tmp_path, {}, "--draft")
    assert caught.value.where["field"] == "--draft"


def test_a_missing_weight_file_is_named(tmp_path: Path) -> None:
    """The error says which file, and which option named its directory."""
    with pytest.raises(NotFound, match=r"model\.safetensors is missing") as caught:
        read_headers(tmp_path, {}, "--model")
    assert caught.value.where["field"] == "--model"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {"x": "../a.safetensors"}}, "not a file of that directory"),
        ({"weight_map": {"x": "/etc/passwd"}}, "not a file of that directory"),
    ],
)
def test_an_index_stays_in_its_directory(tmp_path: Path, index: object, words: str) -> None:
    """An index without a map, or with names that lead elsewhere, is refused before any file is opened."""
    (tmp_path / INDEX).write_text(json.dumps(index))

    with pytest.raises(InvalidArgument, match=words):
        weight_files(tmp_path, "--model")


@pytest.mark.parametrize(
    ("content", "words"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[" * 100_000, "is not JSON")]
)
def test_a_malformed_json_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """Broken JSON, bytes that are no text and nesting without an end."""
    (tmp_path / "settings.json").write_bytes(content)

    with pytest.raises(InvalidArgument, match=rf"settings\.json {words}"):
        read_json_object(tmp_path / "settings.json")


def test_a_json_file_must_hold_an_object(tmp_path: Path) -> None:
    """A list is refused; a missing file and a missing directory are told apart."""
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidArgument, match=r"config\.json must hold a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(NotFound, match=r"--model .* has no config\.json: name a Hugging Face checkpoint directory"):
        read_config(tmp_path)
    with pytest.raises(NotFound, match="--draft .*nowhere.* is not a directory"):
        read_config(tmp_path / "nowhere", "--draft")
