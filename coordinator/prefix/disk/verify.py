"""Verifies that the bytes of an entry on disk are those that were saved: every file is read in full and hashed.

A restore finds damage too, but only in what it restores; this reads everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from coordinator.prefix.disk.entries import DiskEntry
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.disk.manifest import Part
from coordinator.prefix.disk.outgoing_part import check_file
from coordinator.prefix.stores import PartReader, Store
from services.errors import FlashsplitError

_READ_BYTES = 4 << 20


def broken_chain(index: DiskIndex, entry: DiskEntry) -> str | None:
    """Return what is missing of the entries that an entry builds on, as a sentence; None when all are there."""
    if index.chain(entry):
        return None
    node: DiskEntry | None = entry
    while node is not None and node.parent_key is not None:
        parent = index.get(node.parent_key)
        if parent is None:
            return f"{node.parent_id}, which it builds on, is missing"
        node = parent
    return "an entry that it builds on has other tokens"


def verify_part(store: Store, entry: DiskEntry, part: Part, advance: Callable[[int], None]) -> list[str]:
    """Return what is wrong with one file, as sentences. advance: called with the number of bytes after each read."""
    try:
        reader = store.open_part(entry.key, part.file)
    except FlashsplitError as error:
        return [error.message]
    try:
        check_file(reader, part)
        return [
            f"{part.file}: {tensor.name} does not match its digest"
            for tensor in part.tensors
            if _sha256(reader, tensor.offset, tensor.size_bytes, advance) != tensor.sha256
        ]
    except FlashsplitError as error:
        return [error.message]
    finally:
        reader.close()


def _sha256(reader: PartReader, offset: int, size_bytes: int, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    end = offset + size_bytes
    while offset < end:
        data = reader.read(offset, min(_READ_BYTES, end - offset))
        if not data:
            break
        digest.update(data)
        advance(len(data))
        offset += len(data)
    return digest.hexdigest()
