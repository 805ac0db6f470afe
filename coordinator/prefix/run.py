"""One request's use of the prefix cache: the state that it begins from, and the states that it has kept.

It owns what the request has saved and not yet heard of; the index and the store are the cache's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import structlog

from coordinator.prefix.cache import Arrival, Hit, PrefixCache, summary
from coordinator.prefix.index import Entry, deepest_ancestor
from coordinator.prefix.policy import generation_checkpoint_due, save_points
from services.messages.steps import Event, SnapshotRestore, SnapshotRestored, SnapshotSave, SnapshotSaved
from services.rpc.stage import StageSession

log = structlog.get_logger()


class PrefixRun:
    """One request's use of the prefix cache; call `begin` first.

    boundaries: where turns of the prompt begin, ascending. told: the tokens behind the prompt that the request has by
    now. The attribute `points` holds the positions of the prompt whose state should be saved, `hit` the state that the
    request begins from, and `restored_ms` how long all workers together took to restore it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        prompt: tuple[int, ...],
        boundaries: tuple[int, ...],
        *,
        with_draft: bool,
        told: tuple[int, ...] = (),
    ):
        self._cache, self._known, self._with_draft = cache, prompt + told, with_draft
        self._lineage = cache.lineage(with_draft=with_draft)
        self.points = save_points(len(prompt), boundaries, cache.policy)
        self.hit: Hit | None = None
        self.restored_ms = 0.0
        # What the next save builds on; that it is kept may not be confirmed yet.
        self._last: Entry | None = None
        self._last_length = 0
        self._saving: dict[str, Arrival] = {}
        # After a hit that was gone, the index may be wrong about shorter prefixes too: all are saved again, which costs
        # a worker that has them nothing.
        self._index_is_stale = False

    async def begin(self, least_tokens: int | None = None) -> None:
        """Look for the longest prefix that is kept, in memory or on disk. least_tokens: the shortest that is taken;
        None for the shortest that the policy finds worth it."""
        self.hit = await self._cache.find(self._known, with_draft=self._with_draft, least_tokens=least_tokens)
        if self.hit is not None:
            self._last = deepest_ancestor(self.hit.entry, self.hit.length)
            self._last_length = self.hit.length

    def forget_hit(self) -> None:
        """Drop the hit, which turned out to be gone: the request begins at its first token."""
        assert self.hit is not None
        self._cache.forget(self.hit, with_draft=self._with_draft)
        self._index_is_stale = True
        self.hit = self._last = None
        self._last_length = 0
        self._saving.clear()

    def restore(self) -> SnapshotRestore | None:
        """Return what the stages must restore first; None without a hit."""
        if self.hit is None:
            return None
        length = self.hit.length
        return SnapshotRestore(self.hit.entry.snapshot_id, length, self._known[:length])

    @property
    def saving(self) -> bool:
        """Whether the workers have not said yet whether they keep what they were told to."""
        return bool(self._saving)

    async def save(self, token_ids: tuple[int, ...]) -> SnapshotSave | None:
        """Return how to keep the session's present state, that behind these tokens; None where it is kept already."""
        parent, self._last_length = self._last, len(token_ids)
        entry = self._cache.new_entry(self._lineage, token_ids, parent)
        saving = self._saving.get(entry.snapshot_id)
        present = None if saving is None else saving.entry
        if not self._index_is_stale:
            present = present or self._cache.get(self._lineage, entry.snapshot_id)
        if present is not None:
            self._last = present
            return None
        self._saving[entry.snapshot_id] = await self._cache.expect(entry)
        self._last = entry
        return SnapshotSave(entry.snapshot_id, len(token_ids), None if parent is None else parent.snapshot_id)

    def checkpoint_due(self, length: int) -> bool:
        """Tell whether the state of a growing answer should be kept now."""
        return generation_checkpoint_due(self._last_length, length, self._cache.policy)

    def record(self, event: SnapshotSaved | SnapshotRestored) -> None:
        """Take note of what the stages have saved or restored."""
        if isinstance(event, SnapshotRestored):
            self.restored_ms = sum(part.elapsed_ns for part in event.parts) / 1e6
            log.info("prefix.restored", slot=event.snapshot_id[:12], position=event.length, **summary(event.parts))
        elif (arrival := self._saving.pop(event.snapshot_id, None)) is not None:
            self._cache.record(self._lineage, arrival, event)

    def finish(
        self,
        session: StageSession,
        events: AsyncIterator[Event],
        committed: Callable[[], Coroutine[Any, Any, tuple[int, ...]]],
    ) -> None:
        """Have the end of an answer kept and the session closed, while the request itself is answered.

        committed: returns all tokens that the session has committed, once none are added any more.
        """

        async def keep() -> None:
            token_ids = await committed()
            if len(token_ids) - self._last_length >= self._cache.policy.min_tokens:
                save = await self.save(token_ids)
                if save is not None:
                    await session.save_snapshot(save)
            while self._saving:
                event = await anext(events, None)
                if event is None:
                    return
                if isinstance(event, SnapshotSaved):
                    self.record(event)

        self._cache.finish(session, keep)
