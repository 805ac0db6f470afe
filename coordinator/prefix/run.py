"""One request's dealings with the prefix cache: what it begins from, and what it leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import structlog

from coordinator.prefix.cache import Hit, PrefixCache, summary
from coordinator.prefix.index import Entry, deepest_ancestor
from coordinator.prefix.policy import generation_checkpoint_due, save_points
from services.messages.steps import Event, SnapshotRestore, SnapshotRestored, SnapshotSave, SnapshotSaved
from services.rpc.stage import StageSession

log = structlog.get_logger()


class PrefixRun:
    """Begin with `begin`. restored_ms: time that the workers took to take up the hit, all together."""

    def __init__(self, cache: PrefixCache, prompt: tuple[int, ...], boundaries: tuple[int, ...], *, with_draft: bool):
        self._cache, self._prompt, self._with_draft = cache, prompt, with_draft
        self._lineage = cache.lineage(with_draft=with_draft)
        self.points = save_points(len(prompt), boundaries, cache.policy)
        self.hit: Hit | None = None
        self.restored_ms = 0.0
        # What the next save builds on; it may still be on its way.
        self._last: Entry | None = None
        self._last_length = 0
        self._saving: dict[str, Entry] = {}
        # After a hit that was none, what the index says of shorter prefixes is worth no more: all are kept anew, which
        # costs a worker that has them nothing.
        self._distrust = False

    async def begin(self) -> None:
        """Look for the longest prefix that is kept."""
        self.hit = await self._cache.find(self._prompt, with_draft=self._with_draft)
        if self.hit is not None:
            self._last = deepest_ancestor(self.hit.entry, self.hit.length)
            self._last_length = self.hit.length

    def forget_hit(self) -> None:
        """The hit turned out to be gone: the request runs cold."""
        assert self.hit is not None
        self._cache.forget(self.hit, with_draft=self._with_draft)
        self._distrust = True
        self.hit = self._last = None
        self._last_length = 0
        self._saving.clear()

    def restore(self) -> SnapshotRestore | None:
        """What to tell the stages first."""
        if self.hit is None:
            return None
        length = self.hit.length
        return SnapshotRestore(self.hit.entry.snapshot_id, length, self._prompt[:length])

    def save(self, token_ids: tuple[int, ...]) -> SnapshotSave | None:
        """How to keep the state behind these tokens, which is the session's now; None where it is kept already."""
        parent, self._last_length = self._last, len(token_ids)
        entry = self._cache.entry(self._lineage, token_ids, parent)
        known = self._saving.get(entry.snapshot_id)
        if not self._distrust:
            known = known or self._cache.known(self._lineage, entry.snapshot_id)
        if known is not None:
            self._last = known
            return None
        self._last = self._saving[entry.snapshot_id] = entry
        return SnapshotSave(entry.snapshot_id, len(token_ids), None if parent is None else parent.snapshot_id)

    def checkpoint_due(self, length: int) -> bool:
        """Whether a growing answer should be kept now."""
        return generation_checkpoint_due(self._last_length, length, self._cache.policy)

    def take(self, event: SnapshotSaved | SnapshotRestored) -> None:
        """Note what the stages say."""
        if isinstance(event, SnapshotRestored):
            self.restored_ms = sum(part.elapsed_ns for part in event.parts) / 1e6
            log.info("prefix.restored", slot=event.snapshot_id[:12], position=event.length, **summary(event.parts))
        elif (entry := self._saving.pop(event.snapshot_id, None)) is not None:
            self._cache.kept(self._lineage, entry, event)

    def finish(self, session: StageSession, events: AsyncIterator[Event], token_ids: tuple[int, ...]) -> None:
        """Keep the end of an answer and close the session, both behind the request's back.

        token_ids: all tokens that the session has committed.
        """

        async def keep() -> None:
            if len(token_ids) - self._last_length >= self._cache.policy.min_tokens:
                save = self.save(token_ids)
                if save is not None:
                    await session.save_snapshot(save)
            while self._saving:
                event = await anext(events, None)
                if event is None:
                    return
                if isinstance(event, SnapshotSaved):
                    self.take(event)

        self._cache.finish(session, events, keep())
