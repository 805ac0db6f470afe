"""A session on a stage that is not the last: it computes steps, sends them on, and applies the answers from below."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, Unavailable
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    OpenSession,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageTiming,
    StepKind,
)
from services.rpc.stage import StageSession
from services.streams.step_lane import StepLane
from shard_worker.device.dtypes import Leaving
from shard_worker.drafting.link import slices_of
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.session.checks import PassedStep, check_commit, check_rows
from shard_worker.session.following import probable_following_step
from shard_worker.session.session import (
    DeviceEvent,
    DeviceSession,
    Lanes,
    SessionBroken,
    SessionHost,
    StepNotSent,
    StepPassedOn,
    TargetSession,
    failure_below,
)
from shard_worker.stage.stage import StageState


class RelaySession(TargetSession):
    """The half on the event loop. downstream: the session on the next stage."""

    _device: RelayDeviceSession

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        state: StageState,
        above: StepLane | None,
        downstream: StageSession,
    ) -> None:
        self.downstream = downstream
        self._unanswered: deque[PassedStep] = deque()
        # This stage's parts of snapshots that the stages below have not answered yet.
        self._saving: deque[asyncio.Future[SnapshotPart]] = deque()
        self._restored: SnapshotPart | None = None
        lanes = Lanes(above, downstream.step_lane)
        device = RelayDeviceSession(host, request, state, lanes, self._handle)
        super().__init__(host, request, device, downstream.stages)

    async def events(self) -> AsyncIterator[Event]:
        try:
            async for event in self.downstream.events():
                if self._error is not None:
                    break
                match event:
                    case Commit():
                        event = self._apply(event)
                    case SnapshotSaved():
                        event = replace(event, parts=(await self._own_save(event), *event.parts))
                    case SnapshotRestored() if self._restored is not None:
                        event = replace(event, parts=(self._restored, *event.parts))
                if isinstance(event, Failure) and event.reason is not FailureReason.DRAFT_LOST:
                    self._record.failed(event.reason)
                    yield event
                    return
                yield event
            if self._error is None:
                raise Unavailable("the stage ended the session")
        except FlashsplitError as error:
            failure = failure_below(error, self.downstream.stages[0].location)
            self._record.failed(failure.reason)
            yield failure
        if self._error is not None:
            raise self._error

    # --- steps

    def _tasks_allowed(self, forward: Forward) -> int:
        # One chunk of a prompt may still be on its way while the device computes the next.
        return int(forward.kind is StepKind.PREFILL)

    @property
    def _awaits_verify(self) -> bool:
        return any(passed.kind is StepKind.VERIFY for passed in self._unanswered)

    async def _run(self, forward: Forward, arrived_ns: int) -> None:
        self._count_step()
        if forward.kind is StepKind.PREFILL:
            outgoing = await self.host.thread.awaited(self._device.launch(forward))
            self._length += len(forward.token_ids)
            # The device goes on with the next chunk while this one is on its way.
            self._begin(self._send_when_complete, outgoing, arrived_ns)
            return
        passed, forward_ns = await self.host.thread.awaited(self._device.pass_on(forward))
        if forward.kind is not StepKind.VERIFY:
            self._length += len(forward.token_ids)
        self._note(passed, arrived_ns, forward_ns)
        await self.downstream.forward(passed)

    async def _send_when_complete(self, outgoing: OutgoingStep, arrived_ns: int) -> None:
        async with self._in_order:
            if outgoing.complete:
                passed, forward_ns = outgoing.wait()
            else:
                rows = len(outgoing.forward.token_ids)
                passed, forward_ns = await self.host.thread.result_of(outgoing.wait, "chunk", rows)
            self._note(passed, arrived_ns, forward_ns)
            await self.downstream.forward(passed)

    def _note(self, passed: Forward, arrived_ns: int, forward_ns: int) -> None:
        """Remember a step that is about to go to the next stage, until it is answered."""
        self._record.forward_ns += forward_ns
        self._record.queued_ns += max(0, time.monotonic_ns() - arrived_ns - forward_ns)
        self._unanswered.append(PassedStep.of(passed, arrived_ns, forward_ns))

    def _handle(self, event: DeviceEvent) -> None:
        match event:
            case StepPassedOn(step, arrived_ns, forward_ns):
                self._count_step()
                if step.kind is not StepKind.VERIFY:
                    self._length += len(step.token_ids)
                self._note(step, arrived_ns, forward_ns)
            case StepNotSent(step):
                self._begin(self.downstream.forward, step)
            case SessionBroken(error):
                self.fail(error)

    def _apply(self, commit: Commit) -> Commit:
        """Commit the rows that the last stage says count. Returns the answer with this stage's times added.

        Errors as in `check_commit`.
        """
        # What the device thread sent on by itself may not be heard of yet.
        self.host.events.handle_waiting()
        passed = check_commit(commit, self._unanswered.popleft() if self._unanswered else None)
        if passed.kind is StepKind.VERIFY and not self._closed:
            self._length = commit.length
            self.host.thread.queue_step(self._device.commit_and_prelaunch, commit.step, commit.length)
        elapsed_ns = time.monotonic_ns() - passed.arrived_ns
        own = StageTiming(passed.forward_ns, elapsed_ns, passed.size_bytes)
        return replace(commit, timings=(own, *commit.timings))

    # --- snapshots

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
        await self.downstream.restore_snapshot(restore)

    # --- its end

    def _end_events(self) -> None:
        # This ends the events from below, after which the error is raised.
        self._begin(self.downstream.close)

    async def _close_others(self, why: str) -> None:
        await self.downstream.close()


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

    def listen(self, max_tensor_bytes: int, max_feature_slices: int) -> None:
        super().listen(max_tensor_bytes, max_feature_slices)
        if self._lanes.below is not None:
            self._lanes.below.listen(
                lambda step: self._take_from_lane(self._follow, step),
                self._break,
                on_begun=functools.partial(self._guarded, self._release_following),
            )

    def pass_on(self, forward: Forward) -> Future[tuple[Forward, int]]:
        """Have a step computed, from any thread. Returns it as the next stage gets it, and the nanoseconds that it
        took."""
        return self._batches.queue(self, forward, lambda step: self._outgoing(step).wait())

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
        self._check_next(forward)
        self._compute_from_lane(forward, functools.partial(self._send_below, arrived_ns))

    def _send_below(self, arrived_ns: int, step: ComputedStep) -> None:
        outgoing = self._outgoing(step)
        sent, leaving, below = outgoing.as_sent(), outgoing.leaving, self._lanes.below
        if below is not None and leaving.lent:
            below.prepare(sent)
        leaving.wait_first()
        # Before its answer can come; the event loop wakes up behind it.
        self.tell(StepPassedOn(sent, arrived_ns, outgoing.elapsed_ns))
        if below is None or not below.send(sent, leaving.wait if leaving.lent else None):
            leaving.wait()
            self.tell(StepNotSent(outgoing.lasting(sent)))
        elif sent.more and step.alone:
            self._expect_token(sent)
            self._next.expect(sent)
        if step.alone:
            self._events.announce()

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
            self._take_step(following, arrived_ns)
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

    def _commit_to(self, state: StageState, length: int) -> None:
        """Commit the rows of a verify, where there are such, up to the position at which the next step begins.

        Raises InvalidArgument where that is none of theirs.
        """
        if state.pending:
            if not state.length < length <= state.length + state.pending:
                raise InvalidArgument(
                    f"base_position is {length} behind {state.pending} rows from {state.length}", field="base_position"
                )
            self.commit(self._progress.step, length)
