"""The draft's next blocks, issued together with the step that they follow, before the host knows the step's outcome.

Which rows count is decided on the device. The host waits twice, for few numbers: for the outcome, with which it
answers, and later for the draft tokens. It is for sessions whose tokens are chosen on the device, and for a draft
beside the last stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set as AbstractSet
from dataclasses import dataclass

import torch

from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.drafting.drafters import DraftRunner, DraftState
from shard_worker.model.kernels.accept import ACCEPTED, ASKED, STOPS, UNDECIDED, WHOLE, accept
from shard_worker.model.kernels.complete_step import complete_step
from shard_worker.model.kernels.step_parameters import StepParameters
from shard_worker.stage.step_runner import ROW_COUNTS, StepRunner


@dataclass(frozen=True, slots=True)
class Following:
    """What follows a step for one of its sessions.

    rows: how many it has in the step. decided: whether it is decided on the device which of them count; otherwise
    nothing follows. whole: they all count, as those of a prompt, and the token behind the last one is produced. state:
    its context in the draft, None where it has none. draft_tokens: how many are to be proposed to it, 0 for none.
    stop_tokens: behind which nothing counts, at most STOPS. before: how many rows it has in a step before this one of
    which the host does not know yet how many count: the context has those that do only on the device.
    """

    rows: int
    state: DraftState | None = None
    draft_tokens: int = 0
    stop_tokens: AbstractSet[int] = frozenset()
    decided: bool = True
    whole: bool = False
    before: int = 0

    @property
    def asked(self) -> int:
        """What `accept` is asked for."""
        return (WHOLE if self.whole else ACCEPTED).value if self.decided else UNDECIDED.value


class BlocksAhead:
    """Issues the blocks of a draft runner's sessions. It owns the memory in which outcomes are decided, and the
    page-locked memory that they arrive in."""

    def __init__(self, draft: DraftRunner, embedding: torch.Tensor) -> None:
        """embedding: the target's, [vocab, hidden], on the draft's device."""
        self._draft, self._embedding = draft, embedding
        self._sessions, rows, device = len(draft.known_rows), len(draft.appending.tokens), embedding.device
        self._asked = torch.zeros((self._sessions, ASKED), dtype=torch.int64, device=device)
        self._asked_for: Sequence[tuple[int, AbstractSet[int]]] = ()
        self._outcome = torch.zeros(self._sessions + rows, dtype=torch.int64, device=device)
        self._proposed = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """The rows of the blocks that were issued last."""
        self._spare: list[Arriving] = []

    def takes(self, sessions: Sequence[Following]) -> bool:
        """Return whether blocks can follow a step of these sessions."""
        drafted = [one for one in sessions if one.state is not None]
        return (
            len(sessions) <= self._sessions
            and any(one.decided for one in sessions)
            and all(len(one.stop_tokens) <= STOPS for one in sessions)
            and self._draft.takes(
                [one.state for one in drafted],
                [one.before for one in drafted],
                [one.rows for one in drafted],
                [one.draft_tokens for one in drafted],
            )
        )

    def issue(
        self,
        step: StepParameters,
        sessions: Sequence[Following],
        chosen: torch.Tensor,
        total: torch.Tensor,
        commit: Callable[[torch.Tensor], None] | None,
    ) -> Issued:
        """Queue deciding which rows of the step just queued count, and the draft's blocks behind them.

        step: the step's own parameters, which nothing may have overwritten yet. sessions: those of the step, in order;
        they must fit, as `takes` says. chosen: the target's token for each row of the step, int64 [n]. total: float32
        [n, hidden], the sum of the rows' features. commit: queues that recurrent layers advance, where the step's rows
        are uncommitted, by so many rows of each session as its argument says, int64 [sessions or more] on the device.
        Nothing else may be done with the contexts before `Issued.produced` was called, but for issuing what follows a
        step that was completed with `complete`.
        """
        draft = self._draft
        states, rows, before = [], [], []
        for one in sessions:
            states.append(one.state)
            rows.append(one.rows)
            before.append(one.before)
        with draft.device.current():
            draft.send_append_parameters(states, rows, before)
            counted_later = [earlier + count for earlier, count in zip(before, rows, strict=True)]
            draft.send_block_parameters(states, [one.draft_tokens for one in sessions], counted_later)
            self._ask(sessions)
            most = max((one.rows for one in sessions if one.decided and not one.whole), default=1)
            session_rows = next(count for count in ROW_COUNTS if count >= most)
            outcome = self._outcome
            accept(
                step,
                chosen,
                self._asked,
                outcome,
                draft.appending,
                draft.proposing,
                self._embedding,
                draft.known_rows,
                draft.known_tokens,
                session_rows,
            )
            arriving = self._spare.pop() if self._spare else Arriving.allocate(len(outcome), outcome.device)
            count = self._sessions + sum(rows)
            arriving.outcome[:count].copy_(outcome[:count], non_blocking=True)
            _record(arriving.decided)
            draft.launch_append(total)
            self._proposed = proposed = draft.launch_blocks()
            arriving.proposed[: len(proposed)].copy_(proposed, non_blocking=True)
            _record(arriving.ready)
            # Behind the draft tokens, which somebody waits for; before the next step, which needs it.
            if commit is not None:
                commit(outcome)
        return Issued(sessions, arriving, self._sessions, draft.blocks_of, self._spare.append)

    def complete(self, step: StepParameters) -> None:
        """Queue that the outcome of the step whose blocks were issued last is put into the parameters of the next one:
        of each session that is behind it where its rows begin, its known token and its draft tokens.

        A session that ended there, by a stop token, has no rows that count in the next step.
        """
        draft = self._draft
        complete_step(step, draft.proposing, self._asked, draft.known_tokens, self._proposed, ROW_COUNTS[-1])

    def _ask(self, sessions: Sequence[Following]) -> None:
        asked_for = [(one.asked, one.stop_tokens) for one in sessions]
        if asked_for != self._asked_for:
            asked = [[which, *stops, *[-1] * (STOPS - len(stops))] for which, stops in asked_for]
            self._asked[: len(asked)].copy_(torch.tensor(asked), non_blocking=True)
            self._asked_for = asked_for


@dataclass(frozen=True, slots=True)
class Arriving:
    """Memory on the host that the numbers of one step arrive in, and when they have.

    outcome: as of `accept`. proposed: the rows of all blocks. decided, ready: recorded behind either; None on a CPU.
    """

    outcome: torch.Tensor
    proposed: torch.Tensor
    decided: torch.cuda.Event | None
    ready: torch.cuda.Event | None

    @classmethod
    def allocate(cls, size: int, device: torch.device) -> Arriving:
        """Return memory for so many numbers of either kind."""
        pinned = device.type != "cpu"
        outcome, proposed = (torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
        decided, ready = (torch.cuda.Event() if pinned else None for _ in range(2))  # type: ignore[no-untyped-call]
        return cls(outcome, proposed, decided, ready)


class Issued:
    """The outcome of a step and the blocks behind it, on their way."""

    def __init__(
        self,
        sessions: Sequence[Following],
        arriving: Arriving,
        counts: int,
        blocks_of: Callable[[Sequence[int], Sequence[int]], list[tuple[int, ...]]],
        give_back: Callable[[Arriving], None],
    ) -> None:
        """counts: how many counts come before the tokens of an outcome. blocks_of: as of `DraftRunner`. give_back:
        takes the memory when all of it was read."""
        self._sessions, self._arriving, self._counts, self._give_back = sessions, arriving, counts, give_back
        self._blocks_of = blocks_of
        self._produced: list[list[int]] | None = None
        self._draft_tokens: list[tuple[int, ...]] | None = None
        self.decided_ns = self.ready_ns = 0
        """When the outcome was there, and when the draft tokens were, by `time.monotonic_ns`, once either was awaited:
        then, or sooner."""

    @property
    def there(self) -> bool:
        """Whether all is there, so that nothing needs to be waited for."""
        ready = self._arriving.ready
        return self._draft_tokens is not None or ready is None or bool(ready.query())  # type: ignore[no-untyped-call]

    def produced(self) -> list[list[int]]:
        """Wait for the tokens that the step produced, and return those of each session; its context in the draft is
        longer by the rows that count from then on. There are none where it is not decided on the device."""
        if self._produced is None:
            _wait(self._arriving.decided)
            self.decided_ns = time.monotonic_ns()
            numbers = self._arriving.outcome.tolist()
            self._produced, first = [], self._counts
            for one, count in zip(self._sessions, numbers, strict=False):
                self._produced.append(numbers[first : first + count])
                first += one.rows
                if one.state is not None:
                    one.state.length += one.rows if one.whole else count
        return self._produced

    def draft_tokens(self) -> list[tuple[int, ...]]:
        """Wait for the draft tokens, and return those of each session."""
        if self._draft_tokens is None:
            self.produced()
            _wait(self._arriving.ready)
            self.ready_ns = time.monotonic_ns()
            wanted = [one.draft_tokens for one in self._sessions]
            self._draft_tokens = self._blocks_of(self._arriving.proposed.tolist(), wanted)
            self._give_back(self._arriving)
        return self._draft_tokens

    def parts(self) -> list[IssuedBlock | None]:
        """Return each session's own, None for one whose rows are not decided on the device."""
        return [IssuedBlock(self, index) if one.decided else None for index, one in enumerate(self._sessions)]


@dataclass(frozen=True, slots=True)
class IssuedBlock:
    """The outcome of one session's rows in a step, and the block behind them, on their way."""

    _issued: Issued
    _index: int

    def produced(self) -> list[int]:
        """Wait for the tokens that the rows produced, and return them."""
        return self._issued.produced()[self._index]

    def draft_tokens(self) -> tuple[int, ...]:
        """Wait for the draft tokens, and return them."""
        return self._issued.draft_tokens()[self._index]

    @property
    def there(self) -> bool:
        """Whether the draft tokens of all sessions are there."""
        return self._issued.there

    @property
    def decided_ns(self) -> int:
        """When the outcome of the whole step was there, which must have been awaited; by `time.monotonic_ns`."""
        return self._issued.decided_ns

    @property
    def drafted_ns(self) -> int:
        """How many nanoseconds after that the draft tokens were there, which must have been awaited."""
        return self._issued.ready_ns - self._issued.decided_ns


class Ahead:
    """Issues the blocks of one session alone, behind the steps of a `StepRunner`."""

    def __init__(
        self,
        step: StepRunner,
        blocks: BlocksAhead,
        state: DraftState,
        stop_tokens: AbstractSet[int],
    ) -> None:
        """blocks: those of one session a call. stop_tokens: at most STOPS."""
        self._step, self._blocks, self._state, self._stop_tokens = step, blocks, state, stop_tokens

    def takes(self, rows: int) -> bool:
        """Return whether a block can follow a step of so many rows."""
        return self._blocks.takes([Following(rows, self._state)])

    def issue(
        self, caches: SegmentCaches, argmax: torch.Tensor, total: torch.Tensor, draft_tokens: int, *, uncommitted: bool
    ) -> IssuedBlock:
        """Queue deciding which rows of the step just queued count, and the draft's block behind them.

        caches: the stage's, whose recurrent layers advance where the step's rows are uncommitted. argmax: the most
        probable token of each row, int64 [n]. total: float32 [n, hidden], the sum of the rows' features. draft_tokens:
        how many are to be proposed.
        """

        def commit(counts: torch.Tensor) -> None:
            self._step.commit(caches, counts)

        following = Following(len(argmax), self._state, draft_tokens, self._stop_tokens)
        issued = self._blocks.issue(self._step.parameters, [following], argmax, total, commit if uncommitted else None)
        return IssuedBlock(issued, 0)


def _record(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.record()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
