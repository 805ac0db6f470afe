"""The entries of a store as tables for people, and as JSON for programs."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from typing import Any

from rich.table import Table

from coordinator.prefix.disk.entries import DiskEntry, UnreadableEntry
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.disk.manifest import Part
from coordinator.prefix.lineage import Lineage
from services.sizes import format_age, format_size

ID_DIGITS = 12
"""How many digits of a snapshot's id tables show."""

_NUMBER = re.compile(r"\.[0-9]+\.")
_SHOWN_TOKENS = 16


def in_order(index: DiskIndex) -> list[DiskEntry]:
    """Return all readable entries, lineage by lineage, each after the one it builds on."""
    return sorted(index.entries(), key=lambda entry: (entry.model_name, entry.lineage.key, entry.tokens))


def entry_json(index: DiskIndex, entry: DiskEntry) -> dict[str, Any]:
    """Return one line of `ls`. Times are in seconds since 1970; last_used is null where it never was used."""
    return {
        "snapshot_id": entry.snapshot_id,
        "lineage": entry.lineage.key,
        "model_name": entry.model_name,
        "dtype": entry.lineage.dtype,
        "kv_dtype": entry.lineage.kv_dtype or entry.lineage.dtype,
        "draft": entry.lineage.draft is not None,
        "token_count": entry.token_count,
        "first_token": entry.first_token,
        "size_bytes": entry.size_bytes,
        "parent_id": entry.parent_id,
        "usable": bool(index.chain(entry)),
        "created": entry.created,
        "last_used": entry.usage.last_used or None,
        "hits": entry.usage.hits,
    }


def unreadable_json(entry: UnreadableEntry) -> dict[str, Any]:
    """Return one line of `ls` for an entry that cannot be read."""
    return {
        "snapshot_id": entry.key.snapshot_id,
        "lineage": entry.key.lineage,
        "size_bytes": entry.size_bytes,
        "fault": str(entry.fault),
        "why": entry.why,
    }


def show_json(index: DiskIndex, entry: DiskEntry) -> dict[str, Any]:
    """Return everything about one entry, as `show` prints it."""
    return {
        **entry_json(index, entry),
        "model": entry.lineage.model,
        "text": entry.lineage.text,
        "draft_model": entry.lineage.draft,
        "draft_dtype": entry.lineage.draft_dtype,
        "num_layers": entry.num_layers,
        "token_ids": list(entry.token_ids),
        "chain": [node.snapshot_id for node in index.chain(entry)],
        "children": sorted(key.snapshot_id for key in index.children(entry.key)),
        "parts": [
            {
                "file": part.file,
                "owner": str(part.owner),
                "fingerprint": part.fingerprint,
                "layers": None if part.layers is None else [part.layers.first, part.layers.last],
                "size_bytes": part.size_bytes,
                "tensors": [
                    {
                        "name": tensor.name,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "size_bytes": tensor.size_bytes,
                        "sha256": tensor.sha256,
                    }
                    for tensor in part.tensors
                ],
            }
            for part in entry.parts
        ],
    }


def entries_table(index: DiskIndex) -> Table:
    """Return a table of all entries, unreadable ones at the end."""
    now = time.time()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "model", "dtype", "draft"):
        table.add_column(name)
    for name in ("tokens", "size"):
        table.add_column(name, justify="right")
    table.add_column("parent")
    for name in ("created", "last used", "hits"):
        table.add_column(name, justify="right")
    for entry in in_order(index):
        parent = "-" if entry.parent_id is None else entry.parent_id[:ID_DIGITS]
        table.add_row(
            entry.snapshot_id[:ID_DIGITS],
            entry.model_name or entry.lineage.model[:ID_DIGITS],
            _types(entry.lineage),
            "no" if entry.lineage.draft is None else "yes",
            f"{entry.first_token}-{entry.token_count}",
            format_size(entry.size_bytes),
            parent if index.chain(entry) else f"{parent} (missing)",
            _ago(now, entry.created),
            _ago(now, entry.usage.last_used) if entry.usage.last_used else "never",
            str(entry.usage.hits),
        )
    for broken in index.unreadable():
        table.add_row(
            broken.key.snapshot_id[:ID_DIGITS], f"[{broken.fault}]", "", "", "", format_size(broken.size_bytes)
        )
    return table


def _types(lineage: Lineage) -> str:
    """Return the element type of the weights, and behind a slash that of keys and values where it differs."""
    return lineage.dtype if lineage.kv_dtype is None else f"{lineage.dtype}/{lineage.kv_dtype}"


def parts_table(entry: DiskEntry) -> Table:
    """Return a table of the files of one entry, tensors that differ only in their layer on one line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("file", "layers", "size", "tensors"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for part in entry.parts:
        layers = "-" if part.layers is None else str(part.layers)
        table.add_row(part.file, layers, format_size(part.size_bytes), "\n".join(_tensor_lines(part)))
    return table


def entry_lines(index: DiskIndex, entry: DiskEntry) -> list[str]:
    """Return what `show` says of one entry besides its files."""
    now = time.time()
    lineage = entry.lineage
    tokens = entry.token_ids
    shown = " ".join(str(token) for token in tokens[:_SHOWN_TOKENS]) + (" …" if len(tokens) > _SHOWN_TOKENS else "")
    used = f"{_ago(now, entry.usage.last_used)}, {entry.usage.hits} hits" if entry.usage.last_used else "never"
    draft = "none" if lineage.draft is None else f"{lineage.draft} ({lineage.draft_dtype})"
    lines = [
        f"id          {entry.snapshot_id}",
        f"lineage     {lineage.key}",
        f"model       {entry.model_name or '?'}: {lineage.model} ({_types(lineage)}, {entry.num_layers} layers)",
        f"draft       {draft}",
        f"text        {lineage.text}",
        f"tokens      {entry.token_count}: {shown}",
        f"rows        of the tokens [{entry.first_token}, {entry.token_count})",
        f"size        {format_size(entry.size_bytes)}",
        f"created     {_ago(now, entry.created)}",
        f"last used   {used}",
    ]
    chain = index.chain(entry)
    if not chain:
        lines.append(f"builds on   {entry.parent_id}, which is missing: it cannot be used")
    for node in chain[:-1]:
        lines.append(f"builds on   {node.snapshot_id}: [{node.first_token}, {node.token_count})")
    for key in sorted(index.children(entry.key)):
        lines.append(f"has on it   {key.snapshot_id}")
    return lines


def _tensor_lines(part: Part) -> list[str]:
    kinds = Counter((_NUMBER.sub(".*.", tensor.name), tensor.dtype, tensor.shape) for tensor in part.tensors)
    return [
        f"{count} x {name} {dtype} {list(shape)}" if math.prod(shape) else f"{count} x {name} {dtype} (empty)"
        for (name, dtype, shape), count in kinds.items()
    ]


def _ago(now: float, then: float) -> str:
    return f"{format_age(now - then)} ago"
