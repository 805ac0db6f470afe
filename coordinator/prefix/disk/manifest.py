"""What one entry on disk holds: whose state behind which tokens, its files, and every tensor with its place and digest.

All of it is checked when it is written and when it is read, so whoever has a `Manifest` may rely on it. What another
version wrote is a `ForeignManifest`: not damaged, but of no use here. Touches no files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.prefix import lineage as lineages
from coordinator.prefix.disk.json_fields import JsonFields
from coordinator.prefix.disk.safetensors_file import PlacedTensor, place
from coordinator.prefix.lineage import Lineage
from services.dtypes import ITEM_BYTES
from services.errors import DataLoss
from services.layers import LayerRange
from services.messages.snapshots import MAX_TENSORS, SHA256_BYTES, SnapshotHeader, SnapshotOwner
from services.messages.tensors import MAX_RANK

VERSION = 1
"""The version of the manifest's form."""

LOGITS = "logits"
"""The tensor that belongs to the last stage, and only to it."""

UNKNOWN_SHA256 = "0" * (2 * SHA256_BYTES)
"""Stands for a digest that is not known yet, so that the manifest's size can be told before."""

MAX_TOKEN = 2**32 - 1
MAX_LAYERS = 65536
MAX_NAME = 256
_MAX_PARTS = 1025

_STAGE_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,4})(\.[A-Za-z0-9_]+)+")
_DRAFT_TENSOR = re.compile(r"draft(\.[A-Za-z0-9_]+)+")
_TAG = re.compile(r"\.([0-9a-f]{8})\.safetensors$")


class ManifestError(DataLoss):
    """A manifest contradicts itself, the place where it lies, or the rules."""


class ForeignManifest(ManifestError):
    """A manifest is of another version."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a part. offset: of its first byte in the part's file. sha256: 64 hex digits over its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    sha256: str

    @property
    def layer(self) -> int | None:
        """The tensor's layer by global index; None for the logits and for the draft's tensors."""
        match = _STAGE_TENSOR.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def placed(self) -> PlacedTensor:
        """The tensor as a safetensors header describes it."""
        return PlacedTensor(self.name, self.dtype, self.shape, self.offset)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of an entry: what one worker exported. layers: the worker's; None for the draft's part."""

    file: str
    owner: SnapshotOwner
    fingerprint: str
    layers: LayerRange | None
    tensors: tuple[StoredTensor, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.tensors[-1].offset + self.tensors[-1].size_bytes

    def with_digests(self, digests: tuple[bytes, ...]) -> Part:
        """Return the part with these digests, one for each tensor in order."""
        tensors = zip(self.tensors, digests, strict=True)
        return replace(self, tensors=tuple(replace(tensor, sha256=digest.hex()) for tensor, digest in tensors))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one entry. The fields that are not described here are those of a `SnapshotHeader`.

    model_name: what people call the model. num_layers: the layers of the target. token_ids: all tokens of the prefix,
    from the first on. created: when it was written, in seconds since 1970. parts: its files.
    """

    snapshot_id: str
    lineage: Lineage
    model_name: str
    num_layers: int
    token_ids: tuple[int, ...]
    first_token: int
    parent_id: str | None
    created: float
    parts: tuple[Part, ...]

    def check(self) -> None:
        """Check the rules that fields keep among each other. Raises ManifestError naming the first broken one."""
        count = len(self.token_ids)
        if not 0 <= self.first_token < count:
            raise ManifestError(f"first_token is {self.first_token} of {count} tokens", field="first_token")
        if (self.parent_id is None) != (self.first_token == 0):
            raise ManifestError(
                f"first_token is {self.first_token} and parent_id {self.parent_id!r}: a parent holds the tokens before "
                "first_token",
                field="parent_id",
            )
        if self.parent_id is not None and self.parent_id != self.lineage.snapshot_id(
            self.token_ids[: self.first_token]
        ):
            raise ManifestError(f"parent_id {self.parent_id} is not that of the tokens before", field="parent_id")
        if self.snapshot_id != self.lineage.snapshot_id(self.token_ids):
            raise ManifestError(f"snapshot_id {self.snapshot_id} is not that of its tokens", field="snapshot_id")
        _check_parts(self.parts, self.num_layers, has_draft=self.lineage.draft is not None)

    def to_json(self) -> bytes:
        """Return the manifest as it is written. Raises ManifestError for one that breaks a rule."""
        self.check()
        value = {
            "version": VERSION,
            "lineage_version": lineages.VERSION,
            "snapshot_id": self.snapshot_id,
            "lineage": self.lineage.key,
            **self.lineage.as_json(),
            "model_name": "".join(letter if letter.isprintable() else "?" for letter in self.model_name[:MAX_NAME]),
            "num_layers": self.num_layers,
            "token_count": len(self.token_ids),
            "first_token": self.first_token,
            "parent_id": self.parent_id,
            "created": self.created,
            "parts": [_part_to_json(part) for part in self.parts],
            "token_ids": self.token_ids,
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def manifest_from_json(data: bytes) -> Manifest:
    """Return the manifest that was written so.

    Raises ForeignManifest for another version's, ManifestError for anything that is not exactly as it must be.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is not JSON: {error}") from error
    fields = JsonFields(value, "manifest", ManifestError)
    for name, own_version in (("version", VERSION), ("lineage_version", lineages.VERSION)):
        version = fields.integer(name, 0, 2**31)
        if version != own_version:
            raise ForeignManifest(f"the manifest has {name} {version}, this release {own_version}", field=name)
    lineage = Lineage(
        model=fields.text("model", MAX_NAME),
        dtype=fields.text("dtype", MAX_NAME),
        text=fields.text("text", MAX_NAME, empty=True),
        draft=fields.optional_text("draft", MAX_NAME),
        draft_dtype=fields.optional_text("draft_dtype", MAX_NAME),
        kv_dtype=fields.text("kv_dtype", MAX_NAME) if fields.has("kv_dtype") else None,
        kept_rows=fields.text("kept_rows", MAX_NAME) if fields.has("kept_rows") else None,
    )
    if fields.hex("lineage", 32) != lineage.key:
        raise ManifestError(
            "lineage is not that of model, dtype, text, draft, draft_dtype, kv_dtype and kept_rows", field="lineage"
        )
    token_ids = tuple(fields.integers("token_ids", 0, MAX_TOKEN))
    if fields.integer("token_count", 1, MAX_TOKEN) != len(token_ids):
        raise ManifestError(f"token_count is not {len(token_ids)}, the number of token_ids", field="token_count")
    manifest = Manifest(
        snapshot_id=fields.hex("snapshot_id", 40),
        lineage=lineage,
        model_name=fields.text("model_name", MAX_NAME, empty=True),
        num_layers=fields.integer("num_layers", 1, MAX_LAYERS),
        token_ids=token_ids,
        first_token=fields.integer("first_token", 0, MAX_TOKEN),
        parent_id=fields.optional_hex("parent_id", 40),
        created=fields.number("created", 0, 2.0**40),
        parts=tuple(_part_from_json(part) for part in fields.objects("parts", 1, _MAX_PARTS)),
    )
    fields.end()
    manifest.check()
    return manifest


def planned_part(header: SnapshotHeader, tag: str = "") -> Part:
    """Return the part that an export's header announces, its digests not known yet.

    tag: of the entry's writer, for the file's name. Raises ManifestError for tensors that a file cannot hold.
    """
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
            StoredTensor(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.size_bytes, UNKNOWN_SHA256)
            for tensor in placed
        ),
    )


def part_file(owner: SnapshotOwner, layers: LayerRange | None, tag: str = "") -> str:
    """Return the only name that a part's file may have. tag: 8 hex digits of its writer, or empty."""
    stem = "draft" if layers is None else f"{owner}-{layers.first}-{layers.last}"
    return f"{stem}.{tag}.safetensors" if tag else f"{stem}.safetensors"


def _check_parts(parts: Sequence[Part], num_layers: int, *, has_draft: bool) -> None:
    """Check that the parts hold every layer once, and the draft's state if there is one.

    Raises ManifestError naming the first rule that is broken.
    """
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


def _part_to_json(part: Part) -> dict[str, Any]:
    layers = part.layers
    return {
        "file": part.file,
        "owner": str(part.owner),
        "fingerprint": part.fingerprint,
        "layers": None if layers is None else [layers.first, layers.last],
        "tensors": [asdict(tensor) for tensor in part.tensors],
    }


def _part_from_json(fields: JsonFields) -> Part:
    """Return the part that was written so. Raises ManifestError."""
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
