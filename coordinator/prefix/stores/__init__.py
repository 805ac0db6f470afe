"""Where prefix snapshots lie: a store keeps each entry's files and must not know what is in them.

Every other file here is a kind of store: `SCHEMES` names its URL schemes, `open_location(location, scheme, field)`
makes a `Store`, and `open_store` finds it by the scheme. Stores block, so callers use threads; a store may be shared
between threads and between processes.
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from services.errors import FailedPrecondition, InvalidArgument

MANIFEST = "manifest.json"
USAGE = "usage.json"

MAX_MANIFEST_BYTES = 128 << 20
"""Ten million tokens fit in."""

MAX_USAGE_BYTES = 4096

LINEAGE_NAME = re.compile(r"[0-9a-f]{32}")
ENTRY_NAME = re.compile(r"[0-9a-f]{40}")
PART_NAME = re.compile(r"(stage-(0|[1-9][0-9]{0,4})-[1-9][0-9]{0,4}|draft)(\.[0-9a-f]{8})?\.safetensors")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class StoreError(FailedPrecondition):
    """The store cannot be read or written now: disk full, permission lost, network gone."""


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Where an entry lies: its lineage's key and its snapshot id, the names of its two directories.

    Raises InvalidArgument for names that a store doesn't use itself.
    """

    lineage: str
    snapshot_id: str

    def __post_init__(self) -> None:
        if not LINEAGE_NAME.fullmatch(self.lineage):
            raise InvalidArgument(f"lineage {self.lineage[:80]!r} must be 32 hex digits", field="lineage")
        if not ENTRY_NAME.fullmatch(self.snapshot_id):
            raise InvalidArgument(f"snapshot_id {self.snapshot_id[:80]!r} must be 40 hex digits", field="snapshot_id")


def check_part_name(file: str) -> str:
    """Return the file name of a part. Raises InvalidArgument for any other name, above all one that leads elsewhere."""
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
        """The size of the file."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return the bytes at an offset; fewer where the file ends before."""

    def close(self) -> None:
        """Close the file. Safe to call twice."""


class PartWriter(Protocol):
    """One part's file, open for writing from front to back."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append the data, all of it."""

    def close(self) -> None:
        """End the file and make it durable."""


class EntryWriter(Protocol):
    """An entry that is being written. Nothing of it can be seen before `commit`; `commit` or `abort` ends it."""

    @property
    def tag(self) -> str:
        """The tag that its parts' names carry, so that they don't clash with another writer's; may be empty."""

    def open_part(self, file: str) -> PartWriter:
        """Begin to write a part. Raises InvalidArgument for a file name that no part has."""

    def commit(self, manifest: bytes) -> bool:
        """Put the entry in its place once all parts are closed; False, and it is dropped, when another was sooner."""

    def abort(self) -> None:
        """Remove what was written. Safe to call after `commit`, which it doesn't undo; never raises."""


class Store(Protocol):
    """Entries in one place. All methods raise StoreError when it cannot be used, and NotFound for what isn't there."""

    @property
    def location(self) -> str:
        """The path or URL, as people write it."""

    @property
    def refresh_interval_s(self) -> float:
        """How many seconds a listing is good for: 0 where listing costs next to nothing."""

    def check(self) -> None:
        """Create the place where it is missing, and try to write. Raises StoreError naming the option otherwise."""

    def exists(self) -> bool:
        """Tell whether there is anything at the location."""

    def lineages(self) -> list[str]:
        """Return the keys of the lineages that have entries; other names are passed over."""

    def entries(self, lineage: str) -> dict[str, str]:
        """Return the committed entries of a lineage: snapshot id to a stamp that changes when the entry is replaced."""

    def begin(self, key: EntryKey) -> EntryWriter:
        """Begin to write an entry."""

    def read_manifest(self, key: EntryKey) -> bytes:
        """Return the manifest as written."""

    def open_part(self, key: EntryKey, file: str) -> PartReader:
        """Open a part for reading."""

    def size_bytes(self, key: EntryKey) -> int:
        """Return the size of all files of an entry; 0 when there is none."""

    def remove(self, key: EntryKey) -> bool:
        """Take an entry away in one step, then free its bytes; False when it wasn't there."""

    def read_usage(self, key: EntryKey) -> bytes | None:
        """Return the record of an entry's use; None when it has none."""

    def write_usage(self, key: EntryKey, usage: bytes) -> None:
        """Replace the record of an entry's use; nothing happens when the entry is gone."""

    def sweep(self) -> int:
        """Remove what killed writers left, never what a live one is writing; return how many entries those were."""


def open_store(location: str | Path, field: str | None = None) -> Store:
    """Return the store at a path or URL; nothing is touched before it is used.

    field: the option to name in errors. A scheme that no kind of store names is left to fsspec.

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
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    kinds = {name: module for module in modules for name in module.SCHEMES}
    if scheme in kinds:
        store: Store = kinds[scheme].open_location(text, scheme, field)
    else:
        store = import_module(f"{__name__}.remote").open_location(text, scheme, field, other_schemes=kinds)
    return store
