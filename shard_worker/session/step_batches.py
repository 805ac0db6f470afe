"""Steps of several sessions that wait for one device, computed together, so that weights are read once for all of them.

A step that finds no other is computed as that of a lone session. It owns the steps that wait. It must not know where
steps come from, nor what becomes of their results.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.errors import FlashsplitError
from services.messages.description import BATCH_ROW_BOUNDS, BatchCounts
from services.messages.steps import Forward
from shard_worker.device.executor import DeviceThread, device_error
from shard_worker.model.features import Features
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.stage.stage import StepInput

T = TypeVar("T")


class SteppingSession(Protocol):
    """What a session is to those who compute its steps, on the device thread."""

    @property
    def chain_length(self) -> int:
        """Of how many stages the session's chain is made."""

    @property
    def most_rows(self) -> int:
        """How many rows its stage computes together."""

    def kind(self, forward: Forward) -> Hashable:
        """Return what is equal for steps that can be computed together; None for one that is computed alone."""

    def begin(self, forward: Forward) -> StepInput:
        """Count a step that is about to be computed, take the memory for it, and return its rows.

        Raises FailedPrecondition where the session is closed, ResourceExhausted where there is no memory.
        """

    def compute(self, forward: Forward) -> ComputedStep:
        """Run the stage on a step alone. Errors as in `begin`."""

    def compute_begun(self, forward: Forward, given: StepInput) -> ComputedStep:
        """Run the stage on a step alone that was begun, of which `given` came."""

    def announce(self) -> None:
        """Have others hear what came of steps."""


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """A step to be computed.

    then: what is done with its results at once. failed: called with an error instead, or with one of `then`. begins:
    asked before it is computed; where it says no, nothing more is done. dropped: called instead of all of them where
    the thread is over.
    """

    session: SteppingSession
    forward: Forward
    then: Callable[[ComputedStep], None]
    failed: Callable[[Exception], None]
    begins: Callable[[], bool] = lambda: True
    dropped: Callable[[], object] = lambda: None


class StepBatches:
    """The steps that wait on one device thread, as `BatchedWork` of that thread."""

    def __init__(self, thread: DeviceThread, sessions: Collection[object]) -> None:
        """sessions: those that are open, now and later."""
        self._thread, self._sessions = thread, sessions
        self._waiting: deque[WaitingStep | tuple[WaitingStep, ...]] = deque()
        """Steps that came alone, and such as came together."""
        self._rows = self._session_steps = 0
        self._steps_by_rows = [0] * (len(BATCH_ROW_BOUNDS) + 1)
        thread.serve(self)

    @property
    def counts(self) -> BatchCounts:
        """What was computed so far; on any thread."""
        by_rows = tuple(self._steps_by_rows)
        return BatchCounts(sum(by_rows), self._rows, self._session_steps, by_rows)

    @property
    def lone(self) -> bool:
        """Whether no more than one session is open, whose steps find no others."""
        return len(self._sessions) <= 1

    @property
    def expects_one(self) -> bool:
        """Whether nothing else can come on the thread than the next step of a lone session."""
        return self.lone and not self._thread.busy

    def add(
        self,
        session: SteppingSession,
        forward: Forward,
        then: Callable[[ComputedStep], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Have a step computed behind the jobs that wait, from any thread; what is computed alone is a job itself.

        No session has two steps that wait. then, failed: as of `WaitingStep`, on the device thread. Raises RuntimeError
        when the thread is over.
        """
        self._add(WaitingStep(session, forward, then, failed))

    def queue(self, session: SteppingSession, forward: Forward, then: Callable[[ComputedStep], T]) -> Future[T]:
        """Have a step computed as `add` does.

        Returns a future for what `then` returns on the device thread, or for the error that ended the step.
        """
        result: Future[T] = Future()

        def settle(computed: ComputedStep) -> None:
            result.set_result(then(computed))

        begins = result.set_running_or_notify_cancel
        self._add(WaitingStep(session, forward, settle, result.set_exception, begins, result.cancel))
        return result

    def _add(self, step: WaitingStep) -> None:
        if step.session.kind(step.forward) is None:
            self._thread.queue_step(self._compute_alone, step)
            return
        self._waiting.append(step)
        self._thread.notice()

    def add_together(self, steps: Iterable[WaitingStep]) -> None:
        """Have steps computed as `add` does that the stage before computed together: together as far as this stage
        can."""
        kinds: dict[Hashable, list[WaitingStep]] = {}
        for step in steps:
            kind = step.session.kind(step.forward)
            if kind is None:
                self._thread.queue_step(self._compute_alone, step)
            else:
                kinds.setdefault(kind, []).append(step)
        self._waiting.extend(map(tuple, kinds.values()))
        self._thread.notice()

    def __len__(self) -> int:
        """How many steps wait."""
        return sum(len(_steps(waiting)) for waiting in [*self._waiting])

    # --- as `BatchedWork`, on the device thread

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def drop(self) -> None:
        while self._waiting:
            for step in _steps(self._waiting.popleft()):
                step.dropped()

    def run(self) -> None:
        """Compute steps that wait: those that can be one step with the first of them, and of all sessions no more than
        leaves as many to each stage of the chain. Raises the first error of a step, behind all of them."""
        errors: list[Exception] = []
        steps = self._next()
        self._compute(steps, errors)
        if steps:
            # Behind all of them: who hears of the first would keep the thread from the others.
            steps[0].session.announce()
        if errors:
            raise errors[0]

    def _compute_alone(self, step: WaitingStep) -> None:
        errors: list[Exception] = []
        if step.begins():
            self._compute([step], errors)
            step.session.announce()
        if errors:
            raise errors[0]

    def _next(self) -> list[WaitingStep]:
        """Take out the steps of the next batch: the first that waits, and all that can be computed with it, in turn.

        What came together stays together. Where it is less than a stage's share of the sessions others join it, so that
        there are soon no more batches under way than stages.
        """
        first = self._waiting.popleft()
        chosen = [*_steps(first)]
        left: list[WaitingStep | tuple[WaitingStep, ...]] = []
        session, kind = chosen[0].session, chosen[0].session.kind(chosen[0].forward)
        most = -(-len(self._sessions) // session.chain_length)
        rows = _rows(chosen)
        while self._waiting and len(chosen) < most:
            waiting = self._waiting.popleft()
            steps = _steps(waiting)
            if (
                len(chosen) + len(steps) > most
                or rows + _rows(steps) > session.most_rows
                or steps[0].session.kind(steps[0].forward) != kind
            ):
                left.append(waiting)
            else:
                chosen += steps
                rows += _rows(steps)
        self._waiting.extendleft(reversed(left))
        return [step for step in chosen if step.begins()]

    def _compute(self, steps: Sequence[WaitingStep], errors: list[Exception]) -> None:
        """Compute steps together, or one behind the other what is too much for one step."""
        begun: list[tuple[WaitingStep, StepInput]] = []
        for step in steps:
            try:
                begun.append((step, step.session.begin(step.forward)))
            except Exception as error:
                _fail(step, error, errors)
        while begun:
            stage = begun[0][1].stage
            most = 1 if len(begun) == 1 else stage.most_together([given for _, given in begun])
            some, begun = begun[:most], begun[most:]
            try:
                computed = self._computed(some)
            except Exception as error:
                for step, _ in some:
                    _fail(step, error, errors)
                continue
            for (step, _), results in zip(some, computed, strict=True):
                _settle(step, results, errors)
            # Of what more is computed now nobody here needs to wait.
            some[0][0].session.announce()

    def _computed(self, steps: Sequence[tuple[WaitingStep, StepInput]]) -> list[ComputedStep]:
        """Return the results of steps that are one step of the stage."""
        if len(steps) == 1:
            # It may be too long for what several sessions share.
            [(step, given)] = steps
            alone = step.session.compute_begun(step.forward, given)
            self._count(len(given.token_ids), 1)
            return [alone]
        rows = sum(len(given.token_ids) for _, given in steps)
        self._thread.computes("step", rows)
        started_ns = time.monotonic_ns()
        outputs = steps[0][1].stage.step_together([given for _, given in steps])
        self._count(rows, len(steps))
        return [
            ComputedStep(step.forward, output, given.features or Features(), started_ns, len(steps), rows)
            for (step, given), output in zip(steps, outputs, strict=True)
        ]

    def _count(self, rows: int, sessions: int) -> None:
        self._rows += rows
        self._session_steps += sessions
        self._steps_by_rows[bisect.bisect_left(BATCH_ROW_BOUNDS, rows)] += 1


def _steps(waiting: WaitingStep | tuple[WaitingStep, ...]) -> tuple[WaitingStep, ...]:
    return (waiting,) if isinstance(waiting, WaitingStep) else waiting


def _rows(steps: Sequence[WaitingStep]) -> int:
    return sum(len(step.forward.token_ids) for step in steps)


def _settle(step: WaitingStep, computed: ComputedStep, errors: list[Exception]) -> None:
    """Do with a step's results what is to be done."""
    try:
        step.then(computed)
    except Exception as error:
        _fail(step, error, errors)


def _fail(step: WaitingStep, error: Exception, errors: list[Exception]) -> None:
    errors.append(error)
    meaning = device_error(error)
    assert isinstance(meaning, Exception)
    step.failed(meaning.copied() if isinstance(meaning, FlashsplitError) else meaning)
