"""Entries of a store as the coordinator knows them: how they are read and checked, and what makes one unreadable.

All of it blocks. It holds no state; `entry_tree` remembers which entries there are.
"""

from __future__ import annotations

import array
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.prefix.disk.manifest import ForeignManifest, Manifest, ManifestError, Part, manifest_from_json
from coordinator.prefix.lineage import Lineage, as_bytes
from coordinator.prefix.stores import EntryKey, Store, StoreError
from services.errors import FlashsplitError, NotFound


@dataclass(frozen=True, slots=True)
class EntryUsage:
    """How an entry was used.

    hits: how often it was restored. last_used: when it, or an entry that builds on it, was restored last, in seconds
    since 1970; 0 where that never was.
    """

    hits: int = 0
    last_used: float = 0.0

    def to_json(self) -> bytes:
        """Return the record as a store keeps it."""
        return json.dumps({"hits": self.hits, "last_used": self.last_used}).encode()


@dataclass(frozen=True, slots=True, eq=False)
class DiskEntry:
    """A readable entry; the fields that are not described here are its manifest's.

    tokens: the token ids as little-endian 32-bit numbers. size_bytes: the size of all its files. stamp: the store's
    stamp of this version of the entry.
    """

    lineage: Lineage
    snapshot_id: str
    model_name: str
    num_layers: int
    tokens: bytes = field(repr=False)
    first_token: int
    parent_id: str | None
    created: float
    parts: tuple[Part, ...] = field(repr=False)
    size_bytes: int
    stamp: str
    usage: EntryUsage = EntryUsage()

    @property
    def key(self) -> EntryKey:
        """Where the entry lies."""
        return EntryKey(self.lineage.key, self.snapshot_id)

    @property
    def parent_key(self) -> EntryKey | None:
        """Where the entry lies that this one builds on; None where it builds on none."""
        return None if self.parent_id is None else EntryKey(self.lineage.key, self.parent_id)

    @property
    def token_count(self) -> int:
        """How many tokens the prefix has."""
        return len(self.tokens) // 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the prefix."""
        return tuple(array.array("I", self.tokens))

    @property
    def tokens_gained(self) -> int:
        """How many tokens it spares computing beyond those of its parent."""
        return self.token_count - self.first_token

    @property
    def last_active(self) -> float:
        """When it was written or last used, whichever is later, in seconds since 1970."""
        return max(self.created, self.usage.last_used)


class Fault(StrEnum):
    """Why an entry cannot be read."""

    DAMAGED = "damaged"
    FOREIGN = "foreign"
    """Another release wrote it."""
    UNREACHABLE = "unreachable"
    """Reading failed; the entry itself may be well."""


@dataclass(frozen=True, slots=True)
class UnreadableEntry:
    """An entry that cannot be read: it is left alone until its place is needed. why: what is wrong, a sentence."""

    key: EntryKey
    fault: Fault
    why: str
    size_bytes: int
    stamp: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What has changed in a store. entries: those that are new or replaced. removed: keys of those that are gone."""

    entries: tuple[DiskEntry | UnreadableEntry, ...]
    removed: tuple[EntryKey, ...]


def scan(store: Store, lineages: Iterable[str], known_stamps: Mapping[EntryKey, str]) -> Scan:
    """Return what has changed in some lineages.

    known_stamps: those of the entries in memory; an entry whose stamp is the same is not read again. Raises StoreError
    when the store cannot be listed.
    """
    entries: list[DiskEntry | UnreadableEntry] = []
    removed: list[EntryKey] = []
    for lineage in lineages:
        stamps = {EntryKey(lineage, name): stamp for name, stamp in store.entries(lineage).items()}
        removed += [key for key in known_stamps if key.lineage == lineage and key not in stamps]
        for key, stamp in stamps.items():
            if known_stamps.get(key) != stamp:
                entry = read_entry(store, key, stamp)
                if entry is not None:
                    entries.append(entry)
    return Scan(tuple(entries), tuple(removed))


def scan_all(store: Store, known_stamps: Mapping[EntryKey, str]) -> Scan:
    """Return what has changed in all lineages, as `scan`."""
    lineages = {*store.lineages(), *(key.lineage for key in known_stamps)}
    return scan(store, sorted(lineages), known_stamps)


def read_entry(store: Store, key: EntryKey, stamp: str) -> DiskEntry | UnreadableEntry | None:
    """Read one entry, or return what is wrong with it; None when it is gone by now."""
    try:
        data = store.read_manifest(key)
        manifest = manifest_from_json(data)
        if manifest.snapshot_id != key.snapshot_id or manifest.lineage.key != key.lineage:
            raise ManifestError(f"the manifest is that of {manifest.snapshot_id}", field="snapshot_id")
    except NotFound:
        try:
            if key.snapshot_id not in store.entries(key.lineage):
                return None
        except StoreError:
            return None
        return _unreadable(store, key, stamp, Fault.DAMAGED, "it has no manifest")
    except ForeignManifest as error:
        return _unreadable(store, key, stamp, Fault.FOREIGN, error.message)
    except ManifestError as error:
        return _unreadable(store, key, stamp, Fault.DAMAGED, error.message)
    except StoreError as error:
        # No entry has an empty stamp, so this one is read again each time.
        return UnreadableEntry(key, Fault.UNREACHABLE, error.message, 0, "")
    return disk_entry(manifest, len(data), stamp, read_usage(store, key))


def disk_entry(manifest: Manifest, manifest_bytes: int, stamp: str, usage: EntryUsage) -> DiskEntry:
    """Return the entry that a manifest describes. manifest_bytes: the size of the manifest's file."""
    return DiskEntry(
        lineage=manifest.lineage,
        snapshot_id=manifest.snapshot_id,
        model_name=manifest.model_name,
        num_layers=manifest.num_layers,
        tokens=as_bytes(manifest.token_ids),
        first_token=manifest.first_token,
        parent_id=manifest.parent_id,
        created=manifest.created,
        parts=manifest.parts,
        size_bytes=manifest_bytes + sum(part.size_bytes for part in manifest.parts),
        stamp=stamp,
        usage=usage,
    )


def read_usage(store: Store, key: EntryKey) -> EntryUsage:
    """Return how an entry was used; one whose record is missing or unreadable counts as never used."""
    try:
        data = store.read_usage(key)
        value = json.loads(data) if data is not None else {}
        hits, last_used = value.get("hits", 0), value.get("last_used", 0.0)
    except (FlashsplitError, ValueError, AttributeError, RecursionError):
        return EntryUsage()
    is_valid = type(hits) is int and hits >= 0 and type(last_used) in (int, float) and math.isfinite(last_used)
    return EntryUsage(hits, float(last_used)) if is_valid else EntryUsage()


def _unreadable(store: Store, key: EntryKey, stamp: str, fault: Fault, why: str) -> UnreadableEntry:
    try:
        size = store.size_bytes(key)
    except FlashsplitError:
        size = 0
    return UnreadableEntry(key, fault, why, size, stamp)
