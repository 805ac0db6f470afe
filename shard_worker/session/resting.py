"""Sessions that rest: a stage behind this one was lost, and what they have computed here waits to be taken up.

A resting session's memory is the first that is given up: when its time is over, when other sessions need pages or room
for sent rows, and when the stage is another one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from services.messages.steps import OpenSession
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.sampling.last_row import LastRow
from shard_worker.session.sent_rows import RowBudget, SentRows
from shard_worker.stage.stage import Stage, StageState

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RestingSession:
    """What is left of a session on a stage.

    request: what opened it. state: its memory. sent: the rows that it has sent to the next stage. last: on the last
    stage, the last row of its memory; None on all others. draft: its draft beside the last stage, None without one.
    """

    stage: Stage
    request: OpenSession
    state: StageState
    sent: SentRows
    last: LastRow | None = None
    draft: LocalDraftLink | None = None


class RestingSessions:
    """The resting sessions of a worker, by the names that their callers gave them; those that came first, first.

    rows: the bound of what all sessions of the worker have sent.
    """

    def __init__(self, rows_bytes: int) -> None:
        self.rows = RowBudget(rows_bytes, self.drop_one)
        self._sessions: dict[str, tuple[int, RestingSession]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, resting: RestingSession) -> None:
        """Let a session rest as long as its caller said; on the event loop."""
        rest = resting.request.rest
        assert rest is not None
        number = next(self._numbers)
        with self._lock:
            self._sessions[rest.session_id] = number, resting
        # By its number, as the timer must not hold its memory.
        asyncio.get_running_loop().call_later(rest.rest_ms / 1e3, self._expire, rest.session_id, number)
        log.debug("session.rests", request_id=resting.request.request_id, tokens=resting.state.length)

    def take(self, session_id: str) -> RestingSession | None:
        """Return the session of this name, which rests no more; None where none does."""
        with self._lock:
            return self._sessions.pop(session_id, (0, None))[1]

    def drop_one(self) -> bool:
        """Give up the session that has rested longest, on any thread; False where none rests."""
        with self._lock:
            if not self._sessions:
                return False
            self._sessions.pop(next(iter(self._sessions)))
        return True

    def clear(self) -> None:
        """Give up all of them."""
        with self._lock:
            self._sessions.clear()

    def _expire(self, session_id: str, number: int) -> None:
        with self._lock:
            if self._sessions.get(session_id, (None,))[0] == number:
                del self._sessions[session_id]


def held_length(resting: RestingSession, request: OpenSession, stage: Stage, needed: int | None) -> int:
    """Trim a resting session's memory to what a new one can go on from, and return how many tokens that are; 0 where it
    is of no use. Its draft's context then ends there too, if the new one has that draft. On the device thread, behind
    all that the session had computed there. Raises ResourceExhausted where there is no memory for what the draft is
    still to take.

    request: opens the new one. needed: the rows from this position on must be sent again; None on a last stage without
    a draft elsewhere.
    """
    state, rest = resting.state, request.rest
    assert rest is not None
    if not _alike(resting, request, stage):
        return 0
    # Of a block that was not answered here those rows count whose tokens were told.
    agreed = min(state.length + state.pending, _common(resting.sent.token_ids, rest.token_ids))
    if state.pending and agreed > state.length:
        stage.commit(state, agreed)
    state.pending = state.ahead = 0
    least = state.shortest
    if not stage.is_recurrent:
        # The next step begins with the last token.
        agreed = min(agreed, len(rest.token_ids) - 1)
    draft = None if request.draft is None else resting.draft
    if draft is not None:
        draft.catch_up()
        # Features of what comes behind were not kept.
        agreed = min(agreed, draft.state.length)
    first, end = resting.sent.first, resting.sent.end
    if needed is not None and end is not None:
        agreed = min(agreed, end)
    if needed is not None and needed < agreed and (first is None or first > needed):
        # Those rows are not there to be sent again.
        agreed = needed
    if agreed < max(rest.first_position, least, 1):
        return 0
    if stage.is_recurrent and request.block_rows > resting.request.block_rows and agreed < len(rest.token_ids) - 1:
        # Its memory is not made for the blocks in which the rest would be computed.
        return 0
    if draft is not None and not draft.cut(agreed):
        return 0
    state.length = agreed
    return agreed


def _alike(resting: RestingSession, request: OpenSession, stage: Stage) -> bool:
    """Return whether a new session's memory may be that of the resting one."""
    rows = stage.batch_invariant_rows(request.batch_invariant_rows)
    # What a draft reads of the tokens is in the rows that were sent, and beside the last stage in the draft alone.
    beside = not request.route and request.draft is not None and request.draft.address is None
    drafted = resting.draft if beside else resting.request.draft
    return (
        resting.stage is stage
        and request.max_length <= resting.request.max_length
        and rows == resting.state.batch_invariant_rows
        and (request.draft is None or drafted is not None)
    )


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    most = min(len(tokens), len(others))
    if tuple(tokens[:most]) == tuple(others[:most]):
        return most
    return next(index for index in range(most) if tokens[index] != others[index])
