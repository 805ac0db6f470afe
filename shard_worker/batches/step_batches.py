"""Steps of several sessions that wait for one device, computed together, so that weights are read once for all of them.

A step that finds no other is computed as that of a lone session. On a GPU that has the whole chain, steps that follow
by themselves are launched together before the results of the last ones are read, so that the device need not wait for
the host: also where draft tokens follow, which the device then knows alone. Which of the steps that wait come next is
up to `waiting_steps`. It must not know where steps come from, nor what becomes of their results.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from services.errors import FlashsplitError
from services.messages.batch_frames import PreparedFrame
from services.messages.description import BATCH_ROW_BOUNDS, BatchCounts
from services.messages.steps import Forward, StepKind
from services.messages.tensors import WireTensor
from shard_worker.batches.batches_away import BatchesAway
from shard_worker.batches.prepared_steps import PreparedBatch, PreparedSteps
from shard_worker.batches.stepping import BatchResults, BatchRow, SteppingSession, WaitingStep
from shard_worker.batches.waiting_steps import WaitingSteps, all_beside, is_chunk, rows_of, steps_of
from shard_worker.device.executor import BatchedWork, DeviceThread, device_error, looks_without_sleep, raising_first
from shard_worker.model.features import Features
from shard_worker.sampling.drawing import Draw, draw_together, queue_draws_into, runs_by_kernels
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.stage.batch_runner import DrawTokens, PlacedStep
from shard_worker.stage.step_graph import StepOutput, StepPart, token_of_row

if TYPE_CHECKING:
    import torch

    from shard_worker.drafting.ahead import IssuedBlock

T = TypeVar("T")

BLOCKS_AHEAD_FROM = 8
"""From so many sessions on, steps behind issued blocks are launched before the results of the last one are read, which
take the host as long by then as the device needs for a few rows: 16 sessions get 11 % more tokens/s by that, 4 get
nothing (8B shape, H200)."""

LOOKS_S = 0.1
"""How long results are looked for, and what comes meanwhile launched behind them, before the thread only waits."""

LOOK_AGAIN_S, LOOK_SELDOM_S = 5e-5, 1e-3
"""How often steps are looked for that should come soon; and where others need the core, a batch that is soon back,
whose rounds take some ten times as long there."""


@dataclass(slots=True)
class _Launched:
    """A step of several sessions that is on the device.

    rows: of which those without a `step` are left out. outputs: of each. issued: what was queued behind each.
    started_ns: when computing began. frame: what was prepared of the one that goes to the next stage.
    """

    rows: list[BatchRow]
    outputs: list[StepPart]
    issued: Sequence[IssuedBlock | None]
    started_ns: int
    frame: PreparedFrame | None = None

    @property
    def results(self) -> StepOutput:
        """The results of all rows."""
        return self.outputs[0].whole

    @property
    def is_featured(self) -> bool:
        """Whether drafts want features of its rows."""
        return any(row.given.features is not None for row in self.rows)

    @property
    def is_there(self) -> bool:
        """Whether the results are known to be there, and what was issued with them."""
        issued = next((block for block in self.issued if block is not None), None)
        return self.results.on_host is not None and self.results.on_host.there and (issued is None or issued.there)

    @property
    def is_looked_for(self) -> bool:
        """Whether the results are not there, and it makes sense to do something else until they are."""
        age_ns = time.monotonic_ns() - self.started_ns
        may_look = self.results.on_host is not None and age_ns < LOOKS_S * 1e9 and looks_without_sleep()
        return may_look and not self.is_there


class StepBatches:
    """The steps that wait on one device thread, as `BatchedWork` of that thread."""

    def __init__(self, thread: DeviceThread, sessions: Collection[object], drafting: BatchedWork) -> None:
        """sessions: those that are open, now and later. drafting: what drafts on the same thread have to do behind
        steps, which says what follows them."""
        self._thread, self._sessions, self._drafting = thread, sessions, drafting
        self._waiting = WaitingSteps(sessions)
        self._away = BatchesAway()
        """In a chain of several stages, answers' steps that were computed here and others follow by themselves."""
        self._launched: _Launched | None = None
        """The step whose results have not been read yet."""
        self._behind: _Launched | None = None
        """In a chain of several stages, a step of other sessions behind that one on the device."""
        self._prepared = PreparedSteps()
        """In such a chain, the steps that follow those on the device."""
        self._expected: dict[SteppingSession, BatchRow] = {}
        """The rows on the device that nobody has asked for yet: the results of the step before them are being read, or
        the draft tokens behind that one are still to come."""
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
        self._away.back(step.session)
        if not self._attach(step):
            self._waiting.add(step)
            self._thread.notice()

    def add_together(self, steps: Iterable[WaitingStep]) -> None:
        """Have steps computed as `add` does that the stage before computed together: together as far as this stage
        can."""
        left: list[WaitingStep] = []
        for step in steps:
            self._away.back(step.session)
            if not self._attach(step):
                left.append(step)
        self._waiting.add_together(left)
        self._thread.notice()

    def expect_first_step(self) -> None:
        """Have the first step of a session that is being opened come before the next long chunk of a prompt, if it
        comes soon; on the device thread."""
        self._waiting.expect_first_step()

    def settle(self) -> None:
        """Read the results of what is on the device, so that all that was begun is known to its sessions, which hear of
        errors too; on the device thread."""
        self._settle_launched([])

    def __len__(self) -> int:
        """How many steps wait."""
        return len(self._waiting)

    # --- as `BatchedWork`, on the device thread

    @property
    def waiting(self) -> bool:
        return self._launched is not None or bool(self._waiting)

    def drop(self) -> None:
        on_device = [one for one in (self._launched, self._behind) if one is not None]
        self._launched = self._behind = None
        for row in [row for one in on_device for row in one.rows]:
            if row.step is not None:
                row.step.dropped()
        for step in self._waiting.take_all():
            step.dropped()

    def run(self) -> None:
        """Compute steps that wait: those that can be one step with the first of them, and of all sessions no more than
        leaves as many to each stage of the chain; in turn with steps that are computed alone, one at a time, but that
        prompts which have begun in batches are ended first. Raises the first error of a step, behind all of them."""
        with raising_first() as errors:
            alone = self._waiting.take_alone(on_device=self._launched is not None)
            if alone is not None:
                self._compute_alone(alone, errors)
                return
            if self._launched is None and not self._waiting.for_batches:
                self._thread.about_to_wait()
                time.sleep(LOOK_AGAIN_S)
                return
            if self._launched is None and self._waits_for_batch:
                self._thread.about_to_wait()
                time.sleep(LOOK_AGAIN_S if looks_without_sleep() else LOOK_SELDOM_S)
                return
            if self._launched is None:
                self._compute(self._next_batch(), errors)
            elif self._launched.rows[0].session.chain_length > 1:
                self._overlap(self._launched, errors)
            else:
                self._go_on(errors)
            if not self.waiting:
                self._results_ns = None
            self._waiting.expect_next_chunk()

    @property
    def _waits_for_batch(self) -> bool:
        """Whether what waits is to be computed with steps that are soon back from the other stages: it is chunks of
        prompts alone, or on the first stage one batch more than there are stages."""
        waiting = self._waiting.for_batches
        [first, *_] = steps_of(waiting[0])
        if first.session.chain_length == 1:
            return False
        if self._away.expected() and all(map(is_chunk, waiting)):
            return True
        return _is_plain(first.forward) and self._is_one_more(first.session)

    def _is_one_more(self, first: SteppingSession) -> bool:
        """Return whether a batch of answers' rows that is back on the first stage would be one more under way than
        there are stages. first: the session of its first row."""
        on_device = sum(one is not None for one in (self._launched, self._behind))
        return first.is_first and self._away.expected(beside=first) + on_device >= first.chain_length

    def _note_leaving(self, rows: Iterable[BatchRow]) -> None:
        """Note whose next steps come from other stages by themselves, soon: before those that draft tokens are made for
        other batches had better go on."""
        self._away.left(
            row.session
            for row in rows
            if row.step is not None and row.session.chain_length > 1 and row.forward.more and _is_plain(row.forward)
        )

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

    def _next_batch(self) -> list[WaitingStep]:
        """Take out the steps of the next batch."""
        return [step for step in self._waiting.take_batch() if step.begins()]

    def _compute(self, steps: Sequence[WaitingStep], errors: list[Exception]) -> None:
        """Compute steps together, or one behind the other what is too much for one step."""
        self._compute_rows(self._begun(steps, errors), errors)

    def _begun(self, steps: Sequence[WaitingStep], errors: list[Exception]) -> list[BatchRow]:
        begun: list[BatchRow] = []
        for step in steps:
            try:
                begun.append(BatchRow(step.session, step.forward, step.session.begin(step.forward), step))
            except Exception as error:
                _fail(step, error, errors)
        return begun

    def _compute_rows(self, rows: list[BatchRow], errors: list[Exception]) -> None:
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

    def _compute_one(self, row: BatchRow, errors: list[Exception]) -> None:
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

    def _launch(
        self, rows: list[BatchRow], errors: list[Exception], placed: PlacedStep | None = None
    ) -> _Launched | None:
        """Begin to compute what is one step of the stage. placed: its first rows' part, if they were placed before.
        Returns None where that fails, which all hear of."""
        inputs = [row.given for row in rows]
        count = sum(len(given.token_ids) for given in inputs)
        self._thread.computes("step", count)
        if not inputs[0].stage.overlaps(inputs):
            # The thread itself computes it, perhaps for long.
            self._thread.do_put_off()
        started_ns = self._started(time.monotonic_ns())
        try:
            behind = next((row.session for row in rows if row.given.behind is not None), None)
            complete = None if behind is None else behind.complete_step
            outputs = inputs[0].stage.step_together(inputs, complete, placed, _drawing(rows))
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
        of_chain = launched.rows[0].session.chain_length > 1
        if of_chain and launched.results.on_host is None:
            return False
        if all(issued is not None for issued in launched.issued):
            # Those of other sessions need to know nothing of it.
            stage, rows = launched.rows[0].given.stage, sum(len(row.given.token_ids) for row in launched.rows)
            return of_chain or (len(self._sessions) >= BLOCKS_AHEAD_FROM and stage.steps_behind(rows, blocks=True))
        if launched.is_featured and launched.results.total_on_host is None:
            return False
        return all(
            row.session.is_copied_at_once(row.forward) or (row.drawn and row.given.features is None)
            for row in launched.rows
        )

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

    def _begin_following(self, before: _Launched, errors: list[Exception]) -> list[BatchRow]:
        """Begin what can be one step behind `before`: the steps that follow its own by themselves, and all that wait.

        None are begun where these cannot be one step, or something else is to be done before.
        """
        blocks = before.issued[0] is not None
        following: list[tuple[int, BatchRow, Forward, int]] = []
        row_count = rows_following = 0
        for number, row in enumerate(before.rows):
            row_count += len(row.given.token_ids)
            forward = None if row.step is None else row.session.following(row.forward)
            if forward is not None:
                following.append((number, row, forward, row_count - 1))
                rows_following += len(forward.token_ids)
        waiting, stage = self._waiting.for_batches, before.rows[0].given.stage
        kinds = {row.session.kind(forward) for _, row, forward, _ in following}
        kinds |= {step.session.kind(step.forward) for one in waiting for step in steps_of(one)}
        joining = all_beside(waiting, len(following), rows_following, before.rows[0].session.most_rows)
        if (
            len(following) < 2
            or self._thread.has_jobs
            or self._waiting.has_alone
            or not stage.steps_behind(rows_following + sum(map(rows_of, joining)), blocks=blocks)
            or len(kinds) > 1
        ):
            return []
        joined = self._waiting.take(joining)
        rows = []
        for number, row, forward, last_row in following:
            # Its session may be closed, or find no memory: it hears so when the step comes.
            with contextlib.suppress(Exception):
                given = row.session.begin(forward, number if blocks else None)
                if not blocks:
                    given = given.with_tokens((token_of_row(last_row),))
                rows.append(BatchRow(row.session, forward, given, None))
        return self._begun([step for step in joined if step.begins()], errors) + rows

    # --- in a chain of several stages, whose next steps come from the stages beside this one

    def _overlap(self, launched: _Launched, errors: list[Exception]) -> None:
        """Launch what has come behind the step that is on the device, and read the results of that one once they are
        there. Returns before, so that what comes meanwhile is found."""
        waits = bool(self._waiting.for_batches)
        if self._behind is None and waits and self._may_go_on() and not self._waits_for_batch:
            rows = self._begun(self._next_batch(), errors)
            if not self._fits_behind(rows):
                self._compute_rows(rows, errors)
                return
            self._behind = self._launch(rows, errors)
        if launched.is_looked_for:
            self._thread.about_to_wait()
        else:
            self._settle_first(errors)

    def _prepare(self, launched: _Launched) -> None:
        """Prepare the frame for the next stage, and the steps that follow those of a batch by themselves."""
        launched.frame = launched.rows[0].session.prepare_frame(launched.rows)
        rows: list[BatchRow] = []
        for row in launched.rows:
            forward = None if row.step is None or row.session.closed else row.session.following(row.forward)
            if forward is not None:
                # It may be closed by now, or find no memory: it hears so when the step comes.
                with contextlib.suppress(Exception):
                    rows.append(BatchRow(row.session, forward, row.session.prepare(forward), None))
        prepared = None
        if self._fits_behind(rows):
            inputs = [row.given for row in rows]
            prepared = PreparedBatch(rows, inputs[0].stage.place_together(inputs))
        self._prepared.put(launched.rows, prepared)

    def settle_first(self) -> None:
        """Read the results of the first step on the device, if they are there: in a chain of several stages the others
        wait for them. On the device thread."""
        if self._launched is not None and self._launched.is_there and not self._expected:
            with raising_first() as errors:
                self._settle_first(errors)

    def forget(self, session: SteppingSession) -> None:
        """Drop what is kept for a session of a chain of several stages that is closed, and so its memory; on the device
        thread."""
        self._away.forget(session)
        self._prepared.forget(session)

    def begin_prepared(
        self, steps: Sequence[tuple[SteppingSession, Forward]], activation: WireTensor | None = None
    ) -> None:
        """Launch steps that have come, if they are those that were prepared: before all that is to be done for them, up
        to `add` or `add_together`. Steps that wait join them as they join others. Does nothing where the device is not
        free for them, or something else is to be computed before; on the device thread. activation: of all rows, where
        the steps have none of their own."""
        prepared = self._prepared.take(steps, activation)
        free = self._launched is None or (self._behind is None and self._may_go_on())
        if prepared is None or not free or self._waiting.has_alone:
            return
        rows = prepared.rows
        if self._is_one_more(rows[0].session):
            # It waits for one of the others, and goes on with that.
            return
        beside = self._beside(rows)
        for row in (*rows, *beside):
            row.session.begin_prepared(row.forward)
        launched = self._launch([*rows, *beside], [], prepared.placed)
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

    def _beside(self, rows: Sequence[BatchRow]) -> list[BatchRow]:
        """Take out the steps that wait and can be computed with these; none where not all of them fit."""
        joining = self._waiting.joining(rows[0].session, rows[0].forward, len(rows))
        beside: list[BatchRow] = []
        try:
            for step in [step for one in joining for step in steps_of(one)]:
                given = step.session.prepare(step.forward)
                beside.append(BatchRow(step.session, step.forward, given, step))
        except Exception:
            # It hears of the error when it is begun by itself.
            beside = []
        if not self._fits_behind([*rows, *beside]):
            beside = []
        self._waiting.take(joining if beside else [])
        return [row for row in beside if row.step is None or row.step.begins()]

    def _fits_behind(self, rows: Sequence[BatchRow]) -> bool:
        """Return whether these are one step that can be launched at once."""
        if len(rows) < 2:
            return False
        inputs = [row.given for row in rows]
        stage = inputs[0].stage
        return stage.most_together(inputs) == len(rows) and stage.overlaps(inputs)

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
        # Also where the results of the next step are there already.
        self._thread.do_put_off()

    def _settle_launched(self, errors: list[Exception]) -> None:
        """Read the results of all steps that are on the device, if there are any."""
        self._ask_for_launched(errors)
        while self._launched is not None:
            self._settle_first(errors)

    def _settle_all(self, launched: _Launched, errors: list[Exception]) -> None:
        if not launched.is_there:
            self._thread.about_to_wait()
        sessions, row_count = len(launched.rows), sum(len(row.given.token_ids) for row in launched.rows)
        proposing = sum(row.forward.propose_tokens > 0 for row in launched.rows)
        try:
            drawn = _drawn(launched)
            ended_ns = _wait(launched)
            results = BatchResults(launched.rows, launched.outputs, drawn, launched.frame)
            launched.rows[0].session.send_ahead(results)
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


def _is_plain(forward: Forward) -> bool:
    """Return whether it is an answer's row without draft tokens, for which none are made either."""
    return forward.kind is StepKind.DECODE and not forward.propose_tokens


def _drawing(rows: Sequence[BatchRow]) -> DrawTokens | None:
    """Return what queues drawing all tokens of a step that can be drawn with it, and note how many those of each row
    are; None where there are none."""
    stage, draws, places, row_count = rows[0].given.stage, list[Draw](), list[int](), 0
    if not stage.draws or not runs_by_kernels(stage.segments[-1].device.torch_device):
        return None
    for row in rows:
        row_count += len(row.given.token_ids)
        own = row.session.draws_with_step(row.forward) or []
        row.drawn = len(own)
        draws += own
        places += range(row_count - len(own), row_count)

    def draw(logits: torch.Tensor, tokens: torch.Tensor, made: torch.Tensor) -> None:
        queue_draws_into(tokens, logits, draws, places, made)

    return draw if draws else None


def _drawn(launched: _Launched) -> list[list[int] | None]:
    """Return each session's tokens that are drawn from the step's logits: with the step, or else of all sessions at
    once, so that a GPU is waited for once. None for a session whose tokens are chosen otherwise."""
    behind = [None if row.step is None or row.drawn else row.session.draws(row.forward) for row in launched.rows]
    rows = [
        None if one is None or output.logits is None else (output.logits[-len(one) :], one)
        for output, one in zip(launched.outputs, behind, strict=True)
    ]
    tokens = iter(draw_together([one for one in rows if one is not None]))
    drawn = [None if one is None else next(tokens) for one in rows]
    for number, (row, output) in enumerate(zip(launched.rows, launched.outputs, strict=True)):
        if row.drawn and row.step is not None:
            chosen = output.argmax_on_host()
            assert chosen is not None
            drawn[number] = chosen[-row.drawn :]
    return drawn


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
