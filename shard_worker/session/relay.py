"""A session on a stage that is not the last: it computes steps, sends them on, and applies the answers from below."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from services.errors import FailedPrecondition, FlashsplitError, Unavailable
from services.messages.batch_frames import BatchAnswer, BatchStep, PreparedFrame, StepBatch
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    OpenSession,
    Proposal,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StepKind,
)
from services.messages.tensors import WireTensor
from services.rpc.stage import StageSession
from services.streams.batch_members import BatchMembers
from shard_worker.batches.stepping import BatchResults, BatchRow
from shard_worker.device.dtypes import Leaving
from shard_worker.drafting.link import slices_of
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.session.checks import PassedStep, check_commit, check_rows
from shard_worker.session.device_events import (
    AnswerNotSent,
    DeviceEvent,
    SessionBroken,
    StepAnswered,
    StepNotSent,
    StepPassedOn,
)
from shard_worker.session.device_session import DeviceSession, Lanes
from shard_worker.session.following import is_followed, probable_following_step, step_behind
from shard_worker.session.sent_rows import SentRows
from shard_worker.session.session import TargetSession
from shard_worker.session.session_errors import failure_below
from shard_worker.session.session_host import SessionHost
from shard_worker.stage.stage import StageState
from shard_worker.stage.step_graph import joined_rows


class RelaySession(TargetSession):
    """The half on the event loop. downstream: the session on the next stage.

    Where a stage behind this one is lost, the session's memory may rest here, and another one take it up: that computes
    nothing up to where this one came, and sends on the same rows again.
    """

    _device: RelayDeviceSession

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        state: StageState,
        lanes: Lanes,
        downstream: StageSession,
        sent: SentRows | None = None,
    ) -> None:
        """sent: as of `TargetSession`."""
        self.downstream = downstream
        self._unanswered: deque[PassedStep] = deque()
        # This stage's parts of snapshots that the stages below have not answered yet.
        self._saving: deque[asyncio.Future[SnapshotPart]] = deque()
        self._restored: SnapshotPart | None = None
        """This stage's part of a restore that the stages below have not answered yet."""
        self.on_answer: Callable[[Event], None] = lambda _: None
        """Called with what steps came to that were answered together with others: on the first stage, beside `events`,
        in one order with them."""
        self._early: deque[StepAnswered] = deque()
        """Answers of that kind to steps before which others are still to be answered by `events`."""
        self._proposal_due = False
        """Whether draft tokens are still to come in `events` for the last step that was answered there."""
        self._all_together_answered = asyncio.Event()
        device = RelayDeviceSession(host, request, state, lanes, self._handle, sent)
        super().__init__(host, request, device, downstream.stages, sent)

    async def events(self) -> AsyncIterator[Event]:
        try:
            async for event in self.downstream.events():
                if self._error is not None:
                    break
                match event:
                    case Commit():
                        await self._heard_of(event.step)
                        event = self._apply(event)
                    case Proposal():
                        self._proposal_due = False
                    case SnapshotSaved():
                        event = replace(event, parts=(await self._own_save(event), *event.parts))
                    case SnapshotRestored() if self._restored is not None:
                        event = replace(event, parts=(self._restored, *event.parts))
                        self._restored = None
                if isinstance(event, Failure) and event.reason is not FailureReason.DRAFT_LOST:
                    self._below_lost = event.reason is FailureReason.LINK_BROKEN
                    self._record.failed(event.reason)
                    yield event
                    return
                yield event
                self._answer_early()
            if self._error is None:
                raise Unavailable("the stage ended the session")
        except FlashsplitError as error:
            failure = failure_below(error, self.downstream.stages[0].location)
            self._below_lost = failure.reason is FailureReason.LINK_BROKEN
            self._record.failed(failure.reason)
            yield failure
        if self._error is not None:
            raise self._error

    def answer_at_once(self, take: Callable[[Event], bool]) -> None:
        """Do nothing: events come from another stage's stream, whose reader is woken in any case."""

    # --- steps

    async def forward(self, forward: Forward) -> None:
        await self._together_answered()
        await super().forward(forward)

    def _tasks_allowed(self, forward: Forward) -> int:
        # One chunk of a prompt may still be on its way while the device computes the next.
        return int(forward.kind is StepKind.PREFILL)

    @property
    def _awaits_verify(self) -> bool:
        return any(passed.kind is StepKind.VERIFY for passed in self._unanswered)

    async def _run(self, forward: Forward, arrived_ns: int) -> None:
        self._count_step()
        if self._holds(forward):
            await self._send_again(forward, arrived_ns)
            return
        if forward.kind is StepKind.PREFILL:
            outgoing = await self.host.thread.awaited(self._device.launch(forward))
            self._length += len(forward.token_ids)
            # The device goes on with the next chunk while this one is on its way.
            self._begin(self._send_when_complete, outgoing, arrived_ns)
            return
        # With others only where it has rows, the next stage is to compute these, and nothing of the session is on its
        # way that it could overtake.
        overtakes_none = (
            not self._held_below(forward) and not self._unanswered and not self._saving and self._restored is None
        )
        joins = overtakes_none and forward.kind is not StepKind.RESUME
        result = await self.host.thread.awaited(self._device.pass_on(forward, arrived_ns, joins=joins))
        if result is None:
            # The device thread tells of it when all that were computed with it go on.
            await self.host.thread.submit_step(int)
            self.host.events.handle_waiting()
            return
        passed, forward_ns = result
        if forward.kind is not StepKind.VERIFY:
            self._length += len(forward.token_ids)
        await self._send(passed, arrived_ns, forward_ns)

    async def _send(self, passed: Forward, arrived_ns: int, forward_ns: int) -> None:
        """Send a step to the next stage, with rows where it needs them."""
        if self._held_below(passed):
            passed = replace(passed, activation=None, features=())
        self._note(PassedStep.of(passed, arrived_ns, forward_ns))
        await self.downstream.forward(passed)

    def _held_below(self, forward: Forward) -> bool:
        """Return whether the next stage has a step's rows computed already."""
        end = forward.base_position + len(forward.token_ids)
        return bool(forward.token_ids) and end <= self.downstream.stages[0].held_length

    async def _send_again(self, forward: Forward, arrived_ns: int) -> None:
        """Send a step on whose rows are computed already, with what went to the next stage before."""
        assert self._sent is not None
        self._device.skip(forward.step)
        if forward.kind is not StepKind.VERIFY:
            self._length += len(forward.token_ids)
        if not self._held_below(forward):
            forward = self._sent.again(forward, features=self._request.draft is not None)
        await self._send(forward, arrived_ns, 0)

    async def _together_answered(self) -> None:
        """Wait until no step is under way that went on together with others: what goes on the session's own stream
        would come before it."""
        with self.host.events.awaiting():
            while any(passed.together for passed in self._unanswered) and not self._closed and self._error is None:
                self._all_together_answered.clear()
                await self._all_together_answered.wait()

    async def _send_when_complete(self, outgoing: OutgoingStep, arrived_ns: int) -> None:
        async with self._in_order:
            if outgoing.complete:
                passed, forward_ns = outgoing.wait()
            else:
                rows = len(outgoing.forward.token_ids)
                passed, forward_ns = await self.host.thread.result_of(outgoing.wait, "chunk", rows)
            self._device.keep(passed)
            await self._send(passed, arrived_ns, forward_ns)

    def _note(self, passed: PassedStep) -> None:
        """Remember a step that is about to go to the next stage, until it is answered."""
        self._record.forward_ns += passed.forward_ns
        self._record.queued_ns += passed.queued_ns
        self._unanswered.append(passed)

    def _handle(self, event: DeviceEvent) -> None:
        match event:
            case StepPassedOn(passed, counted):
                if not counted:
                    self._count_step()
                if passed.kind is not StepKind.VERIFY:
                    # The answer to a verify before it may not be heard of yet.
                    self._length = passed.base + passed.rows
                self._note(passed)
            case StepAnswered():
                self._early.append(event)
                self._answer_early()
            case AnswerNotSent(answer):
                self._tell(answer.commit, answer.proposal)
            case StepNotSent(step):
                self._begin(self.downstream.forward, step)
            case SessionBroken(error):
                self._below_lost = self._below_lost or error.code_name == "UNAVAILABLE"
                self.fail(error)

    async def _heard_of(self, step: int) -> None:
        """Hear of what the device thread did up to sending this step on, which it tells behind that."""
        self.host.events.handle_waiting()
        if not self._unanswered or self._unanswered[0].step != step:
            await self.host.thread.submit_step(int)
            self.host.events.handle_waiting()

    def _apply(self, commit: Commit) -> Commit:
        """Commit the rows that the last stage says count. Returns the answer with this stage's times added.

        Errors as in `check_commit`.
        """
        passed = check_commit(commit, self._unanswered.popleft() if self._unanswered else None)
        if passed.kind is StepKind.VERIFY and not self._closed:
            self._length = max(self._length, commit.length)
            self.host.thread.queue_step(self._device.commit_and_prelaunch, commit.step, commit.length)
        self._proposal_due = bool(passed.asked_for(commit) and commit.token_ids)
        self._all_together_answered.set()
        return self._device.answer_above(commit, passed)

    def _answer_early(self) -> None:
        """Tell of answers that came together with those of others, once all before them are told."""
        while self._early and not self._proposal_due and self._unanswered:
            answer, passed = self._early[0], self._unanswered[0]
            if passed.step != answer.commit.step:
                return
            self._early.popleft()
            self._unanswered.popleft()
            if passed.kind is StepKind.VERIFY:
                self._length = max(self._length, answer.commit.length)
            self._all_together_answered.set()
            if not answer.told:
                self._tell(answer.commit, answer.proposal)

    def _tell(self, commit: Commit, proposal: Proposal | None) -> None:
        """Answer a step on the first stage."""
        self.on_answer(commit)
        if proposal is not None:
            self.on_answer(proposal)

    # --- snapshots

    async def save_snapshot(self, save: SnapshotSave) -> None:
        await self._together_answered()
        await super().save_snapshot(save)

    async def _save(self, save: SnapshotSave, own: asyncio.Future[SnapshotPart]) -> None:
        self._saving.append(own)
        await self.downstream.save_snapshot(save)
        # The next step must not come before the copy: one that may be computed with others does not queue behind jobs.
        await asyncio.wait([own])

    async def _own_save(self, saved: SnapshotSaved) -> SnapshotPart:
        """Return this stage's part. Raises FailedPrecondition for an answer that no save waits for."""
        if not self._saving:
            raise FailedPrecondition(f"snapshot_saved {saved.snapshot_id} came unasked", reason="OUT_OF_STEP")
        return await self._saving.popleft()

    async def _restore(self, restore: SnapshotRestore, own: SnapshotPart) -> None:
        self._restored = own
        if self._sent is not None and not self._held:
            self._sent.begin(restore.token_ids)
        await self.downstream.restore_snapshot(restore)

    # --- its end

    def _end_events(self) -> None:
        # This ends the events from below, after which the error is raised.
        self._begin(self.downstream.close)
        self._all_together_answered.set()

    async def _close_others(self, why: str) -> None:
        self._all_together_answered.set()
        await self.downstream.close(why)


@dataclass(frozen=True, slots=True)
class OutgoingStep:
    """A step that was computed here, while its results are on their way to the host.

    feature_indices: the capture index of each feature tensor, in the order in which they travel. leaving: the
    activation, then the features. started_ns: when computing began, by `time.monotonic_ns`.
    """

    forward: Forward
    feature_indices: Sequence[int | None]
    leaving: Leaving
    started_ns: int

    @property
    def complete(self) -> bool:
        """Whether `wait` would return at once."""
        return self.leaving.there

    def wait(self) -> tuple[Forward, int]:
        """Wait, on any thread, for the results. Returns the step as the next stage gets it, and nanoseconds since
        computing began."""
        self.leaving.wait()
        return self.lasting(self.as_sent()), self.elapsed_ns

    def as_sent(self) -> Forward:
        """Return the step as the next stage gets it.

        The bytes of its activation are there after `leaving.wait_first`, all of them after `leaving.wait`; those of
        the activation may be overwritten by the next step.
        """
        activation, *features = self.leaving.views()
        pieces = slices_of(self.feature_indices, features, self.forward.base_position)
        return replace(self.forward, activation=activation, features=tuple(pieces))

    def lasting(self, sent: Forward) -> Forward:
        """Return what `as_sent` gave, with an activation that the next step does not overwrite."""
        return sent.with_own_memory() if self.leaving.lent else sent

    @property
    def elapsed_ns(self) -> int:
        return time.monotonic_ns() - self.started_ns


class RelayDeviceSession(DeviceSession):
    """The half on the device thread."""

    _counted = False
    """Whether the event loop has counted the step that is on its way."""
    _came_past_loop = -1
    """The last step that came from a device thread, or follows one by itself here."""
    _begun: Forward | None = None
    """The step that was begun behind a token whose step's answer is still to come."""

    def __init__(self, *args: Any) -> None:
        """Arguments are those of `DeviceSession`."""
        super().__init__(*args)
        self._passed: deque[PassedStep] = deque(maxlen=2)
        """The last steps that went on together with others: two where the second one was begun behind the first one's
        token. They may have been answered on another way."""

    def listen(self, max_tensor_bytes: int, max_feature_slices: int) -> None:
        super().listen(max_tensor_bytes, max_feature_slices)
        below = self._lanes.below
        if below is not None:
            below.listen(
                lambda step: self._take_from_lane(self._follow, step),
                self._break,
                on_begun=functools.partial(self._guarded, self._release_following),
            )
            if below.batches is not None:
                below.batches.join(below.stream_id, self, self._edges)

    def pass_on(self, forward: Forward, arrived_ns: int, *, joins: bool) -> Future[tuple[Forward, int] | None]:
        """Have a step computed, from any thread.

        joins: it may go on together with those of other sessions. Returns it as the next stage gets it, and the
        nanoseconds that it took; None where it went on from here.
        """
        return self._batches.queue(self, forward, functools.partial(self._passing, arrived_ns, joins))

    def _passing(self, arrived_ns: int, joins: bool, step: ComputedStep) -> tuple[Forward, int] | None:
        self._together = False
        if joins and self._goes_together():
            self._counted = True
            self._edges.add_step(self, step, arrived_ns)
            return None
        passed, forward_ns = self._outgoing(step).wait()
        self.keep(passed)
        return passed, forward_ns

    def keep(self, sent: Forward) -> None:
        """Keep the rows of a step that goes to the next stage, to be sent again where that is lost; on either thread,
        in the order of steps."""
        kept = self._sent()
        if kept is not None:
            kept.add(sent)

    def launch(self, forward: Forward) -> Future[OutgoingStep]:
        """Have a chunk of a prompt computed, from any thread, on a GPU without waiting for it."""
        return self._batches.queue(self, forward, self._outgoing)

    def _outgoing(self, step: ComputedStep) -> OutgoingStep:
        """Queue the way of a step's results to the host."""
        # What the next step overwrites is no place for a chunk, which leaves while the next step runs.
        on_host = None if step.forward.kind is StepKind.PREFILL else step.output.on_host
        hidden = [step.output.hidden] if on_host is None else []
        leaving = Leaving([*hidden, *step.features.tensors], on_host)
        return OutgoingStep(step.forward, step.features.indices, leaving, step.started_ns)

    def commit_and_prelaunch(self, step: int, length: int) -> None:
        """Commit the rows of a verify, then prelaunch the step that is expected behind it."""
        self.commit(step, length)
        if step == self._progress.step:
            self._next.prelaunch_expected()

    # --- a step from the stage before

    def _take_step(self, forward: Forward, arrived_ns: int) -> None:
        if not self._batches.expects(self):
            self._check_next(forward)
        self._came_past_loop = forward.step
        self._compute_from_lane(forward, functools.partial(self._send_below, arrived_ns))

    def _send_below(self, arrived_ns: int, step: ComputedStep, *, together: bool = False) -> None:
        """Send a step on. together: it came with those of other sessions, and is answered with them."""
        self._together, self._counted = together, False
        if self.was_sent(step.forward) or self._goes_together():
            self._edges.add_step(self, step, arrived_ns)
            if step.alone:
                self.announce()
                self._events.announce()
            return
        outgoing = self._outgoing(step)
        sent, leaving, below = outgoing.as_sent(), outgoing.leaving, self._lanes.below
        if below is not None and leaving.lent:
            below.prepare(sent)
        leaving.wait_first()
        # The next step may overwrite it as soon as this one is sent.
        lasting = sent if self._sent() is None else outgoing.lasting(sent)
        # Before its answer can come; the event loop wakes up behind it.
        self.tell(StepPassedOn(PassedStep.of(sent, arrived_ns, outgoing.elapsed_ns)))
        if below is None or not below.send(sent, leaving.wait if leaving.lent else None):
            leaving.wait()
            self.tell(StepNotSent(outgoing.lasting(sent)))
        elif sent.more and step.alone:
            self._expect_token(sent)
            self._next.expect(sent)
        self.keep(lasting)
        if step.alone:
            self._events.announce()

    # --- a step together with those of other sessions

    def _take_together(self, arrived_ns: int, step: ComputedStep) -> None:
        self._send_below(arrived_ns, step, together=True)

    def _goes_together(self) -> bool:
        """Return whether a step goes on together with those that were computed with it: beside other sessions on the
        first stage, and on the others where it came so, as its answer goes up the same way."""
        return self._has_way_below and (self._together or (self.is_first and not self._batches.lone))

    @property
    def _has_way_below(self) -> bool:
        below = self._lanes.below
        return below is not None and below.batches is not None and self._request.prompt_logprobs is None

    def was_sent(self, forward: Forward) -> bool:
        """Return whether a step was sent on already, with those that were computed with it."""
        return self._sent_ahead == forward.step

    @property
    def batches_below(self) -> BatchMembers[Any]:
        """The way on which steps go on together with those of others."""
        assert self._lanes.below is not None
        assert self._lanes.below.batches is not None
        return self._lanes.below.batches

    @property
    def stream_below(self) -> int:
        """The session's number on that way."""
        assert self._lanes.below is not None
        return self._lanes.below.stream_id

    def passed_on(self, sent: Forward, arrived_ns: int, forward_ns: int) -> None:
        """Take note that a step goes on together with others. sent: as the next stage gets it; forward_ns: how long it
        took."""
        self.keep(sent)
        passed = PassedStep.of(sent, arrived_ns, forward_ns, together=True)
        self._passed.append(passed)
        self.tell(StepPassedOn(passed, self._counted), pressing=self._counted)

    def not_sent(self, sent: Forward) -> None:
        """Send a step on the session's own stream that could not go on together with others."""
        self._passed.pop()
        self.tell(StepNotSent(sent))

    def prepare_frame(self, rows: Sequence[BatchRow]) -> PreparedFrame | None:
        ahead = [*itertools.takewhile(_may_go_ahead, rows)]
        # Chunks of prompts, behind them, go in their sessions' streams; another row would be computed apart from them.
        if len(ahead) < 2 or any(row.forward.kind is not StepKind.PREFILL for row in rows[len(ahead) :]):
            return None
        sending = [row.session for row in ahead if isinstance(row.session, RelayDeviceSession)]
        if len({id(session.batches_below) for session in sending}) > 1:
            return None
        steps = (BatchStep(session.stream_below, row.forward) for session, row in zip(sending, ahead, strict=True))
        return sending[0].batches_below.prepare_steps(tuple(steps))

    def send_ahead(self, results: BatchResults) -> None:
        frame = results.frame
        ahead = [] if frame is None else results.rows[: len(frame.steps)]
        if frame is None or not all(map(_may_go_ahead, ahead)):
            return
        # Each has a single row.
        _, on_host = joined_rows(results.outputs[: len(ahead)])
        if on_host is None:
            return
        [activation] = Leaving([], on_host).wait()
        if self.batches_below.send_steps(StepBatch(frame.steps, activation), frame):
            for row in ahead:
                assert isinstance(row.session, RelayDeviceSession)
                row.session._sent_ahead = row.forward.step

    def is_copied_at_once(self, forward: Forward) -> bool:
        """As there; what a draft wants leaves with the rows."""
        return True

    def goes_ahead(self, forward: Forward) -> bool:
        """Return whether a row goes on together with those beside it, whatever else is made of it: one of an answer
        without a draft, which goes past the event loop."""
        if forward.kind is not StepKind.DECODE or self._request.draft is not None:
            return False
        if self.is_first:
            return forward.step == self._came_past_loop and self._goes_together()
        return forward.step == self._came_together and self._has_way_below

    def pass_token_up(self, step: int, token: int) -> None:
        """Send the token that a step came to on to the stage before, if it came from there together with others."""
        if self._together:
            self._edges.add_token(self, step, token)

    def row_behind(self, step: int, token: int) -> Forward | None:
        """Return the step that follows one by itself, on the first stage, whose answer is still to come; None where
        none does. token: what that one came to."""
        if self._told_in_stream:
            return None
        passed = self._passed[-1] if self._passed and self._begun is None else None
        if passed is None or passed.step != step or passed.kind is not StepKind.DECODE or passed.propose_tokens:
            return None
        length = passed.base + passed.rows
        if not is_followed(passed.more, length, (token,), self._request):
            return None
        return self.limits.applied(Forward(step + 1, length, (token,), StepKind.DECODE, more=passed.more - 1))

    @property
    def has_begun_ahead(self) -> bool:
        """Whether the step behind the one that is answered next has begun."""
        return self._begun is not None

    def begin_ahead(self, row: Forward) -> None:
        """Begin such a step; `take_answer` will find that its token is that of the answer."""
        self._begun, self._released = row, False
        self._take_step(row, time.monotonic_ns())

    def take_answer(self, answer: BatchAnswer) -> None:
        """Take the answer to a step that went on together with others, and begin the one that follows by itself.

        Raises FailedPrecondition where it does not fit.
        """
        commit, proposal = answer.commit, answer.proposal
        while self._passed and self._passed[0].step < commit.step:
            self._passed.popleft()
        passed = check_commit(commit, self._passed.popleft() if self._passed else None)
        if passed.kind is StepKind.VERIFY:
            self.commit(commit.step, commit.length)
        commit = self.answer_above(commit, passed)
        begun, self._begun = self._begun, None
        if begun is not None and (begun.step - 1, begun.token_ids) != (commit.step, commit.token_ids):
            raise FailedPrecondition(
                f"step {commit.step} came to tokens {[*commit.token_ids]}, and {[*begun.token_ids]} was said before",
                reason="OUT_OF_STEP",
                field="token_ids",
            )
        following = None if self._together or begun is not None else self._following(commit, proposal)
        # Before it is told that the step that follows goes on.
        self._thread.soon(self._tell_answered, commit, proposal, begun is not None or following is not None)
        if self._together:
            self._answer_together(commit, proposal)
        elif following is not None:
            self._released = False
            self._take_step(following, time.monotonic_ns())

    def _tell_answered(self, commit: Commit, proposal: Proposal | None, followed: bool) -> None:
        """Tell the event loop of an answer. followed: the next step has begun."""
        if followed and proposal is None:
            commit = commit.begun_behind()
        elif followed and proposal is not None:
            proposal = replace(proposal, followed=True)
        told = followed and self._tells_caller
        if told:
            self._answer_together(commit, proposal)
        pressing = self.is_first and not told
        self._events.put(self._handle, StepAnswered(commit, proposal, told), pressing=pressing)

    def is_prepared(self, forward: Forward, came: Forward, activation: WireTensor | None) -> bool:
        ends = self.is_first and came.token_ids and came.token_ids[-1] in self._request.stop_token_ids
        return not ends and super().is_prepared(forward, came, activation)

    def _following(self, commit: Commit, proposal: Proposal | None) -> Forward | None:
        """Return the step that follows by itself, None where none does."""
        if commit.propose_tokens and proposal is None:
            return None
        following = step_behind(commit, () if proposal is None else proposal.token_ids, self._request)
        return None if following is None else self.limits.applied(following)

    def answer_above(self, commit: Commit, passed: PassedStep) -> Commit:
        """Return a step's answer as the stage before gets it, on either thread. passed: the step."""
        followed = is_followed(passed.more, commit.length, commit.token_ids, self._request)
        more = passed.more if self.is_first and followed else 0
        return commit.passed_up(passed.timing(), more, passed.asked_for(commit))

    # --- expectations

    def _expect_token(self, sent: Forward) -> None:
        """On the first stage, tell the lane below that the next step comes with the token that this one produces."""
        below = self._lanes.below
        if self._lanes.above is not None or below is None or self._request.draft is not None:
            return
        if sent.kind is StepKind.DECODE and (following := probable_following_step(sent, self._request)) is not None:
            release = functools.partial(self._guarded, self._next.release_with_tokens, following.base_position)
            below.expect(following, release)

    # --- a step from the stages below, which have done with the one before it

    def _follow(self, following: Forward, arrived_ns: int) -> None:
        """Begin with the step on the first stage; send it on to the first stage from any other."""
        state = self.state()
        self._commit_to(state, following.base_position)
        above = self._lanes.above
        if above is None:
            self._take_step(self.limits.applied(following), arrived_ns)
        elif not above.send(following):
            raise FailedPrecondition("the socket for steps to the stage above is broken", reason="LANE_BROKEN")
        else:
            check_rows(following, state.length, self._request, self._stage.config.vocab_size)
            self._expect_activation(following, self._next.rows_of(following))

    def _release_following(self, following: Forward, whole: bool) -> None:
        """Release the step on the first stage as soon as it has come; arguments as of `NextStep.release`."""
        if self._lanes.above is None and self._batches.expects_one:
            self._commit_to(self.state(), following.base_position)
            self._next.release(following, whole)


def _may_go_ahead(row: BatchRow) -> bool:
    """Return whether a row of a batch goes on together with those beside it, whatever else is made of it."""
    return row.step is not None and isinstance(row.session, RelayDeviceSession) and row.session.goes_ahead(row.forward)
