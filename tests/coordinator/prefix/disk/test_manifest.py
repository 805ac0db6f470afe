"""Manifests: there and back, and everything that must not be believed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.prefix.disk.manifest import (
    VERSION,
    ForeignManifest,
    Manifest,
    ManifestError,
    manifest_from_json,
    part_file,
    planned_part,
)
from coordinator.prefix.lineage import WINDOWS, Lineage
from services.layers import LayerRange
from services.messages.snapshots import SnapshotHeader
from tests.coordinator.prefix.disk.exports import DRAFT, DRAFTED, FINGERPRINTS, LAYERS, PLAIN, STAGE, ids, tensors

FLOAT8 = replace(DRAFTED, kv_dtype="float8_e4m3fn")
SLIDING = replace(DRAFTED, kept_rows=WINDOWS)


def manifest(lineage: Lineage = DRAFTED, count: int = 20, first: int = 8) -> Manifest:
    """A whole one."""
    token_ids = ids(count)
    places = [(STAGE, LayerRange(0, 4)), (STAGE, LayerRange(4, LAYERS))]
    parts = []
    for owner, layers in [*places, *([(DRAFT, None)] if lineage.draft else [])]:
        held = tensors(owner, layers, first, count)
        header = SnapshotHeader("", owner, FINGERPRINTS[owner], layers, first, count, None, tuple(held))
        planned = planned_part(header)
        parts.append(planned.with_digests(tuple(bytes([index]) * 32 for index in range(len(held)))))
    return Manifest(
        snapshot_id=lineage.snapshot_id(token_ids),
        lineage=lineage,
        model_name="Tiny 0.1B",
        num_layers=LAYERS,
        token_ids=token_ids,
        first_token=first,
        parent_id=lineage.snapshot_id(token_ids[:first]) if first else None,
        created=1_700_000_000.25,
        parts=tuple(parts),
    )


@pytest.mark.parametrize("lineage", [PLAIN, DRAFTED, FLOAT8, SLIDING])
@pytest.mark.parametrize("first", [0, 8])
def test_there_and_back(lineage: Lineage, first: int) -> None:
    """Nothing is lost, all tokens are in it."""
    original = manifest(lineage, first=first)
    data = original.to_json()
    assert manifest_from_json(data) == original
    assert json.loads(data)["token_ids"] == list(ids(20))


def test_other_keys_and_values_are_another_lineage() -> None:
    """Without one, names and manifests are those from before there was a choice: what was kept then stays of use."""
    assert PLAIN.key == "2004f066cf6315be42831267e632cc69"
    assert DRAFTED.snapshot_id((1, 2, 3)) == "e4b944683043888f3b0977a054ae428accde1adf"
    assert not {"kv_dtype", "kept_rows"} & json.loads(manifest().to_json()).keys()
    lineages = PLAIN, DRAFTED, FLOAT8, replace(FLOAT8, draft=None, draft_dtype=None), SLIDING
    assert len({lineage.key for lineage in lineages}) == 5
    value = json.loads(manifest(FLOAT8).to_json())
    assert value["kv_dtype"] == "float8_e4m3fn"
    for other in ({**value, "kv_dtype": "float16"}, {**value, "kv_dtype": None}, {**value, "kv_dtype": 5}):
        with pytest.raises(ManifestError, match="lineage|kv_dtype"):
            manifest_from_json(json.dumps(other).encode())
    del value["kv_dtype"]
    with pytest.raises(ManifestError, match="lineage is not that of"):
        manifest_from_json(json.dumps(value).encode())


def test_another_version_is_foreign_not_damaged() -> None:
    """Of the file's form or of the lineage's meaning."""
    value = json.loads(manifest().to_json())
    for name in ("version", "lineage_version"):
        for version in (VERSION + 1, 0):
            with pytest.raises(ForeignManifest, match=name):
                manifest_from_json(json.dumps({**value, name: version}).encode())
    # Whatever else it holds.
    with pytest.raises(ForeignManifest):
        manifest_from_json(b'{"version": 99, "blocks": []}')


Change = Callable[[dict[str, Any]], object]


def _part(value: dict[str, Any], index: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = value["parts"][index]
    return parsed


def _tensor(value: dict[str, Any], index: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = value["parts"][0]["tensors"][index]
    return parsed


BROKEN: dict[str, Change] = {
    "swapped ids": lambda v: v.update(snapshot_id=v["parent_id"], parent_id=v["snapshot_id"]),
    "another snapshot's id": lambda v: v.update(snapshot_id=DRAFTED.snapshot_id(ids(21))),
    "another parent's id": lambda v: v.update(parent_id=DRAFTED.snapshot_id(ids(7))),
    "another token": lambda v: v["token_ids"].__setitem__(3, 1),
    "a token less": lambda v: v["token_ids"].pop(),
    "a token too large": lambda v: v["token_ids"].__setitem__(3, 2**32),
    "a negative token": lambda v: v["token_ids"].__setitem__(3, -1),
    "a token that is true": lambda v: v["token_ids"].__setitem__(3, True),
    "a token that is text": lambda v: v["token_ids"].__setitem__(3, "5"),
    "no tokens": lambda v: v.update(token_ids=[], token_count=0),
    "another count": lambda v: v.update(token_count=19),
    "starts behind the end": lambda v: v.update(first_token=20),
    "starts before the start": lambda v: v.update(first_token=-1),
    "starts elsewhere": lambda v: v.update(first_token=7),
    "no parent": lambda v: v.update(parent_id=None),
    "a parent without need": lambda v: v.update(first_token=0),
    "another lineage": lambda v: v.update(lineage=PLAIN.key),
    "another model": lambda v: v.update(model="model-b"),
    "another text": lambda v: v.update(text="text-b"),
    "another dtype": lambda v: v.update(dtype="float32"),
    "no draft in the lineage": lambda v: v.update(draft=None),
    "created at no time": lambda v: v.update(created="yesterday"),
    "created before time": lambda v: v.update(created=-1),
    "created at infinity": lambda v: v.update(created=float("inf")),
    "created at nan": lambda v: v.update(created=float("nan")),
    "an unknown field": lambda v: v.update(compression="zstd"),
    "an unknown field in a part": lambda v: _part(v).update(url="http://x"),
    "an unknown field in a tensor": lambda v: _tensor(v).update(strides=[1]),
    "a missing field": lambda v: v.pop("created"),
    "a missing field in a part": lambda v: _part(v).pop("owner"),
    "a missing field in a tensor": lambda v: _tensor(v).pop("sha256"),
    "more layers": lambda v: v.update(num_layers=LAYERS + 1),
    "fewer layers": lambda v: v.update(num_layers=4),
    "no parts": lambda v: v.update(parts=[]),
    "a gap between parts": lambda v: v["parts"].pop(0),
    "no last stage": lambda v: v["parts"].pop(1),
    "no draft's part": lambda v: v["parts"].pop(2),
    "a part twice": lambda v: v["parts"].append(copy.deepcopy(_part(v))),
    "parts that are none": lambda v: v["parts"].append(3),
    "a file elsewhere": lambda v: _part(v).update(file="../../stage-0-4.safetensors"),
    "a file at the root": lambda v: _part(v).update(file="/etc/passwd"),
    "another part's file": lambda v: _part(v).update(file="stage-4-6.safetensors"),
    "a file with a nul": lambda v: _part(v).update(file="stage-0-4.safetensors\0"),
    "an unknown owner": lambda v: _part(v).update(owner="teacher"),
    "another owner": lambda v: _part(v).update(owner="draft"),
    "a draft with layers": lambda v: _part(v, 2).update(layers=[0, 1]),
    "a stage without layers": lambda v: _part(v).update(layers=None),
    "empty layers": lambda v: _part(v).update(layers=[0, 0]),
    "layers backwards": lambda v: _part(v).update(layers=[4, 0]),
    "three layers": lambda v: _part(v).update(layers=[0, 4, 6]),
    "parts of two models": lambda v: _part(v).update(fingerprint="model-b"),
    "no tensors": lambda v: _part(v).update(tensors=[]),
    "another layer's tensor": lambda v: _tensor(v).update(name="layers.5.k"),
    "a tensor of no layer": lambda v: _tensor(v).update(name="embedding"),
    "a tensor with a path": lambda v: _tensor(v).update(name="layers.0.../k"),
    "a tensor twice": lambda v: _tensor(v).update(name=_tensor(v, 1)["name"]),
    "logits too early": lambda v: _tensor(v).update(name="logits"),
    "no logits": lambda v: _part(v, 1)["tensors"].pop(),
    "an unknown type": lambda v: _tensor(v).update(dtype="float8"),
    "another type": lambda v: _tensor(v).update(dtype="float32"),
    "another shape": lambda v: _tensor(v).update(shape=[2, 11, 4]),
    "a negative extent": lambda v: _tensor(v).update(shape=[-2, -12, 4]),
    "too many extents": lambda v: _tensor(v).update(shape=[2, 12, 4, 1, 1]),
    "another size": lambda v: _tensor(v).update(size_bytes=1),
    "another place": lambda v: _tensor(v, 1).update(offset=0),
    "a short digest": lambda v: _tensor(v).update(sha256="ab"),
    "a digest that is none": lambda v: _tensor(v).update(sha256="g" * 64),
    "a digest in capitals": lambda v: _tensor(v).update(sha256="A" * 64),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_contradicts_itself_is_refused(fault: str) -> None:
    """ManifestError, and not because another version wrote it."""
    value = json.loads(manifest().to_json())
    BROKEN[fault](value)
    with pytest.raises(ManifestError) as caught:
        manifest_from_json(json.dumps(value).encode())
    assert not isinstance(caught.value, ForeignManifest)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b"{}", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"version": true}'],
    ids=lambda data: repr(data[:8]),
)
def test_what_is_no_manifest_at_all(data: bytes) -> None:
    """Nothing but ManifestError, whatever the file holds."""
    with pytest.raises(ManifestError):
        manifest_from_json(data)


def test_random_damage_never_gets_through_unnoticed() -> None:
    """Flipped bits raise ManifestError, or change a digest (which a restore finds) or what nothing depends on."""
    rng = random.Random(2)
    original = manifest()
    data = original.to_json()
    for _ in range(1500):
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            parsed = manifest_from_json(bytes(damaged))
        except ManifestError:
            continue
        assert parsed.token_ids == original.token_ids
        assert parsed.lineage == original.lineage
        assert [part.file for part in parsed.parts] == [part.file for part in original.parts]


def test_what_must_not_be_read_is_not_written() -> None:
    """The rules hold on the way out too; a name for people is made fit."""
    original = manifest()
    for wrong in (
        replace(original, first_token=0),
        replace(original, parent_id=None),
        replace(original, snapshot_id=PLAIN.snapshot_id(original.token_ids)),
        replace(original, parts=original.parts[1:]),
        replace(original, token_ids=original.token_ids[:-1]),
    ):
        with pytest.raises(ManifestError):
            wrong.to_json()
    odd = manifest_from_json(replace(original, model_name="a\nb\x1b[31m" + "c" * 1000).to_json())
    assert odd.model_name.startswith("a?b?[31mcc")


def test_a_parts_name_says_what_it_is() -> None:
    """Owner and layers, and whose it is where several may write at once."""
    assert part_file(STAGE, LayerRange(0, 6)) == "stage-0-6.safetensors"
    assert part_file(DRAFT, None) == "draft.safetensors"
    assert part_file(STAGE, LayerRange(3, 6), "0badcafe") == "stage-3-6.0badcafe.safetensors"
