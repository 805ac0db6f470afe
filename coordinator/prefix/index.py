"""Which prefixes the workers keep, and which of them a prompt can take up.

Entries are found by a chain of hashes over blocks of tokens, then compared token by token: a hash only ever says where
to look. One index serves one lineage. It holds no state of the model, and removes nothing by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.prefix.lineage import as_bytes
from coordinator.text.common_prefix import common_prefix_length

BLOCK_TOKENS = 32
"""Tokens are hashed in blocks of so many."""

Link = Callable[[bytes, memoryview], bytes]
"""From the digest of some blocks, and the bytes of the next one, to the digest of them all."""

_ROOT = b""
"""The digest of no blocks at all."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The state behind token_ids, as all workers keep it.

    parent: the entry whose attention rows it builds on, always a shorter prefix of it. trimmable: the state also serves
    every shorter prefix, as attention's does; otherwise it serves only its exact length.
    """

    snapshot_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    parent: Entry | None = field(repr=False)
    trimmable: bool


@dataclass(frozen=True, slots=True)
class Match:
    """An entry, and how many of its tokens to restore: all of them, unless it is trimmable."""

    entry: Entry
    length: int


@dataclass(slots=True)
class _Node:
    """An entry in the index."""

    entry: Entry
    digests: list[bytes]
    """Where the entry is listed; the last one is the digest of all its full blocks."""
    children: dict[str, None] = field(default_factory=dict)
    """The snapshot ids of the entries that build on it, in the order in which they were added."""


class PrefixIndex:
    """The entries of one lineage. link: the hash function; where it collides the index is slower, never wrong."""

    def __init__(self, link: Link | None = None) -> None:
        self._link = link or _sha256_link
        self._nodes: dict[str, _Node] = {}
        # At each digest the entries that may part from a prompt within the block after it: exact ones at the digest of
        # all their blocks, trimmable ones at every digest along them. What lies along a trimmable parent is listed
        # there already, so a long conversation is hashed and listed once, not once a turn.
        self._listed: dict[bytes, dict[str, Entry]] = {}

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._nodes)

    def __contains__(self, snapshot_id: object) -> bool:
        return snapshot_id in self._nodes

    @property
    def snapshot_ids(self) -> tuple[str, ...]:
        """The names of all entries."""
        return tuple(self._nodes)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, each behind what it builds on."""
        return tuple(node.entry for node in self._nodes.values())

    def get(self, snapshot_id: str) -> Entry | None:
        """Return the entry with this id; None when it is not in the index."""
        node = self._nodes.get(snapshot_id)
        return node.entry if node else None

    def add(self, entry: Entry) -> None:
        """Add an entry; one whose id is in the index already stays as it is.

        Raises:
            ValueError: it has no tokens, its parent isn't in the index, or isn't a shorter prefix of it.
        """
        if entry.snapshot_id in self._nodes:
            return
        parent = entry.parent
        above = None
        if parent is not None:
            above = self._nodes.get(parent.snapshot_id)
            if above is None:
                raise ValueError(f"{entry.snapshot_id} builds on {parent.snapshot_id}, which is not kept")
            inherited = len(parent.token_ids)
            if inherited >= len(entry.token_ids) or entry.token_ids[:inherited] != parent.token_ids:
                raise ValueError(f"{entry.snapshot_id} builds on {parent.snapshot_id}, which is no prefix of it")
            above.children[entry.snapshot_id] = None
        elif not entry.token_ids:
            raise ValueError(f"{entry.snapshot_id} has no tokens")
        if above is not None and above.entry.trimmable:
            depth = len(above.entry.token_ids) // BLOCK_TOKENS
            digests = self._digests(entry.token_ids, depth, above.digests[-1])
        else:
            digests = self._digests(entry.token_ids)
        if not entry.trimmable:
            digests = digests[-1:]
        for digest in digests:
            self._listed.setdefault(digest, {})[entry.snapshot_id] = entry
        self._nodes[entry.snapshot_id] = _Node(entry, digests)

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Return the longest prefix of a prompt that is kept, or None; of several, the one with the least to trim.

        A trimmable entry that goes on where the prompt ends is restored without the prompt's last token: that has to be
        computed again, because only an entry's own end has logits.
        """
        prompt = tuple(token_ids)
        digests = self._digests(prompt)
        best: Match | None = None
        for depth in reversed(range(len(digests))):
            start, end = depth * BLOCK_TOKENS, (depth + 1) * BLOCK_TOKENS
            if best is not None and best.length >= end:
                break
            # Matches, and their tokens in common with the prompt, provided that equal hashes mean equal blocks.
            candidates: list[tuple[Match, int]] = []
            for entry in self._listed.get(digests[depth], {}).values():
                common = start + common_prefix_length(entry.token_ids[start:end], prompt[start:end])
                candidate = _match(entry, common, len(prompt))
                if candidate is not None:
                    candidates.append((candidate, common))
            # Best candidate first, so that usually one entry is compared in full.
            candidates.sort(key=lambda pair: _rank(pair[0]), reverse=True)
            for candidate, common in candidates:
                if best is not None and _rank(candidate) <= _rank(best):
                    break
                entry = candidate.entry
                proven = _match(entry, common_prefix_length(entry.token_ids[:common], prompt), len(prompt))
                if proven is not None and (best is None or _rank(proven) > _rank(best)):
                    best = proven
        return best

    def remove(self, snapshot_id: str) -> tuple[Entry, ...]:
        """Remove an entry and all that build on it, directly or not; return them, each after its parent."""
        if snapshot_id not in self._nodes:
            return ()
        ids = [snapshot_id]
        for entry_id in ids:
            ids.extend(self._nodes[entry_id].children)
        return tuple(self._remove(entry_id) for entry_id in ids)

    def clear(self) -> None:
        """Remove everything."""
        self._nodes.clear()
        self._listed.clear()

    def _remove(self, snapshot_id: str) -> Entry:
        node = self._nodes.pop(snapshot_id)
        for digest in node.digests:
            listed = self._listed[digest]
            del listed[snapshot_id]
            if not listed:
                del self._listed[digest]
        parent = node.entry.parent
        if parent is not None and parent.snapshot_id in self._nodes:
            del self._nodes[parent.snapshot_id].children[snapshot_id]
        return node.entry

    def _digests(self, token_ids: tuple[int, ...], depth: int = 0, digest: bytes = _ROOT) -> list[bytes]:
        """Return the digests of the first `depth` blocks (that is `digest`), of one more, and so on for all."""
        numbers = memoryview(as_bytes(token_ids[depth * BLOCK_TOKENS :]))
        size = 4 * BLOCK_TOKENS
        digests = [digest]
        for end in range(size, len(numbers) + 1, size):
            digests.append(self._link(digests[-1], numbers[end - size : end]))
        return digests


def deepest_ancestor(entry: Entry, length: int) -> Entry | None:
    """Return the longest of an entry and those it builds on that has at most `length` tokens, or None.

    It is what a new entry can build on after the state was trimmed to that length.
    """
    ancestor: Entry | None = entry
    while ancestor is not None and len(ancestor.token_ids) > length:
        ancestor = ancestor.parent
    return ancestor


def _match(entry: Entry, common: int, prompt_length: int) -> Match | None:
    """Return what an entry offers to a prompt with which it has `common` tokens in common."""
    if common == len(entry.token_ids):
        return Match(entry, common)
    if not entry.trimmable:
        return None
    length = common - 1 if common == prompt_length else common
    return Match(entry, length) if length > 0 else None


def _rank(match: Match) -> tuple[int, int, bool]:
    return match.length, -len(match.entry.token_ids), not match.entry.trimmable


def _sha256_link(digest: bytes, block: memoryview) -> bytes:
    return hashlib.sha256(digest + block).digest()
