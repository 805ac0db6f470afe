"""Where prefix snapshots lie: a store keeps each entry's files and knows nothing of what is in them.

`open_store` chooses the module by URL scheme. All of it blocks, so callers use threads; a store may be shared between
threads and between processes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from services.errors import FailedPrecondition, InvalidArgument

MANIFEST = "manifest.json"
USAGE = "usage.json"

# Ten million tokens fit in.
MAX_MANIFEST_BYTES = 128 << 20

LINEAGE_NAME = re.compile(r"[0-9a-f]{32}")
ENTRY_NAME = re.compile(r"[0-9a-f]{40}")
PART_NAME = re.compile(r"(stage-(0|[1-9][0-9]{0,4})-[1-9][0-9]{0,4}|draft)(\.[0-9a-f]{8})?\.safetensors")

# Schemes that have a module of their own. All others are left to fsspec.
_MODULES = {"": "directory", "file": "directory"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class StoreError(FailedPrecondition):
    """The store cannot be read or written now: disk full, permission lost, network gone."""


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Where an entry lies. Raises InvalidArgument for names that the store doesn't use itself."""

    lineage: str
    snapshot_id: str

    def __post_init__(self) -> None:
        if not LINEAGE_NAME.fullmatch(self.lineage):
            raise InvalidArgument(f"lineage {self.lineage[:80]!r} must be 32 hex digits", field="lineage")
        if not ENTRY_NAME.fullmatch(self.snapshot_id):
            raise InvalidArgument(f"snapshot_id {self.snapshot_id[:80]!r} must be 40 hex digits", field="snapshot_id")


def check_part_name(file: str) -> str:
    """Raises InvalidArgument for a file name that no part has, above all for one that leads elsewhere."""
    if not PART_NAME.fullmatch(file):
        raise InvalidArgument(
            f"file {file[:80]!r} is no part's name: expected stage-FIRST-LAST.safetensors or draft.safetensors",
            field="file",
        )
    return file


class PartReader(Protocol):
    """One part's file, open for reading; several threads may read at once."""

    @property
    def size_bytes(self) -> int:
        """Of the file."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """The bytes at an offset; fewer where the file ends before."""

    def close(self) -> None:
        """Safe to call twice."""


class PartWriter(Protocol):
    """One part's file, open for writing from front to back."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of it."""

    def close(self) -> None:
        """Make it durable."""


class EntryWriter(Protocol):
    """An entry on its way. Nothing of it can be seen before `commit`; one of `commit` and `abort` ends it."""

    @property
    def tag(self) -> str:
        """What the names of its parts must carry so that they don't clash with another writer's; may be empty."""

    def open_part(self, file: str) -> PartWriter:
        """Begin a part."""

    def commit(self, manifest: bytes) -> bool:
        """Put the entry in its place, all parts being closed. False: another writer was sooner, ours is dropped."""

    def abort(self) -> None:
        """Leave nothing behind. Safe to call after `commit`; never raises."""


class Store(Protocol):
    """All raise NotFound for what isn't there, and StoreError."""

    @property
    def location(self) -> str:
        """As people write it."""

    @property
    def refresh_interval_s(self) -> float:
        """How long a listing is good for: 0 where listing costs next to nothing."""

    def check(self) -> None:
        """Create what is missing and try to write. Raises StoreError naming the option when that fails."""

    def exists(self) -> bool:
        """Whether there is anything at the location."""

    def lineages(self) -> list[str]:
        """Their keys; other names are passed over."""

    def entries(self, lineage: str) -> dict[str, str]:
        """Committed entries: name to a stamp, never empty, that changes when the entry is replaced."""

    def begin(self, key: EntryKey) -> EntryWriter:
        """Begin to write an entry."""

    def read_manifest(self, key: EntryKey) -> bytes:
        """The manifest as written."""

    def open_part(self, key: EntryKey, file: str) -> PartReader:
        """Open a part for reading."""

    def size_bytes(self, key: EntryKey) -> int:
        """Of all files of an entry; 0 when there is none."""

    def remove(self, key: EntryKey) -> bool:
        """Take an entry away in one step, then free its bytes. False: it wasn't there."""

    def read_usage(self, key: EntryKey) -> bytes | None:
        """The record of its use, None when it has none."""

    def write_usage(self, key: EntryKey, usage: bytes) -> None:
        """Replace the record of its use; nothing happens when the entry is gone."""

    def sweep(self) -> int:
        """Remove what killed writers left, never what a live one is writing. Returns how many entries those were."""


def open_store(location: str | Path, field: str | None = None) -> Store:
    """The store at a path or URL; nothing is touched before it is used. field: the option to name in errors.

    Raises:
        InvalidArgument: the scheme is unknown or cannot be written to, or the URL is malformed.
        FailedPrecondition: a package that the scheme needs is not installed.
    """
    text = str(location)
    match = _SCHEME.match(text) if isinstance(location, str) else None
    scheme = match[1].lower() if match else ""
    field = field or ("--kv-cache-url" if match else "--kv-cache-dir")
    if not text:
        raise InvalidArgument(f"{field} is empty: name a directory or a URL like s3://bucket/path", field=field)
    module = import_module(f"coordinator.prefix.stores.{_MODULES.get(scheme, 'remote')}")
    store: Store = module.open_location(text, scheme, field)
    return store
