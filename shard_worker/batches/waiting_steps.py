"""The steps that wait for one device, and which of them make the next batch.

Answers' steps come before chunks of prompts, and prompts that have begun before others. A step that can be computed
with no other, as a long chunk of a prompt, has its turn between batches. It must not know how steps are computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence

from services.messages.steps import FILLED_ROWS, Forward, StepKind
from shard_worker.batches.stepping import SteppingSession, WaitingStep

BATCHES_OF_BEGUN = 4
"""So many batches at most are computed between two long chunks of prompts while a short one that has begun has chunks
in them: its first token need not wait for a long chunk with each of its own."""

NEXT_CHUNK_S = 2e-3
"""How long the next chunk of such a prompt is waited for, which comes when the event loop has heard of the one before
it. A long chunk takes 17 times as long (8B shape, H200)."""

FIRST_STEP_S = 4e-3
"""How long the first step of a session that has just been opened is waited for, once between two long chunks: who asks
for it is told that it is open, perhaps on another host."""

Waiting = WaitingStep | tuple[WaitingStep, ...]
"""A step that came alone, or such as came together, which stay together."""


class WaitingSteps:
    """Steps are added on any thread; all else is called on the device thread."""

    def __init__(self, sessions: Collection[object]) -> None:
        """sessions: those that are open, now and later."""
        self._sessions = sessions
        self._for_batches: deque[Waiting] = deque()
        self._alone: deque[WaitingStep] = deque()
        """Steps that no other one can be computed with: long chunks of prompts, mostly."""
        self._batches_between = BATCHES_OF_BEGUN
        """How many batches were made since one of those had its turn."""
        self._prompt_goes_on = False
        """Whether the last batch had a chunk of a prompt that another one follows."""
        self._next_chunk_until_ns = 0
        """Until when that one is waited for."""
        self._first_step_until_ns: int | None = None
        """Until when the first step of a new session is waited for, 0 where it has come; None where none was opened
        since a step was computed alone."""

    def __len__(self) -> int:
        """How many steps wait."""
        return len(self._alone) + sum(len(steps_of(waiting)) for waiting in self.for_batches)

    def __bool__(self) -> bool:
        return bool(self._for_batches or self._alone)

    @property
    def for_batches(self) -> list[Waiting]:
        """Those that wait for a batch, in turn; others may be added meanwhile."""
        return [*self._for_batches]

    @property
    def has_alone(self) -> bool:
        """Whether a step waits that is computed alone."""
        return bool(self._alone)

    def add(self, step: WaitingStep) -> None:
        """Have a step wait."""
        self._note_first(step)
        (self._alone if step.session.kind(step.forward) is None else self._for_batches).append(step)

    def add_together(self, steps: Iterable[WaitingStep]) -> None:
        """Have steps wait that came together: together as far as they can be computed so."""
        kinds: dict[Hashable, list[WaitingStep]] = {}
        for step in steps:
            self._note_first(step)
            kind = step.session.kind(step.forward)
            if kind is None:
                self._alone.append(step)
            else:
                kinds.setdefault(kind, []).append(step)
        self._for_batches.extend(map(tuple, kinds.values()))

    def expect_first_step(self) -> None:
        """Have the first step of a session that is being opened come before the next long chunk of a prompt, if it
        comes soon. What is opened in turn with others' steps would wait for two of them."""
        if self._first_step_until_ns is None:
            self._first_step_until_ns = time.monotonic_ns() + int(FIRST_STEP_S * 1e9)

    def _note_first(self, step: WaitingStep) -> None:
        if step.forward.step == 0:
            self._first_step_until_ns = 0

    def expect_next_chunk(self) -> None:
        """Wait for the next chunk of a prompt from now on, if the last batch had one that another one follows."""
        waited_ns = int(NEXT_CHUNK_S * 1e9) if self._prompt_goes_on else 0
        self._next_chunk_until_ns = time.monotonic_ns() + waited_ns

    def take_alone(self, *, on_device: bool) -> WaitingStep | None:
        """Take out a step that is computed alone, if one waits and it is its turn: others have had theirs, and no short
        prompt goes on or begins at once. on_device: whether a batch is there."""
        if not self._alone:
            return None
        awaited = time.monotonic_ns() < max(self._next_chunk_until_ns, self._first_step_until_ns or 0)
        goes_on = awaited or any(map(_goes_on, self.for_batches))
        others_wait = on_device or bool(self._for_batches)
        if (others_wait or goes_on) and self._batches_between < (BATCHES_OF_BEGUN if goes_on else 1):
            return None
        self._batches_between, self._first_step_until_ns = 0, None
        return self._alone.popleft()

    def take_batch(self) -> list[WaitingStep]:
        """Take out the steps of the next batch: those that can be computed with the first that waits."""
        [first, *_] = steps_of(self._for_batches[0])
        return self.take(self.joining(first.session, first.forward, 0))

    def joining(self, session: SteppingSession, forward: Forward, begun: int) -> list[Waiting]:
        """Return those that wait and can be computed with a step of this session, in turn.

        begun: how many rows of as many sessions are computed in any case. Answers' steps come before chunks of prompts,
        of which one at least is there, and of prompts those that have begun. Where it is less than a stage's share of
        the sessions others join it, so that there are soon no more batches under way than stages.
        """
        kind, room = session.kind(forward), self._share(session) - begun
        alike = [one for one in self.for_batches if steps_of(one)[0].session.kind(steps_of(one)[0].forward) == kind]
        chunks = _begun_first(alike)
        kept = rows_of(chunks[0]) if chunks else 0
        others = [one for one in alike if not is_chunk(one) and (not begun or len(steps_of(one)) <= room)]
        chosen = _fitting(others, room, session.most_rows - begun - kept)
        rows = begun + sum(map(rows_of, chosen))
        return chosen + _chunks_beside(chunks, begun + len(chosen), rows, room - len(chosen), session.most_rows)

    def take(self, taken: Sequence[Waiting]) -> list[WaitingStep]:
        """Take these out for a batch, and return their steps."""
        numbers, steps = {id(one) for one in taken}, [step for one in taken for step in steps_of(one)]
        self._batches_between += 1
        self._prompt_goes_on = any(step.forward.kind is StepKind.PREFILL for step in steps)
        # Others may be added meanwhile, behind them.
        for _ in range(len(self._for_batches)):
            one = self._for_batches.popleft()
            if id(one) not in numbers:
                self._for_batches.append(one)
        return steps

    def take_all(self) -> list[WaitingStep]:
        """Take out all steps that wait."""
        steps = [step for one in self.for_batches for step in steps_of(one)]
        self._for_batches.clear()
        steps += self._alone
        self._alone.clear()
        return steps

    def _share(self, session: SteppingSession) -> int:
        """Return how many sessions a batch has at most, so that each stage has one."""
        return -(-len(self._sessions) // session.chain_length)


def steps_of(waiting: Waiting) -> tuple[WaitingStep, ...]:
    """Return the steps of what waits together."""
    return (waiting,) if isinstance(waiting, WaitingStep) else waiting


def rows_of(waiting: Waiting) -> int:
    """Return how many rows they have."""
    return sum(len(step.forward.token_ids) for step in steps_of(waiting))


def is_chunk(waiting: Waiting) -> bool:
    """Return whether it is a step of several rows of a prompt."""
    return (
        isinstance(waiting, WaitingStep)
        and len(waiting.forward.token_ids) > 1
        and waiting.forward.kind is not StepKind.VERIFY
    )


def all_beside(waiting: Sequence[Waiting], sessions: int, rows: int, most_rows: int) -> list[Waiting]:
    """Return all answers' steps, and those chunks of prompts that are computed beside so many sessions' rows and these.

    waiting: those that there are, in turn. most_rows: those that a step may have.
    """
    joining, chunks = [one for one in waiting if not is_chunk(one)], _begun_first(waiting)
    rows += sum(map(rows_of, joining))
    return joining + _chunks_beside(chunks, sessions + len(joining), rows, len(chunks), most_rows)


def _goes_on(waiting: Waiting) -> bool:
    """Return whether it is a chunk of a prompt that has begun."""
    return is_chunk(waiting) and steps_of(waiting)[0].forward.base_position > 0


def _begun_first(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return the chunks of prompts among those that wait, in turn, but first those of prompts that have begun."""
    return sorted(filter(is_chunk, waiting), key=lambda one: not _goes_on(one))


def _fitting(waiting: Iterable[Waiting], most: int, rows: int) -> list[Waiting]:
    """Return those for which there is room behind the ones before them, the first one in any case.

    most: how many steps there is room for. rows: how many rows there is room for.
    """
    fitting: list[Waiting] = []
    for one in waiting:
        count, more = len(steps_of(one)), rows_of(one)
        if not fitting or (count <= most and more <= rows):
            fitting.append(one)
            most, rows = most - count, rows - more
    return fitting


def _chunks_beside(chunks: Sequence[Waiting], sessions: int, rows: int, most: int, most_rows: int) -> list[Waiting]:
    """Return the chunks of prompts that are computed in one step with others, one at least where there are any.

    chunks: in turn. sessions, rows: those of the others. most: how many chunks there may be. most_rows: those that a
    step may have.
    """
    few = sessions >= len(chunks) and rows <= FILLED_ROWS // 2
    return _fitting(chunks, most, (FILLED_ROWS if few else most_rows) - rows)
