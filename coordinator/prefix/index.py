"""Which prefixes the workers keep, and which of them a prompt can take up.

Entries are found by a chain of hashes over blocks of tokens, then compared token by token: a hash only ever says where
to look. One index serves one lineage. Holds no state of the model, and forgets nothing unless told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.prefix.lineage import as_bytes
from coordinator.text.common_prefix import common_prefix_length

BLOCK_TOKENS = 32
_ROOT = b""
"""The digest of no blocks at all."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The state behind token_ids, as all workers keep it.

    parent: the entry whose attention rows it builds on, always a shorter prefix of it. cuttable: the state also serves
    every shorter prefix, as attention's does; otherwise it serves only its exact length.
    """

    snapshot_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    parent: Entry | None = field(repr=False)
    trimmable: bool


@dataclass(frozen=True, slots=True)
class Match:
    """An entry, and how many of its tokens to take up: all, unless it is cuttable."""

    entry: Entry
    length: int


@dataclass(slots=True)
class _Kept:
    entry: Entry
    digests: list[bytes]
    """The places where the entry is listed; the last one stands for all its full blocks."""
    children: dict[str, None] = field(default_factory=dict)


class PrefixIndex:
    """The entries of one lineage."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        # At each digest the entries that may part from a prompt within the block after it: exact ones at the digest of
        # all their blocks, cuttable ones at every digest along them. What lies along a cuttable parent is listed there
        # already, so a long conversation is hashed and listed once, not once a turn.
        self._listed: dict[bytes, dict[str, Entry]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, snapshot_id: object) -> bool:
        return snapshot_id in self._kept

    def get(self, snapshot_id: str) -> Entry | None:
        """The entry of this name."""
        kept = self._kept.get(snapshot_id)
        return kept.entry if kept else None

    def add(self, entry: Entry) -> None:
        """Take an entry in; one whose name is known already stays as it is.

        Raises:
            ValueError: it has no tokens, its parent isn't in the index, or isn't a shorter prefix of it.
        """
        if entry.snapshot_id in self._kept:
            return
        parent = entry.parent
        above = None
        if parent is not None:
            above = self._kept.get(parent.snapshot_id)
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
            digests = _chain(entry.token_ids, depth, above.digests[-1])
        else:
            digests = _chain(entry.token_ids)
        if not entry.trimmable:
            digests = digests[-1:]
        for digest in digests:
            self._listed.setdefault(digest, {})[entry.snapshot_id] = entry
        self._kept[entry.snapshot_id] = _Kept(entry, digests)

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """The longest start of a prompt that is kept, or None; of several, the one with the least to cut off.

        A cuttable entry that goes on where the prompt ends is taken up without the prompt's last token: that has to be
        computed again, because only an entry's own end has logits.
        """
        prompt = tuple(token_ids)
        digests = _chain(prompt)
        best: Match | None = None
        for depth in reversed(range(len(digests))):
            start, end = depth * BLOCK_TOKENS, (depth + 1) * BLOCK_TOKENS
            if best is not None and best.length >= end:
                break
            claims: list[tuple[Match, int]] = []
            for entry in self._listed.get(digests[depth], {}).values():
                common = start + common_prefix_length(entry.token_ids[start:end], prompt[start:end])
                claim = _match(entry, common, len(prompt))
                if claim is not None:
                    claims.append((claim, common))
            # Best claim first, so that usually one entry is compared in full.
            claims.sort(key=lambda pair: _rank(pair[0]), reverse=True)
            for claim, common in claims:
                if best is not None and _rank(claim) <= _rank(best):
                    break
                entry = claim.entry
                proven = _match(entry, common_prefix_length(entry.token_ids[:common], prompt), len(prompt))
                if proven is not None and (best is None or _rank(proven) > _rank(best)):
                    best = proven
        return best

    def remove(self, snapshot_id: str) -> tuple[Entry, ...]:
        """Forget an entry and all that build on it, directly or not; return them, each after its parent."""
        if snapshot_id not in self._kept:
            return ()
        doomed = [snapshot_id]
        for one in doomed:
            doomed.extend(self._kept[one].children)
        return tuple(self._forget(one) for one in doomed)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._listed.clear()

    def _forget(self, snapshot_id: str) -> Entry:
        kept = self._kept.pop(snapshot_id)
        for digest in kept.digests:
            listed = self._listed[digest]
            del listed[snapshot_id]
            if not listed:
                del self._listed[digest]
        parent = kept.entry.parent
        if parent is not None and parent.snapshot_id in self._kept:
            del self._kept[parent.snapshot_id].children[snapshot_id]
        return kept.entry


def deepest_ancestor(entry: Entry, length: int) -> Entry | None:
    """The longest of an entry and those it builds on that has at most `length` tokens, or None.

    After a cut it is what a new entry can build on.
    """
    found: Entry | None = entry
    while found is not None and len(found.token_ids) > length:
        found = found.parent
    return found


def _match(entry: Entry, common: int, prompt_length: int) -> Match | None:
    """What an entry offers a prompt with which it has `common` tokens in common."""
    if common == len(entry.token_ids):
        return Match(entry, common)
    if not entry.trimmable:
        return None
    length = common - 1 if common == prompt_length else common
    return Match(entry, length) if length > 0 else None


def _rank(match: Match) -> tuple[int, int, bool]:
    return match.length, -len(match.entry.token_ids), not match.entry.trimmable


def _chain(token_ids: tuple[int, ...], depth: int = 0, digest: bytes = _ROOT) -> list[bytes]:
    """Digests of the first `depth` blocks (that is `digest`), of one block more, and so on to the last full one."""
    numbers = memoryview(as_bytes(token_ids[depth * BLOCK_TOKENS :]))
    size = 4 * BLOCK_TOKENS
    digests = [digest]
    for end in range(size, len(numbers) + 1, size):
        digests.append(_link(digests[-1], numbers[end - size : end]))
    return digests


def _link(digest: bytes, block: memoryview) -> bytes:
    return hashlib.sha256(digest + block).digest()
