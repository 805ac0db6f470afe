"""What workers keep of prefixes since before this process: its predecessor had it kept, and has ended.

Workers know prefixes by their names alone, which are hashes of tokens and of what else the state depends on. So which
tokens a leftover stands for turns out when a prompt comes that begins with them; of all others nothing is learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.prefix.lineage import Lineage, as_bytes
from services.messages.snapshots import KeptSnapshot, SnapshotOwner


@dataclass(frozen=True, slots=True)
class Leftover:
    """A prefix that all stages keep.

    token_count: with the tokens of what it builds on. parent_id: what it builds on, None for nothing. in_draft: whether
    the draft keeps its part too.
    """

    snapshot_id: str
    token_count: int
    parent_id: str | None
    in_draft: bool


class Leftovers:
    """The leftovers that no prompt has begun with so far."""

    def __init__(self, leftovers: Iterable[Leftover] = ()) -> None:
        """leftovers: each behind what it builds on."""
        self._by_id = {leftover.snapshot_id: leftover for leftover in leftovers}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Leftover]:
        """Go through all, each behind what it builds on."""
        return iter([*self._by_id.values()])

    @property
    def snapshot_ids(self) -> list[str]:
        """The names of all, each behind what it builds on."""
        return [*self._by_id]

    def beginnings(self, lineage: Lineage, token_ids: Sequence[int]) -> list[Leftover]:
        """Return those that a prompt begins with, the shortest first."""
        lengths = sorted({one.token_count for one in self._by_id.values() if one.token_count <= len(token_ids)})
        found, digest, before = [], lineage.digest(), 0
        for length in lengths:
            digest.update(as_bytes(token_ids[before:length]))
            before = length
            leftover = self._by_id.get(lineage.name_of(digest))
            if leftover is not None and leftover.token_count == length:
                found.append(leftover)
        return found

    def remove(self, snapshot_id: str) -> list[str]:
        """Remove one and all that build on it, directly or not; return their names, each behind what it builds on."""
        if snapshot_id not in self._by_id:
            return []
        gone = {snapshot_id: None}
        for leftover in self._by_id.values():
            if leftover.parent_id in gone:
                gone[leftover.snapshot_id] = None
        for name in gone:
            del self._by_id[name]
        return [*gone]

    def take(self, snapshot_id: str) -> None:
        """Remove one alone, which is known now; those that build on it stay."""
        self._by_id.pop(snapshot_id, None)


def common(
    stages: Sequence[Sequence[KeptSnapshot]], draft: Sequence[KeptSnapshot] | None
) -> tuple[Leftovers, list[str]]:
    """Return what all stages keep, with all that it builds on, and the names of what only some workers keep.

    stages: what each stage's worker keeps. draft: what the draft's worker does, None without a draft.
    """
    kept = [
        {one.snapshot_id: one for one in found if one.owner is owner}
        for owner, found in (
            *((SnapshotOwner.STAGE, found) for found in stages),
            (SnapshotOwner.DRAFT, draft or ()),
        )
    ]
    *of_stages, of_draft = kept
    agreed: dict[str, Leftover] = {}
    for one in sorted(of_stages[0].values(), key=lambda one: one.token_count):
        others = [of_stage.get(one.snapshot_id) for of_stage in of_stages[1:]]
        builds_on_agreed = one.parent_id is None or (
            one.parent_id in agreed and agreed[one.parent_id].token_count < one.token_count
        )
        if builds_on_agreed and all(other == one for other in others):
            part = of_draft.get(one.snapshot_id)
            in_draft = part is not None and part.token_count == one.token_count
            agreed[one.snapshot_id] = Leftover(one.snapshot_id, one.token_count, one.parent_id, in_draft)
    everything = sorted((one for found in kept for one in found.values()), key=lambda one: one.token_count)
    return Leftovers(agreed.values()), [
        *dict.fromkeys(one.snapshot_id for one in everything if one.snapshot_id not in agreed)
    ]
