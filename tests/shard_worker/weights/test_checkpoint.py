"""Checkpoint directories: what is read, what is refused, and the fingerprint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import DataLoss, FlashsplitError, InvalidArgument, NotFound, Unimplemented
from services.model.gguf.container import read_gguf
from shard_worker.weights import gguf_checkpoint, safetensors_checkpoint
from shard_worker.weights.checkpoint import read_file_ahead
from shard_worker.weights.opening import open_checkpoint
from tests.reference import checkpoints, storage
from tests.reference.gguf_files import all_of, write_gguf
from tests.shard_worker.packed import Packed
from tests.shard_worker.tiny import Tiny

HEAD = "lm_head.weight"


@pytest.fixture
def sharded(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a checkpoint in many files, free to damage."""
    return Path(shutil.copytree(tiny.path("qwen3_5-nested"), tmp_path / "sharded"))


@pytest.fixture
def single(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, free to damage."""
    return Path(shutil.copytree(tiny.path("qwen3"), tmp_path / "single"))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-nested"])
def test_tensors_are_what_is_stored(tiny: Tiny, name: str) -> None:
    """Names, shapes, sizes, values and single rows are those of the files, in one file or many."""
    expected = storage.load_tensors(tiny.path(name))
    checkpoint = open_checkpoint(tiny.path(name))

    assert set(checkpoint.headers) == set(expected)
    for stored, tensor in expected.items():
        assert checkpoint.shape(stored) == tensor.shape
        assert checkpoint.size_bytes(stored) == tensor.numel() * tensor.element_size()
        assert torch.equal(checkpoint.tensor(stored), tensor)
    assert torch.equal(checkpoint.rows(HEAD, (5, 0, 5)), expected[HEAD][[5, 0, 5]])


def test_reading_rows_leaves_nothing_behind(tiny: Tiny) -> None:
    """A draft reads two with every block, for as long as its worker runs."""
    checkpoint = open_checkpoint(tiny.path("qwen3"))
    checkpoint.rows(HEAD, (5,))
    before = sys.getallocatedblocks()
    for _ in range(1000):
        checkpoint.rows(HEAD, (5, 0))
    assert sys.getallocatedblocks() - before < 500


def test_stored_dtypes_are_kept_and_foreign_ones_named(tmp_path: Path) -> None:
    """The three float types of published checkpoints are read as they are; any other is refused with its name."""
    tensors = {
        "full": torch.ones(2),
        "brain": torch.ones(2, dtype=torch.bfloat16),
        "half": torch.ones(2, dtype=torch.float16),
        "packed": torch.ones(2, dtype=torch.uint8),
        "scaled": torch.ones(2).to(torch.float8_e4m3fn),
    }
    storage.write_config(tmp_path, {})
    storage.save_tensors(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)

    for name in ("full", "brain", "half"):
        assert checkpoint.dtype(name) == checkpoint.tensor(name).dtype == tensors[name].dtype
    with pytest.raises(Unimplemented, match="packed .* U8"):
        checkpoint.dtype("packed")
    with pytest.raises(Unimplemented, match="scaled .* F8_E4M3"):
        checkpoint.size_bytes("scaled")


def test_a_missing_directory_or_config_is_named(tmp_path: Path) -> None:
    """The error names the path and the option that it came from."""
    with pytest.raises(NotFound, match="--draft .*nowhere.* is not a directory") as caught:
        open_checkpoint(tmp_path / "nowhere", "--draft")
    assert caught.value.where["field"] == "--draft"
    with pytest.raises(NotFound, match=r"has no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[1]", "must hold a JSON object"), ("\udcff", "is not JSON")]
)
def test_a_malformed_config_is_refused(single: Path, text: str, words: str) -> None:
    """Broken JSON, JSON that isn't an object and bytes that aren't text are told apart from a missing file."""
    (single / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(InvalidArgument, match=rf"config\.json {words}"):
        open_checkpoint(single)


def set_map(value: Any) -> Callable[[Path], None]:
    return lambda path: (path / storage.INDEX).write_text(json.dumps(value)) and None


def truncate(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def scramble(path: Path) -> None:
    sorted(path.glob("*.safetensors"))[1].write_bytes(b"not safetensors at all")


def remove(path: Path) -> None:
    sorted(path.glob("*.safetensors"))[1].unlink()


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (truncate, DataLoss, r"model-00002-.* cannot be read"),
        (scramble, DataLoss, r"model-00002-.* cannot be read"),
        (remove, NotFound, r"model-00002-.* is missing"),
        (set_map({}), InvalidArgument, "has no weight_map"),
        (set_map({"weight_map": []}), InvalidArgument, "has no weight_map"),
        (set_map({"weight_map": {HEAD: "../model.safetensors"}}), InvalidArgument, r"'\.\./model\.safetensors'"),
        (set_map({"weight_map": {HEAD: "/etc/passwd"}}), InvalidArgument, "'/etc/passwd'"),
        (set_map({"weight_map": {HEAD: "sub/model.safetensors"}}), InvalidArgument, "'sub/model.safetensors'"),
        (lambda path: (path / storage.INDEX).write_text("{"), InvalidArgument, "is not JSON"),
    ],
)
def test_damaged_files_are_named(
    sharded: Path, damage: Callable[[Path], None], kind: type[FlashsplitError], words: str
) -> None:
    """A truncated, foreign or missing weight file and an index that leads elsewhere are refused with their name."""
    damage(sharded)

    with pytest.raises(kind, match=words):
        open_checkpoint(sharded)


def test_a_directory_without_weights_is_refused(single: Path) -> None:
    """A config alone is no checkpoint."""
    (single / storage.SINGLE).unlink()

    with pytest.raises(NotFound, match=r"model\.safetensors is missing"):
        open_checkpoint(single)


def test_copies_have_one_fingerprint(single: Path, tiny: Tiny) -> None:
    """Neither the path nor file times count."""
    (single / storage.SINGLE).touch()

    assert open_checkpoint(single).fingerprint == open_checkpoint(tiny.path("qwen3")).fingerprint


def test_other_weights_under_equal_headers_have_another_fingerprint(tiny: Tiny, tmp_path: Path) -> None:
    """Two trainings of one architecture, whose files differ in contents alone, are told apart."""
    other = checkpoints.write_qwen3(tmp_path / "other", seed=1)
    one, two = open_checkpoint(tiny.path("qwen3")), open_checkpoint(other)

    assert one.config == two.config
    assert one.headers == two.headers
    assert one.fingerprint != two.fingerprint


def test_another_config_has_another_fingerprint(single: Path, tiny: Tiny) -> None:
    """The same weights read another way are another model."""
    storage.edit_config(single, lambda config: config.update(rms_norm_eps=1e-5))

    assert open_checkpoint(single).fingerprint != open_checkpoint(tiny.path("qwen3")).fingerprint


@pytest.mark.parametrize("kind", ["dense", "gguf", "packed", "experts"])
def test_what_is_read_ahead_are_the_tensors(
    tiny: Tiny, sharded: Path, tmp_path: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Those of the names, and all parts of a packed matrix; none of it is read otherwise."""
    if kind == "gguf":
        path = write_gguf(checkpoints.write_qwen3(tmp_path / "small", hidden=64), tmp_path / "a.gguf", all_of("Q8_0"))
    else:
        paths = {"dense": sharded, "packed": packed("fp8")[0], "experts": tiny.path("gpt_oss-mxfp4")}
        path = paths[kind]
    asked: list[bytes] = []

    def read(file: Path, ranges: Iterable[tuple[int, int]]) -> None:
        asked.extend(file.read_bytes()[begin:end] for begin, end in ranges)

    for module in (gguf_checkpoint, safetensors_checkpoint):
        monkeypatch.setattr(module, "read_file_ahead", read)
    checkpoint = open_checkpoint(path)
    names = [name for name in checkpoint.headers if ".layers.1.mlp." in name]
    checkpoint.read_ahead(names)
    if kind == "gguf":
        stored = read_gguf(path).tensors
        tensors = [stored[f"blk.1.ffn_{part}.weight"] for part in ("gate", "up", "down")]
        expected = [path.read_bytes()[one.begin : one.begin + one.nbytes] for one in tensors]
    else:
        loaded = storage.load_tensors(path)
        own = [tensor for name, tensor in loaded.items() if ".layers.1.mlp." in name]
        expected = [tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in own]
    assert sorted(asked) == sorted(expected)
    assert len(expected) >= 3


def test_reading_ahead_leaves_errors_to_reading(tmp_path: Path) -> None:
    read_file_ahead(tmp_path / "none", [(0, 1)])
    whole = tmp_path / "whole"
    whole.write_bytes(b"x")
    read_file_ahead(whole, [(0, 1), (5, 100)])
