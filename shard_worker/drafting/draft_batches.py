"""What drafts beside a stage have to do for its sessions, done together for all that wait: features of committed rows
are taken, and blocks are proposed.

It runs on the device thread. It must not know what becomes of draft tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.errors import FlashsplitError
from shard_worker.device.executor import DeviceThread, device_error, raising_first
from shard_worker.drafting.engine import CommittedRows, DraftEngine, DraftRequest, check_start, check_tokens
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.model.features import Features, joined

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import IssuedBlock


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What a session's draft has to do behind a step.

    features: of the committed rows from position `start` on; they may be none. request: what to propose, None for
    nothing. then: called with the draft tokens, none without a request, and with the nanoseconds that they took.
    failed: called with an error instead, or with one of `then`. issued: the block that is asked for, where it and the
    taking of the features were queued with the step.
    """

    link: LocalDraftLink
    features: Features
    start: int
    request: DraftRequest | None
    then: Callable[[tuple[int, ...], int], None]
    failed: Callable[[Exception], None]
    issued: IssuedBlock | None = None

    @property
    def engine(self) -> DraftEngine:
        return self.link.engine

    def check(self) -> None:
        """Raise FailedPrecondition where the session's draft cannot do it, which must not be the others' end."""
        if not self.features.empty:
            check_start(self.link.state, self.start)
        if self.request is not None:
            check_tokens(self.engine.draft, self.request.tokens)


class DraftBatches:
    """The drafts' work that waits on one device thread, as `BatchedWork` of that thread."""

    def __init__(self, thread: DeviceThread, announce: Callable[[], None]) -> None:
        """announce: called when something was done, to have others hear of it."""
        self._thread, self._announce = thread, announce
        self._waiting: deque[DraftWork] = deque()
        thread.serve(self)

    def add(self, work: DraftWork) -> None:
        """Have it done as soon as the thread is free; of a session's works the first that was added comes first. To be
        called on the thread itself."""
        features, start = work.link.with_kept(work.features, work.start)
        self._waiting.append(replace(work, features=features, start=start))

    def forget(self, link: LocalDraftLink) -> None:
        """Do nothing more of what waits of a session that is over; to be called on the thread itself."""
        self._waiting = deque(work for work in self._waiting if work.link is not link)

    # --- as `BatchedWork`

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def drop(self) -> None:
        self._waiting.clear()

    def run(self) -> None:
        """Do what waits, but for later work of a session that waits twice. Raises the first error, behind all of it."""
        works = self._next()
        with raising_first() as errors:
            issued = [work for work in works if work.issued is not None]
            if issued:
                self._do(issued, _issued, errors)
            fitting = []
            for work in works:
                if work.issued is not None:
                    continue
                try:
                    work.check()
                except FlashsplitError as error:
                    _fail(work, error, errors)
                else:
                    fitting.append(work)
            if fitting:
                self._do(fitting, _done_together, errors)
            self._announce()

    def _next(self) -> list[DraftWork]:
        """Take out the work of the first session that waits, and of all whose drafts compute in the same way."""
        works: dict[int, DraftWork] = {}
        left: list[DraftWork] = []
        first = self._waiting[0]
        while self._waiting:
            work = self._waiting.popleft()
            if id(work.link) in works or not _alike(first, work):
                left.append(work)
            else:
                works[id(work.link)] = work
        self._waiting.extend(left)
        return [*works.values()]

    def _do(
        self,
        works: Sequence[DraftWork],
        propose: Callable[[Sequence[DraftWork]], list[tuple[int, ...]]],
        errors: list[Exception],
    ) -> None:
        started_ns = time.monotonic_ns()
        rows = sum(work.features.count + (0 if work.request is None else work.request.tokens) for work in works)
        self._thread.computes("draft", rows)
        try:
            proposed = propose(works)
        except Exception as error:
            for work in works:
                _fail(work, error, errors)
            return
        issued = works[0].issued
        elapsed_ns = time.monotonic_ns() - started_ns if issued is None else issued.drafted_ns
        for work, draft_tokens in zip(works, proposed, strict=True):
            work.link.count(work.request is not None, elapsed_ns)
            try:
                work.then(draft_tokens, elapsed_ns)
            except Exception as error:
                _fail(work, error, errors)


def _done_together(works: Sequence[DraftWork]) -> list[tuple[int, ...]]:
    """Take the features of all sessions and propose their blocks, as far as they want any."""
    engine = works[0].engine
    featured = [work for work in works if not work.features.empty]
    if featured:
        rows = [CommittedRows(work.link.state, work.start, work.features.count) for work in featured]
        engine.append_together(rows, joined([work.features for work in featured]))
    asking = [(work.link.state, work.request) for work in works if work.request is not None]
    proposed: list[tuple[int, ...]] = []
    if asking:
        proposed = engine.propose_together([state for state, _ in asking], [request for _, request in asking])
    left = iter(proposed)
    return [() if work.request is None else next(left) for work in works]


def _issued(works: Sequence[DraftWork]) -> list[tuple[int, ...]]:
    """Return the draft tokens of blocks that were queued with the steps before them."""
    return [work.issued.draft_tokens() for work in works if work.issued is not None]


def _alike(one: DraftWork, other: DraftWork) -> bool:
    """Return whether both can be done in one call."""
    invariant_rows = one.link.state.batch_invariant_rows == other.link.state.batch_invariant_rows
    return one.engine is other.engine and invariant_rows


def _fail(work: DraftWork, error: Exception, errors: list[Exception]) -> None:
    meaning = device_error(error)
    assert isinstance(meaning, Exception)
    errors.append(meaning)
    work.failed(meaning.copied() if isinstance(meaning, FlashsplitError) else meaning)
