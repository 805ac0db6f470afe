"""The files of an entry: which tensors each holds, where they lie in it, and the rules that all of that keeps.

Touches no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.prefix.disk.json_fields import JsonFields
from coordinator.prefix.disk.safetensors_file import PlacedTensor, place
from services.errors import DataLoss
from services.layers import LayerRange
from services.messages.snapshots import MAX_TENSORS, SHA256_BYTES, SnapshotHeader, SnapshotOwner
from services.messages.tensors import ITEM_BYTES, MAX_RANK

LOGITS = "logits"
"""Belongs to the last stage."""

UNKNOWN_SHA256 = "0" * (2 * SHA256_BYTES)
"""Stands in until the digest is known, so that sizes can be told before."""

MAX_LAYERS = 65536
MAX_NAME = 256

_STAGE_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,4})(\.[A-Za-z0-9_]+)+")
_DRAFT_TENSOR = re.compile(r"draft(\.[A-Za-z0-9_]+)+")
_TAG = re.compile(r"\.([0-9a-f]{8})\.safetensors$")


class ManifestError(DataLoss):
    """A manifest that contradicts itself, the place where it lies, or the rules."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor. offset: of its first byte in the part's file. sha256: 64 hex digits over its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    sha256: str

    @property
    def layer(self) -> int | None:
        """Global layer index; None for logits and the draft's."""
        match = _STAGE_TENSOR.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def placed(self) -> PlacedTensor:
        return PlacedTensor(self.name, self.dtype, self.shape, self.offset)


@dataclass(frozen=True, slots=True)
class Part:
    """One file. layers: None for the draft's."""

    file: str
    owner: SnapshotOwner
    fingerprint: str
    layers: LayerRange | None
    tensors: tuple[StoredTensor, ...]

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.tensors[-1].offset + self.tensors[-1].size_bytes

    def with_digests(self, digests: tuple[bytes, ...]) -> Part:
        """digests: one for each tensor, in order."""
        tensors = zip(self.tensors, digests, strict=True)
        return replace(self, tensors=tuple(replace(tensor, sha256=digest.hex()) for tensor, digest in tensors))


def planned_part(header: SnapshotHeader, tag: str = "") -> Part:
    """The part that a header announces, its digests not known yet. Raises ManifestError for tensors without a place."""
    try:
        _, placed = place([(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors])
    except ValueError as error:
        raise ManifestError(str(error), field="tensors") from error
    return Part(
        file=part_file(header.owner, header.layers, tag),
        owner=header.owner,
        fingerprint=header.fingerprint,
        layers=header.layers,
        tensors=tuple(
            StoredTensor(one.name, one.dtype, one.shape, one.offset, one.size_bytes, UNKNOWN_SHA256) for one in placed
        ),
    )


def part_file(owner: SnapshotOwner, layers: LayerRange | None, tag: str = "") -> str:
    """The only name that a part's file may have. tag: 8 hex digits of its writer, or empty."""
    stem = "draft" if layers is None else f"{owner}-{layers.first}-{layers.last}"
    return f"{stem}.{tag}.safetensors" if tag else f"{stem}.safetensors"


def check_parts(parts: Sequence[Part], num_layers: int, *, has_draft: bool) -> None:
    """Raises ManifestError naming the first rule that is broken."""
    stages = [part for part in parts if part.owner is SnapshotOwner.STAGE]
    drafts = [part for part in parts if part.owner is SnapshotOwner.DRAFT]
    next_layer = 0
    for part in sorted(stages, key=lambda part: part.layers or LayerRange(0, 0)):
        if part.layers is None or part.layers.first != next_layer or len(part.layers) < 1:
            raise ManifestError(f"parts have layers {part.layers} where {next_layer} comes next", field="parts")
        next_layer = part.layers.last
    if next_layer != num_layers:
        raise ManifestError(f"parts end at layer {next_layer} of {num_layers}", field="parts")
    if len(drafts) != has_draft or any(part.layers is not None for part in drafts):
        raise ManifestError(
            f"{len(drafts)} parts belong to the draft, of which the lineage has {int(has_draft)}", field="parts"
        )
    if len({part.fingerprint for part in stages}) != 1:
        raise ManifestError("the stages' parts are of different models", field="fingerprint")
    for part in parts:
        _check_tensors(part, is_last=part.layers is not None and part.layers.last == num_layers)


def _check_tensors(part: Part, *, is_last: bool) -> None:
    where = part.file
    if not 1 <= len(part.tensors) <= MAX_TENSORS:
        raise ManifestError(f"{where} has {len(part.tensors)} tensors; expected 1 to {MAX_TENSORS}", field="tensors")
    match = _TAG.search(where)
    if where != part_file(part.owner, part.layers, match[1] if match else ""):
        raise ManifestError(f"file {where!r} is not the name of this part", field="file")
    if len({tensor.name for tensor in part.tensors}) < len(part.tensors):
        raise ManifestError(f"{where} names a tensor twice", field="tensors")
    position = part.tensors[0].offset
    for tensor in part.tensors:
        _check_tensor_name(part, tensor)
        if tensor.offset != position or tensor.size_bytes != tensor.placed.size_bytes:
            raise ManifestError(
                f"{where}: {tensor.name} takes {tensor.size_bytes} bytes at {tensor.offset} where its shape takes "
                f"{tensor.placed.size_bytes} and {position} comes next",
                field="offset",
            )
        position += tensor.size_bytes
    if is_last != any(tensor.name == LOGITS for tensor in part.tensors):
        raise ManifestError(f"{where}: logits belong to the last stage, and only to it", field="tensors")


def _check_tensor_name(part: Part, tensor: StoredTensor) -> None:
    if part.layers is None:
        fits = _DRAFT_TENSOR.fullmatch(tensor.name) is not None
    else:
        fits = tensor.name == LOGITS or (tensor.layer is not None and tensor.layer in part.layers)
    if not fits:
        raise ManifestError(f"{part.file}: tensor {tensor.name[:80]!r} does not belong there", field="name")


def part_to_json(part: Part) -> dict[str, Any]:
    layers = part.layers
    return {
        "file": part.file,
        "owner": str(part.owner),
        "fingerprint": part.fingerprint,
        "layers": None if layers is None else [layers.first, layers.last],
        "tensors": [asdict(tensor) for tensor in part.tensors],
    }


def part_from_json(fields: JsonFields) -> Part:
    """Raises ManifestError."""
    layers = fields.optional_integers("layers", 0, MAX_LAYERS)
    if layers is not None and (len(layers) != 2 or layers[0] >= layers[1]):
        raise ManifestError(f"layers are {layers}; expected [first, last)", field="layers")
    part = Part(
        file=fields.text("file", MAX_NAME),
        owner=SnapshotOwner(fields.choice("owner", [str(owner) for owner in SnapshotOwner])),
        fingerprint=fields.text("fingerprint", MAX_NAME),
        layers=None if layers is None else LayerRange(layers[0], layers[1]),
        tensors=tuple(_tensor_from_json(tensor) for tensor in fields.objects("tensors", 1, MAX_TENSORS)),
    )
    fields.end()
    return part


def _tensor_from_json(fields: JsonFields) -> StoredTensor:
    shape = tuple(fields.integers("shape", 0, 2**48))
    if len(shape) > MAX_RANK:
        raise ManifestError(f"shape has {len(shape)} extents, more than {MAX_RANK}", field="shape")
    tensor = StoredTensor(
        name=fields.text("name", MAX_NAME),
        dtype=fields.choice("dtype", list(ITEM_BYTES)),
        shape=shape,
        offset=fields.integer("offset", 0, 2**62),
        size_bytes=fields.integer("size_bytes", 0, 2**62),
        sha256=fields.hex("sha256", 2 * SHA256_BYTES),
    )
    fields.end()
    return tensor
