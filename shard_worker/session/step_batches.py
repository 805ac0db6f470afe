"""Steps of several sessions that wait for one device, computed together, so that weights are read once for all of them.

A step that finds no other is computed as that of a lone session. On a GPU that has the whole chain, steps that follow
by themselves are launched together before the results of the last ones are read, so that the device need not wait for
the host: also where draft tokens follow, which the device then knows alone. It owns the steps that wait. It must not
know where steps come from, nor what becomes of their results.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from services.errors import FlashsplitError
from services.messages.description import BATCH_ROW_BOUNDS, BatchCounts
from services.messages.steps import Forward, StepKind
from services.records import record
from shard_worker.device.executor import BatchedWork, DeviceThread, device_error, looks_without_sleep, raising_first
from shard_worker.model.features import Features
from shard_worker.sampling.drawing import Draw, draw_together
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.session.batches_away import BatchesAway
from shard_worker.stage.stage import StepInput
from shard_worker.stage.step_graph import StepOutput, StepPart, token_of_row

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import IssuedBlock
    from shard_worker.model.kernels.step_parameters import StepParameters

T = TypeVar("T")

BLOCKS_AHEAD_FROM = 8
"""From so many sessions on, steps behind issued blocks are launched before the results of the last one are read, which
take the host as long by then as the device needs for a few rows: 16 sessions get 11 % more tokens/s by that, 4 get
nothing (8B shape, H200)."""

LOOKS_S = 0.1
"""How long results are looked for, and what comes meanwhile launched behind them, before the thread only waits."""

FEW_ROWS = 128
"""Up to so many rows a step costs hardly more than one of a few: the weights are read once in any case, and what is
multiplied with each of them is hidden by that (8B shape, H200: 4.5 ms with 16 rows, 5.2 with 64, 5.9 with 128, 8.9 with
256). Where most sessions have an answer's row in it, chunks of prompts fill it up to there, and the others wait."""

BATCHES_OF_BEGUN = 4
"""So many batches at most are computed between two long chunks of prompts while a short one that has begun has chunks
in them: its first token need not wait for a long chunk with each of its own."""

NEXT_CHUNK_S, LOOK_AGAIN_S = 2e-3, 5e-5
"""How long the next chunk of such a prompt is waited for, which comes when the event loop has heard of the one before
it, and how often it is looked for. A long chunk takes 17 times as long (8B shape, H200)."""

LOOK_SELDOM_S = 1e-3
"""How often a batch is looked for that is soon back, where others need the core; a round takes some ten times as long
there."""

FIRST_STEP_S = 4e-3
"""How long the first step of a session that has just been opened is waited for, once between two long chunks: who asks
for it is told that it is open, perhaps on another host."""


class SteppingSession(Protocol):
    """What a session is to those who compute its steps, on the device thread."""

    @property
    def chain_length(self) -> int:
        """Of how many stages the session's chain is made."""

    @property
    def is_first(self) -> bool:
        """Whether its stage is the first one, which makes batches."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more steps."""

    @property
    def most_rows(self) -> int:
        """How many rows its stage computes together."""

    def kind(self, forward: Forward) -> Hashable:
        """Return what is equal for steps that can be computed together; None for one that is computed alone."""

    def begin(self, forward: Forward, behind: int | None = None) -> StepInput:
        """Count a step that is about to be computed, take the memory for it, and return its rows.

        behind: the session's number in the step before, where only the device knows which of its rows count there.
        Raises FailedPrecondition where the session is closed, ResourceExhausted where there is no memory.
        """

    def following(self, forward: Forward) -> Forward | None:
        """Return the step that follows this one by itself, without its tokens, whatever this one comes to but a stop
        token; None where none does. Where that depends on how many rows of this one count, it begins at the highest
        position that it may."""

    def prepare(self, forward: Forward) -> StepInput:
        """Take the memory for a step that follows, of single rows, and return these without what is not known yet.
        Raises as `begin`."""

    def is_prepared(self, forward: Forward, came: Forward) -> bool:
        """Return whether a step that has come is the one that was prepared, with all that the device needs of it, so
        that it need not be checked again. forward: as of `following`."""

    def begin_prepared(self, forward: Forward) -> None:
        """Count a step that was prepared and is about to be computed."""

    def complete_step(self, parameters: StepParameters) -> None:
        """Queue that the device puts into the parameters of a step, which were sent, what it alone knows yet: where the
        rows begin that follow issued blocks, and their tokens."""

    def is_copied_at_once(self, forward: Forward) -> bool:
        """Return whether all that is needed of a step's results is copied to the host right behind it, so that the
        next step may overwrite them: the rows for the next stage, or the most probable tokens where these decide."""

    def issue_together(
        self, steps: Sequence[tuple[SteppingSession, Forward]], outputs: Sequence[StepPart]
    ) -> Sequence[IssuedBlock | None]:
        """Queue, behind a step of several sessions that was launched, deciding which of its rows count and the draft's
        blocks behind them. Returns what is on its way of each session, None where that is up to the host."""

    def draws(self, forward: Forward) -> list[Draw] | None:
        """Return how the tokens behind the last rows of a step that comes next are drawn, where nothing but the logits
        of these rows counts for that."""

    def take_back(self, *, computed: bool) -> None:
        """Forget the step that was begun last behind another one, and perhaps computed: it does not come, or later."""

    def compute_begun(self, forward: Forward, given: StepInput) -> ComputedStep:
        """Run the stage on a step alone that was begun, of which `given` came."""

    def announce(self) -> None:
        """Have the stages beside this one hear what came of steps."""


@record(frozen=True, slots=True)
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


@dataclass(slots=True)
class _Row:
    """A step of a session in a step of several that was launched behind another one.

    forward: without its tokens, where they are not known yet. step: what is to be done with its results; None as long
    as nobody has asked for it.
    """

    session: SteppingSession
    forward: Forward
    given: StepInput
    step: WaitingStep | None


@dataclass(slots=True)
class _Launched:
    """A step of several sessions that is on the device.

    rows: of which those without a `step` are left out. outputs: of each. issued: what was queued behind each.
    started_ns: when computing began.
    """

    rows: list[_Row]
    outputs: list[StepPart]
    issued: Sequence[IssuedBlock | None]
    started_ns: int

    @property
    def results(self) -> StepOutput:
        """The results of all rows."""
        return self.outputs[0].whole

    @property
    def is_looked_for(self) -> bool:
        """Whether the results are not there, and it makes sense to do something else until they are."""
        on_host, age_ns = self.results.on_host, time.monotonic_ns() - self.started_ns
        return on_host is not None and not on_host.there and age_ns < LOOKS_S * 1e9 and looks_without_sleep()


class StepBatches:
    """The steps that wait on one device thread, as `BatchedWork` of that thread."""

    def __init__(self, thread: DeviceThread, sessions: Collection[object], drafting: BatchedWork) -> None:
        """sessions: those that are open, now and later. drafting: what drafts on the same thread have to do behind
        steps, which says what follows them."""
        self._thread, self._sessions, self._drafting = thread, sessions, drafting
        self._waiting: deque[WaitingStep | tuple[WaitingStep, ...]] = deque()
        """Steps that came alone, and such as came together."""
        self._alone: deque[WaitingStep] = deque()
        """Steps that no other one can be computed with: long chunks of prompts, mostly."""
        self._batches_between = BATCHES_OF_BEGUN
        """How many batches were computed since one of those was."""
        self._prompt_goes_on = False
        """Whether the last batch had a chunk of a prompt that another one follows."""
        self._next_chunk_until_ns = 0
        """Until when that one is waited for."""
        self._first_step_until_ns: int | None = None
        """Until when the first step of a new session is waited for, 0 where it has come; None where none was opened
        since a step was computed alone."""
        self._away = BatchesAway()
        """In a chain of several stages, answers' steps that were computed here and others follow by themselves."""
        self._launched: _Launched | None = None
        """The step whose results have not been read yet."""
        self._behind: _Launched | None = None
        """In a chain of several stages, a step of other sessions behind that one on the device."""
        self._prepared: dict[SteppingSession, list[_Row]] = {}
        """In such a chain, the steps that follow those of a batch by themselves, in turn, by the first one's session:
        they are prepared while the device computes, so that it can begin with them as soon as they come."""
        self._expected: dict[SteppingSession, _Row] = {}
        """Those of its rows that nobody has asked for yet: the results of the step before it are being read, or the
        draft tokens behind that one are still to come."""
        self._results_ns: int | None = None
        """When the results were there behind which the next steps follow by themselves, by `time.monotonic_ns`: the
        time of these begins then, whether they had been launched or are yet to be. None where none follow."""
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
        """Have a step computed behind the jobs that wait, from any thread.

        No session has two steps that wait. then, failed: as of `WaitingStep`, on the device thread. Raises RuntimeError
        when the thread is over.
        """
        self._add(WaitingStep(session, forward, then, failed))

    def add_following(self, step: WaitingStep) -> None:
        """Have the step computed, as `add` does, that follows by itself behind one whose results are being read; on the
        device thread. It may have been launched already."""
        if self._results_ns is None:
            self._results_ns = time.monotonic_ns()
        self._add(step)

    def end_following(self, session: SteppingSession) -> None:
        """Leave out what was launched for a session behind the step whose results are being read, if no step follows;
        to be called before anybody hears of those results."""
        if self._expected.pop(session, None) is not None:
            session.take_back(computed=True)

    def expects(self, session: SteppingSession) -> bool:
        """Return whether a step of the session was launched that nobody has asked for yet; on the device thread."""
        return session in self._expected

    def _attach(self, step: WaitingStep) -> bool:
        """Let a step be the one of its session that was launched already; return whether one was."""
        row = self._expected.pop(step.session, None)
        if row is None:
            return False
        if not row.forward.is_like(step.forward):
            step.session.take_back(computed=True)
            return False
        row.forward, row.step = step.forward, step
        return True

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
        self._note_added(step)
        if self._attach(step):
            return
        (self._alone if step.session.kind(step.forward) is None else self._waiting).append(step)
        self._thread.notice()

    def add_together(self, steps: Iterable[WaitingStep]) -> None:
        """Have steps computed as `add` does that the stage before computed together: together as far as this stage
        can."""
        kinds: dict[Hashable, list[WaitingStep]] = {}
        for step in steps:
            self._note_added(step)
            if self._attach(step):
                continue
            kind = step.session.kind(step.forward)
            if kind is None:
                self._alone.append(step)
            else:
                kinds.setdefault(kind, []).append(step)
        self._waiting.extend(map(tuple, kinds.values()))
        self._thread.notice()

    def expect_first_step(self) -> None:
        """Have the first step of a session that is being opened come before the next long chunk of a prompt, if it
        comes soon; on the device thread. What is opened in turn with others' steps would wait for two of them."""
        if self._first_step_until_ns is None:
            self._first_step_until_ns = time.monotonic_ns() + int(FIRST_STEP_S * 1e9)

    def _note_added(self, step: WaitingStep) -> None:
        self._away.back(step.session)
        if step.forward.step == 0:
            self._first_step_until_ns = 0

    def settle(self) -> None:
        """Read the results of what is on the device, so that all that was begun is known to its sessions, which hear of
        errors too; on the device thread."""
        self._settle_launched([])

    def __len__(self) -> int:
        """How many steps wait."""
        return len(self._alone) + sum(len(_steps(waiting)) for waiting in [*self._waiting])

    # --- as `BatchedWork`, on the device thread

    @property
    def waiting(self) -> bool:
        return self._launched is not None or bool(self._waiting or self._alone)

    def drop(self) -> None:
        on_device = [one for one in (self._launched, self._behind) if one is not None]
        self._launched = self._behind = None
        for row in [row for one in on_device for row in one.rows]:
            if row.step is not None:
                row.step.dropped()
        for waiting in (self._waiting, self._alone):
            while waiting:
                for step in _steps(waiting.popleft()):
                    step.dropped()

    def run(self) -> None:
        """Compute steps that wait: those that can be one step with the first of them, and of all sessions no more than
        leaves as many to each stage of the chain; in turn with steps that are computed alone, one at a time, but that
        prompts which have begun in batches are ended first. Raises the first error of a step, behind all of them."""
        with raising_first() as errors:
            if self._alone and self._alone_is_next:
                self._batches_between, self._first_step_until_ns = 0, None
                self._compute_alone(self._alone.popleft(), errors)
                return
            if not self._others_wait:
                self._thread.about_to_wait()
                time.sleep(LOOK_AGAIN_S)
                return
            if self._launched is None and self._waits_for_batch:
                self._thread.about_to_wait()
                time.sleep(LOOK_AGAIN_S if looks_without_sleep() else LOOK_SELDOM_S)
                return
            if self._launched is None:
                self._compute(self._next(), errors)
            elif self._launched.rows[0].session.chain_length > 1:
                self._overlap(self._launched, errors)
            else:
                self._go_on(errors)
            if not self.waiting:
                self._results_ns = None
            waited_ns = int(NEXT_CHUNK_S * 1e9) if self._prompt_goes_on else 0
            self._next_chunk_until_ns = time.monotonic_ns() + waited_ns

    @property
    def _others_wait(self) -> bool:
        """Whether a batch is on the device, or one can be made."""
        return self._launched is not None or bool(self._waiting)

    @property
    def _waits_for_batch(self) -> bool:
        """Whether what waits is to be computed with steps that are soon back from the other stages: it is chunks of
        prompts alone, or on the first stage one batch more than there are stages."""
        # Others may be added meanwhile.
        waiting = [*self._waiting]
        [first, *_] = _steps(waiting[0])
        stages = first.session.chain_length
        if stages == 1:
            return False
        away = self._away.expected()
        if away and all(map(_is_chunk, waiting)):
            return True
        is_one_more = away + (self._launched is not None) >= stages
        return first.session.is_first and is_one_more and _is_plain(first.forward)

    def _note_leaving(self, rows: Iterable[_Row]) -> None:
        """Note whose next steps come from other stages by themselves, soon: before those that draft tokens are made for
        other batches had better go on."""
        self._away.left(
            row.session
            for row in rows
            if row.step is not None and row.session.chain_length > 1 and row.forward.more and _is_plain(row.forward)
        )

    @property
    def _alone_is_next(self) -> bool:
        """Whether it is the turn of a step that is computed alone, if one waits: others have had theirs, and no short
        prompt goes on or begins at once."""
        awaited = time.monotonic_ns() < max(self._next_chunk_until_ns, self._first_step_until_ns or 0)
        # Others may be added meanwhile.
        goes_on = awaited or any(map(_goes_on, [*self._waiting]))
        if not self._others_wait and not goes_on:
            return True
        return self._batches_between >= (BATCHES_OF_BEGUN if goes_on else 1)

    def _compute_alone(self, step: WaitingStep, errors: list[Exception]) -> None:
        self._settle_launched(errors)
        if step.begins():
            self._compute([step], errors)

    def _ask_for_launched(self, errors: list[Exception]) -> None:
        """Let the drafts' work be done that says what follows, and then leave out what was launched and is not asked
        for: its session was closed."""
        while self._expected and self._drafting.waiting:
            try:
                self._drafting.run()
            except Exception as error:
                errors.append(error)
        self.leave_unasked()
        if self._launched is not None:
            self._launched.started_ns = self._started(self._launched.started_ns)

    def _started(self, launched_ns: int) -> int:
        """Return when the time of a step began that was launched then."""
        results_ns, self._results_ns = self._results_ns, None
        return launched_ns if results_ns is None else results_ns

    def _next(self) -> list[WaitingStep]:
        """Take out the steps of the next batch: those that can be computed with the first that waits."""
        [first, *_] = _steps(self._waiting[0])
        taken = self._joining(first.session, first.forward, 0)
        self._take(taken)
        return [step for one in taken for step in _steps(one) if step.begins()]

    def _joining(
        self, session: SteppingSession, forward: Forward, begun: int
    ) -> list[WaitingStep | tuple[WaitingStep, ...]]:
        """Return those that wait and can be computed with a step of this session, in turn.

        begun: how many rows of as many sessions are computed in any case. Answers' steps come before chunks of prompts,
        of which one at least is there, and of prompts those that have begun. What came together stays together. Where
        it is less than a stage's share of the sessions others join it, so that there are soon no more batches under
        way than stages.
        """
        kind, room = session.kind(forward), self._share(session) - begun
        alike = [one for one in [*self._waiting] if _steps(one)[0].session.kind(_steps(one)[0].forward) == kind]
        chunks = _begun_first(alike)
        kept = _rows_of(chunks[0]) if chunks else 0
        others = [one for one in alike if not _is_chunk(one) and (not begun or len(_steps(one)) <= room)]
        chosen = _fitting(others, room, session.most_rows - begun - kept)
        rows = begun + sum(map(_rows_of, chosen))
        return chosen + _chunks_beside(chunks, begun + len(chosen), rows, room - len(chosen), session.most_rows)

    def _take(self, taken: Sequence[WaitingStep | tuple[WaitingStep, ...]]) -> None:
        """Take these out of those that wait, for a batch."""
        numbers = {id(one) for one in taken}
        self._batches_between += 1
        self._prompt_goes_on = any(step.forward.kind is StepKind.PREFILL for one in taken for step in _steps(one))
        # Others may be added meanwhile, behind them.
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            if id(one) not in numbers:
                self._waiting.append(one)

    def _share(self, session: SteppingSession) -> int:
        """Return how many sessions a batch has at most, so that each stage has one."""
        return -(-len(self._sessions) // session.chain_length)

    def _compute(self, steps: Sequence[WaitingStep], errors: list[Exception]) -> None:
        """Compute steps together, or one behind the other what is too much for one step."""
        self._compute_rows(self._begun(steps, errors), errors)

    def _begun(self, steps: Sequence[WaitingStep], errors: list[Exception]) -> list[_Row]:
        begun: list[_Row] = []
        for step in steps:
            try:
                begun.append(_Row(step.session, step.forward, step.session.begin(step.forward), step))
            except Exception as error:
                _fail(step, error, errors)
        return begun

    def _compute_rows(self, rows: list[_Row], errors: list[Exception]) -> None:
        while rows:
            self._settle_launched(errors)
            most = 1 if len(rows) == 1 else rows[0].given.stage.most_together([row.given for row in rows])
            some, rows = rows[:most], rows[most:]
            if len(some) == 1:
                self._compute_one(some[0], errors)
            else:
                self._launched = self._launch(some, errors)
        if not self._may_go_on():
            self._settle_launched(errors)

    def _compute_one(self, row: _Row, errors: list[Exception]) -> None:
        """Compute a step of one session: it may be too long for what several sessions share."""
        assert row.step is not None
        self._thread.do_put_off()
        try:
            computed = row.session.compute_begun(row.forward, row.given)
        except Exception as error:
            _fail(row.step, error, errors)
        else:
            self._count(len(row.given.token_ids), 1)
            # What follows the steps before it waits for it, which is not their time.
            self._results_ns = None
            self._note_leaving([row])
            _settle(row.step, computed, errors)
        row.session.announce()

    def _launch(self, rows: list[_Row], errors: list[Exception]) -> _Launched | None:
        """Begin to compute what is one step of the stage. Returns None where that fails, which all hear of."""
        inputs = [row.given for row in rows]
        count = sum(len(given.token_ids) for given in inputs)
        self._thread.computes("step", count)
        if not inputs[0].stage.overlaps(count):
            # The thread itself computes it, perhaps for long.
            self._thread.do_put_off()
        started_ns = self._started(time.monotonic_ns())
        try:
            behind = next((row.session for row in rows if row.given.behind is not None), None)
            outputs = inputs[0].stage.step_together(inputs, None if behind is None else behind.complete_step)
            issued = rows[0].session.issue_together([(row.session, row.forward) for row in rows], outputs)
        except Exception as error:
            for row in rows:
                if row.step is None:
                    row.session.take_back(computed=False)
                else:
                    _fail(row.step, error, errors)
            return None
        self._count(count, len(rows))
        self._thread.busy_time.begin()
        launched = _Launched(rows, outputs, issued, started_ns)
        if rows[0].session.chain_length > 1:
            self._thread.soon(self._prepare, launched)
        return launched

    # --- steps behind one whose results are not read yet

    def _may_go_on(self) -> bool:
        """Return whether steps may be launched behind the one that is on the device, which overwrite all of its results
        but the most probable tokens, or what was issued with it."""
        launched = self._launched
        if launched is None:
            return False
        if launched.rows[0].session.chain_length > 1 and launched.results.on_host is None:
            return False
        if all(issued is not None for issued in launched.issued):
            stage, rows = launched.rows[0].given.stage, sum(len(row.given.token_ids) for row in launched.rows)
            return len(self._sessions) >= BLOCKS_AHEAD_FROM and stage.steps_behind(rows, blocks=True)
        return all(row.session.is_copied_at_once(row.forward) for row in launched.rows)

    def _go_on(self, errors: list[Exception]) -> None:
        """Launch what follows by itself behind the step that is on the device, with what has come, and then read the
        results of that one."""
        self._ask_for_launched(errors)
        before, self._launched = self._launched, None
        assert before is not None
        rows = self._begin_following(before, errors)
        most = len(rows) and rows[0].given.stage.most_together([row.given for row in rows])
        for row in rows[most:]:
            if row.step is None:
                row.session.take_back(computed=False)
        left = [row for row in rows[most:] if row.step is not None]
        launched = self._launch(rows[:most], errors) if rows else None
        if launched is not None:
            self._expected = {row.session: row for row in launched.rows if row.step is None}
        self._settle_all(before, errors)
        # Behind all of them: who hears of the first would keep the thread from the others.
        before.rows[0].session.announce()
        self._launched = launched
        self._compute_rows(left, errors)

    def _begin_following(self, before: _Launched, errors: list[Exception]) -> list[_Row]:
        """Begin what can be one step behind `before`: the steps that follow its own by themselves, and all that wait.

        None are begun where these cannot be one step, or something else is to be done before.
        """
        blocks = before.issued[0] is not None
        following: list[tuple[int, _Row, Forward, int]] = []
        row_count = rows_following = 0
        for number, row in enumerate(before.rows):
            row_count += len(row.given.token_ids)
            forward = None if row.step is None else row.session.following(row.forward)
            if forward is not None:
                following.append((number, row, forward, row_count - 1))
                rows_following += len(forward.token_ids)
        waiting = [*self._waiting]
        stage = before.rows[0].given.stage
        kinds = {row.session.kind(forward) for _, row, forward, _ in following}
        kinds |= {step.session.kind(step.forward) for one in waiting for step in _steps(one)}
        joining = [one for one in waiting if not _is_chunk(one)]
        rows_before = rows_following + sum(map(_rows_of, joining))
        chunks = _begun_first(waiting)
        joining += _chunks_beside(
            chunks, len(following) + len(joining), rows_before, len(chunks), before.rows[0].session.most_rows
        )
        if (
            len(following) < 2
            or self._thread.has_jobs
            or self._alone
            or not stage.steps_behind(rows_following + sum(map(_rows_of, joining)), blocks=blocks)
            or len(kinds) > 1
        ):
            return []
        self._take(joining)
        rows = []
        for number, row, forward, last_row in following:
            # Its session may be closed, or find no memory: it hears so when the step comes.
            with contextlib.suppress(Exception):
                given = row.session.begin(forward, number if blocks else None)
                if not blocks:
                    given = given.with_tokens((token_of_row(last_row),))
                rows.append(_Row(row.session, forward, given, None))
        begun = [step for one in joining for step in _steps(one) if step.begins()]
        return self._begun(begun, errors) + rows

    # --- in a chain of several stages, whose next steps come from the stages beside this one

    def _overlap(self, launched: _Launched, errors: list[Exception]) -> None:
        """Launch what has come behind the step that is on the device, and read the results of that one once they are
        there. Returns before, so that what comes meanwhile is found."""
        if self._behind is None and self._waiting and self._may_go_on() and not self._waits_for_batch:
            rows = self._begun(self._next(), errors)
            if not self._fits_behind(rows):
                self._compute_rows(rows, errors)
                return
            self._behind = self._launch(rows, errors)
        if launched.is_looked_for:
            self._thread.about_to_wait()
        else:
            self._settle_first(errors)

    def _prepare(self, launched: _Launched) -> None:
        """Prepare the steps that follow those of a batch by themselves."""
        rows: list[_Row] = []
        for row in launched.rows:
            forward = None if row.step is None or row.session.closed else row.session.following(row.forward)
            if forward is not None:
                # It may be closed by now, or find no memory: it hears so when the step comes.
                with contextlib.suppress(Exception):
                    rows.append(_Row(row.session, forward, row.session.prepare(forward), None))
        for row in launched.rows:
            self._prepared.pop(row.session, None)
        if self._fits_behind(rows):
            self._prepared[rows[0].session] = rows

    def forget(self, session: SteppingSession) -> None:
        """Drop what is kept for a session of a chain of several stages that is closed, and so its memory; on the device
        thread."""
        self._away.forget(session)
        for first, rows in [*self._prepared.items()]:
            if any(row.session is session for row in rows):
                del self._prepared[first]

    def begin_prepared(self, steps: Sequence[tuple[SteppingSession, Forward]]) -> None:
        """Launch steps that have come, if they are those that were prepared: before all that is to be done for them, up
        to `add` or `add_together`. Steps that wait join them as they join others. Does nothing where the device is not
        free for them, or something else is to be computed before; on the device thread."""
        prepared = self._prepared.pop(steps[0][0], []) if steps else []
        free = self._launched is None or (self._behind is None and self._may_go_on())
        if not prepared or len(prepared) != len(steps) or not free or self._alone:
            return
        rows: list[_Row] = []
        for row, (session, came) in zip(prepared, steps, strict=True):
            if row.session is not session or not session.is_prepared(row.forward, came):
                return
            forward = row.forward if came.activation is None else came
            rows.append(_Row(session, forward, row.given.with_tokens(came.token_ids, came.activation), None))
        beside = self._beside(rows)
        for row in (*rows, *beside):
            row.session.begin_prepared(row.forward)
        launched = self._launch([*rows, *beside], [])
        if launched is None:
            # They are begun anew as they are added, and hear of the error then.
            return
        self._expected |= {row.session: row for row in rows}
        if self._launched is None:
            self._launched = launched
        else:
            self._behind = launched

    def leave_unasked(self) -> None:
        """Leave out what was launched of steps that were prepared, where nobody has asked for it behind that."""
        for session in [*self._expected]:
            self.end_following(session)

    def _beside(self, rows: Sequence[_Row]) -> list[_Row]:
        """Take out the steps that wait and can be computed with these, as `_next` does; none where not all of them
        fit."""
        joining = self._joining(rows[0].session, rows[0].forward, len(rows))
        beside: list[_Row] = []
        try:
            for step in [step for one in joining for step in _steps(one)]:
                given = step.session.prepare(step.forward)
                beside.append(_Row(step.session, step.forward, given, step))
        except Exception:
            # It hears of the error when it is begun by itself.
            beside = []
        if not self._fits_behind([*rows, *beside]):
            beside = []
        self._take(joining if beside else [])
        return [row for row in beside if row.step is None or row.step.begins()]

    def _fits_behind(self, rows: Sequence[_Row]) -> bool:
        """Return whether these are one step that can be launched at once."""
        if len(rows) < 2:
            return False
        inputs = [row.given for row in rows]
        stage, count = inputs[0].stage, sum(len(given.token_ids) for given in inputs)
        return stage.most_together(inputs) == len(rows) and stage.overlaps(count)

    def _settle_first(self, errors: list[Exception]) -> None:
        """Read the results of the first step that is on the device, and go on to the one behind it."""
        launched, self._launched, self._behind = self._launched, self._behind, None
        assert launched is not None
        self._thread.computes("step", sum(len(row.given.token_ids) for row in launched.rows))
        self._settle_all(launched, errors)
        if self._launched is not None:
            # It began when that one ended.
            self._launched.started_ns = max(self._launched.started_ns, time.monotonic_ns())
        launched.rows[0].session.announce()

    def _settle_launched(self, errors: list[Exception]) -> None:
        """Read the results of all steps that are on the device, if there are any."""
        self._ask_for_launched(errors)
        while self._launched is not None:
            self._settle_first(errors)

    def _settle_all(self, launched: _Launched, errors: list[Exception]) -> None:
        self._thread.about_to_wait()
        sessions, row_count = len(launched.rows), sum(len(row.given.token_ids) for row in launched.rows)
        proposing = sum(row.forward.propose_tokens > 0 for row in launched.rows)
        try:
            drawn = _drawn(launched)
            ended_ns = _wait(launched)
        except Exception as error:
            for row in launched.rows:
                if row.step is not None:
                    _fail(row.step, error, errors)
            return
        finally:
            self._thread.busy_time.end()
        self._note_leaving(launched.rows)
        for row, output, issued, tokens in zip(launched.rows, launched.outputs, launched.issued, drawn, strict=True):
            if row.step is not None:
                features, began_ns = row.given.features or Features(), launched.started_ns
                computed = ComputedStep(
                    row.forward, output, features, began_ns, sessions, row_count, proposing, issued, tokens, ended_ns
                )
                _settle(row.step, computed, errors)

    def _count(self, rows: int, sessions: int) -> None:
        self._rows += rows
        self._session_steps += sessions
        self._steps_by_rows[bisect.bisect_left(BATCH_ROW_BOUNDS, rows)] += 1


def _steps(waiting: WaitingStep | tuple[WaitingStep, ...]) -> tuple[WaitingStep, ...]:
    return (waiting,) if isinstance(waiting, WaitingStep) else waiting


def _is_plain(forward: Forward) -> bool:
    """Return whether it is an answer's row without draft tokens, for which none are made either."""
    return forward.kind is StepKind.DECODE and not forward.propose_tokens


def _is_chunk(waiting: WaitingStep | tuple[WaitingStep, ...]) -> bool:
    """Return whether it is a step of several rows of a prompt."""
    return (
        isinstance(waiting, WaitingStep)
        and len(waiting.forward.token_ids) > 1
        and waiting.forward.kind is not StepKind.VERIFY
    )


def _goes_on(waiting: WaitingStep | tuple[WaitingStep, ...]) -> bool:
    """Return whether it is such a step of a prompt that has begun."""
    return _is_chunk(waiting) and _steps(waiting)[0].forward.base_position > 0


def _begun_first(
    waiting: Iterable[WaitingStep | tuple[WaitingStep, ...]],
) -> list[WaitingStep | tuple[WaitingStep, ...]]:
    """Return the chunks of prompts among those that wait, in turn, but first those of prompts that have begun."""
    return sorted(filter(_is_chunk, waiting), key=lambda one: not _goes_on(one))


def _fitting(
    waiting: Iterable[WaitingStep | tuple[WaitingStep, ...]], most: int, rows: int
) -> list[WaitingStep | tuple[WaitingStep, ...]]:
    """Return those for which there is room behind the ones before them, the first one in any case.

    most: how many steps there is room for. rows: how many rows there is room for.
    """
    fitting: list[WaitingStep | tuple[WaitingStep, ...]] = []
    for one in waiting:
        count, more = len(_steps(one)), _rows_of(one)
        if not fitting or (count <= most and more <= rows):
            fitting.append(one)
            most, rows = most - count, rows - more
    return fitting


def _chunks_beside(
    chunks: Sequence[WaitingStep | tuple[WaitingStep, ...]], sessions: int, rows: int, most: int, most_rows: int
) -> list[WaitingStep | tuple[WaitingStep, ...]]:
    """Return the chunks of prompts that are computed in one step with others, one at least where there are any.

    chunks: in turn. sessions, rows: those of the others. most: how many chunks there may be. most_rows: those that a
    step may have.
    """
    few = sessions >= len(chunks) and rows <= FEW_ROWS // 2
    return _fitting(chunks, most, (FEW_ROWS if few else most_rows) - rows)


def _rows_of(waiting: WaitingStep | tuple[WaitingStep, ...]) -> int:
    return sum(len(step.forward.token_ids) for step in _steps(waiting))


def _drawn(launched: _Launched) -> list[list[int] | None]:
    """Return each session's tokens that are drawn from the step's logits, of all sessions at once: a GPU is waited for
    once. None for a session whose tokens are chosen otherwise."""
    draws = [None if row.step is None else row.session.draws(row.forward) for row in launched.rows]
    rows = [
        None if one is None or output.logits is None else (output.logits[-len(one) :], one)
        for output, one in zip(launched.outputs, draws, strict=True)
    ]
    drawn = iter(draw_together([one for one in rows if one is not None]))
    return [None if one is None else next(drawn) for one in rows]


def _wait(launched: _Launched) -> int | None:
    """Wait for a step's results where they are awaited for all sessions at once, and return when they were there; None
    where each session does so, or something else is known sooner."""
    results = launched.results
    if results.on_host is None or results.argmax is None or any(launched.issued):
        return None
    launched.outputs[0].argmax_on_host()
    return time.monotonic_ns()


def _settle(step: WaitingStep, computed: ComputedStep, errors: list[Exception]) -> None:
    """Do with a step's results what is to be done."""
    try:
        step.then(computed)
    except Exception as error:
        _fail(step, error, errors)


def _fail(step: WaitingStep, error: Exception, errors: list[Exception]) -> None:
    meaning = device_error(error)
    assert isinstance(meaning, Exception)
    errors.append(meaning)
    step.failed(meaning.copied() if isinstance(meaning, FlashsplitError) else meaning)
