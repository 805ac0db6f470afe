"""What one entry on disk holds: whose state behind which tokens, and every tensor with its place and digest.

All of it is checked when it is written and when it is read, so whoever has a `Manifest` may rely on it. What another
version wrote is `ForeignManifest`: not damaged, but nothing for us. Touches no files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from coordinator.prefix import lineage as lineages
from coordinator.prefix.disk.json_fields import JsonFields
from coordinator.prefix.disk.parts import (
    MAX_LAYERS,
    MAX_NAME,
    ManifestError,
    Part,
    check_parts,
    part_from_json,
    part_to_json,
)
from coordinator.prefix.lineage import Lineage

VERSION = 1
"""Of this file's form."""

MAX_TOKEN = 2**32 - 1
_MAX_PARTS = 1025


class ForeignManifest(ManifestError):
    """A manifest of another version."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One entry. token_ids: all of them, from the first on. created: seconds since 1970. Other fields as in headers."""

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
        """Raises ManifestError naming the first rule that is broken."""
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
        check_parts(self.parts, self.num_layers, has_draft=self.lineage.draft is not None)

    def to_json(self) -> bytes:
        """Raises ManifestError for what must not be written."""
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
            "parts": [part_to_json(part) for part in self.parts],
            "token_ids": self.token_ids,
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def manifest_from_json(data: bytes) -> Manifest:
    """Raises ForeignManifest for another version's, ManifestError for anything that is not exactly as it must be."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is not JSON: {error}") from error
    fields = JsonFields(value, "manifest", ManifestError)
    for name, known in (("version", VERSION), ("lineage_version", lineages.VERSION)):
        version = fields.integer(name, 0, 2**31)
        if version != known:
            raise ForeignManifest(f"the manifest has {name} {version}, this release {known}", field=name)
    lineage = Lineage(
        model=fields.text("model", MAX_NAME),
        dtype=fields.text("dtype", MAX_NAME),
        text=fields.text("text", MAX_NAME, empty=True),
        draft=fields.optional_text("draft", MAX_NAME),
        draft_dtype=fields.optional_text("draft_dtype", MAX_NAME),
        kv_dtype=fields.text("kv_dtype", MAX_NAME) if fields.has("kv_dtype") else None,
    )
    if fields.hex("lineage", 32) != lineage.key:
        raise ManifestError(
            "lineage is not that of model, dtype, text, draft, draft_dtype and kv_dtype", field="lineage"
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
        parts=tuple(part_from_json(part) for part in fields.objects("parts", 1, _MAX_PARTS)),
    )
    fields.end()
    manifest.check()
    return manifest
