"""One request on one stage: takes steps, runs them on the device thread, passes them on, brings back what counts.

The last stage decides and answers; every other one relays the answer and applies it while doing so. Positions and the
step number are checked here, on arrival, so that a lost or repeated frame is refused and never guessed at.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace

from services.errors import CLOSED, FailedPrecondition, FlashsplitError, Unavailable
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
    StageIdentity,
    StageTiming,
    StepKind,
)
from services.rpc.stage import StageSession
from services.streams.step_lane import StepLane
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.engine import DraftRequest
from shard_worker.drafting.link import DraftLink
from shard_worker.model.features import Features
from shard_worker.sampling.verifier import Produced, Verifier
from shard_worker.session.failures import draft_lost, failure_below
from shard_worker.session.in_flight import InFlight, answered
from shard_worker.session.passing import Passing
from shard_worker.session.session_work import SessionWork
from shard_worker.session.step_checks import check_restore, check_rows, check_save, check_tensors
from shard_worker.session_record import SessionRecord
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.stage.stage import Stage, StageState


class TargetSession:
    """Implements `services.rpc.stage.StageSession` on this worker's devices."""

    def __init__(
        self,
        *,
        thread: DeviceThread,
        stage: Stage,
        state: StageState,
        request: OpenSession,
        identity: StageIdentity,
        downstream: StageSession | None,
        verifier: Verifier | None,
        draft: DraftLink | None,
        keeper: SnapshotKeeper,
        above: StepLane | None,
        on_close: Callable[[TargetSession], None],
    ) -> None:
        self._thread, self._stage, self._request, self._keeper = thread, stage, request, keeper
        self._location = identity.location
        # The last stage has a decider and perhaps a draft, every other one a stage below.
        self._downstream, self._verifier, self._draft = downstream, verifier, draft
        self.step_lane: StepLane | None = None
        self._above = above
        self._on_close = on_close
        self._record = SessionRecord(request.request_id, request.trace, identity.location, identity.layers)
        self.stages = (identity, *(downstream.stages if downstream is not None else ()))
        # What the stages before this one captured for the session's draft, in the order in which they send it.
        self._incoming_captures: list[int | None] = []
        if request.draft is not None:
            self._incoming_captures = [i for i, layer in enumerate(stage.captures) if layer < stage.layers.first]
            if self._incoming_captures and stage.summed:
                self._incoming_captures = [None]
        self.max_feature_slices = len(self._incoming_captures)
        self.max_tensor_bytes = request.max_rows * stage.config.hidden_size * 4
        self._next_step = 0
        self._length = 0
        self._unanswered: deque[InFlight] = deque()
        # This stage's share of snapshots that the stages below have not answered yet.
        self._saving: deque[asyncio.Future[SnapshotPart]] = deque()
        self._restored: SnapshotPart | None = None
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        # Steps go on, and answers go out, in their order.
        self._in_order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._error: FlashsplitError | None = None
        below = None if downstream is None else downstream.step_lane
        self._work = SessionWork(thread, stage, state, request, verifier, self._incoming_captures, above, below)
        self._work.listen(self, self.max_tensor_bytes, self.max_feature_slices)

    async def forward(self, forward: Forward) -> None:
        arrived_ns = time.monotonic_ns()
        try:
            if forward.step != self._next_step:
                # The device thread may be ahead of what has been heard of it here.
                await self._thread.submit(int)
            # Behind what was begun before, but for one chunk of a prompt that is on its way.
            await self._settled(forward.kind is StepKind.PREFILL and self._downstream is not None)
            self._check(forward)
            await self._run(forward, arrived_ns)
        except FlashsplitError as error:
            raise self._located(error) from None

    async def save_snapshot(self, save: SnapshotSave) -> None:
        await self._settled()
        self._check_save(save)
        own = self._keeper.save(save, self._work.views(), self._location)
        if self._downstream is not None:
            self._saving.append(own)
            await self._downstream.save_snapshot(save)
            return
        parts = [await own]
        if self._request.draft is not None:
            parts.append(await self._save_draft(save))
        self._events.put_nowait(SnapshotSaved(save.snapshot_id, save.length, tuple(parts)))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        if self._next_step or self._length:
            raise FailedPrecondition("restore comes before the first step", reason="OUT_OF_STEP", field="frame")
        check_restore(restore, self._request, self._stage.config.vocab_size)
        own = await self._keeper.restore(restore, self._work.views(), self._location)
        state = self._work.state()
        state.length = self._length = restore.length
        self._restored = own
        if self._downstream is not None:
            await self._downstream.restore_snapshot(restore)
            return
        assert self._verifier is not None
        self._verifier.observe(restore.token_ids)
        parts = [own]
        if self._draft is not None:
            parts.append(await self._draft.restore_snapshot(restore))
        self._events.put_nowait(SnapshotRestored(restore.snapshot_id, restore.length, tuple(parts)))

    async def events(self) -> AsyncIterator[Event]:
        if self._downstream is None:
            while (event := await self._events.get()) is not None:
                yield event
            if self._error is not None:
                raise self._error
            return
        try:
            async for event in self._downstream.events():
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
            failure = failure_below(error, self._downstream.stages[0].location)
            self._record.failed(failure.reason)
            yield failure
        if self._error is not None:
            raise self._error

    @property
    def held_bytes(self) -> int:
        """Memory that its caches take by now, those of a draft beside it included."""
        return self._work.held_bytes + (0 if self._draft is None else self._draft.held_bytes)

    async def close(self, why: str = CLOSED) -> None:
        if self._closed:
            return
        self._closed = True
        self._work.close()
        self._events.put_nowait(None)
        for task in self._tasks:
            task.cancel()
        draft, self._draft = self._draft, None
        self._on_close(self)
        self._record.end(why, self._length)
        if self._downstream is not None:
            await self._downstream.close()
        if draft is not None:
            await draft.close(why)

    # --- keeping and taking up a prefix

    def _check_save(self, save: SnapshotSave) -> None:
        self._check_answered()
        if self._work.ahead:
            raise FailedPrecondition("steps still follow by themselves", reason="OUT_OF_STEP", field="step")
        check_save(save, self._length)

    def _check_answered(self) -> None:
        if any(flight.kind is StepKind.VERIFY for flight in self._unanswered):
            raise FailedPrecondition("the last verify has not been answered yet", reason="OUT_OF_STEP", field="step")

    # --- taking a step

    def _check(self, forward: Forward) -> None:
        if forward.step != self._next_step:
            raise FailedPrecondition(
                f"step is {forward.step}, expected {self._next_step}: a frame was lost or repeated",
                reason="OUT_OF_STEP",
                field="step",
            )
        self._check_answered()
        check_rows(forward, self._length, self._request, self._stage.config.vocab_size)
        if forward.kind is not StepKind.RESUME:
            check_tensors(forward, self._stage, self._incoming_captures)

    async def _run(self, forward: Forward, arrived_ns: int) -> None:
        if self._downstream is None and self._above is not None:
            # Told of in the order of steps, those among them that come past the event loop.
            await self._thread.submit(self._work.answer, forward, arrived_ns)
            return
        self._next_step += 1
        self._record.steps += 1
        if self._downstream is None:
            produced = await self._work.produced(forward)
            await self._answer(forward, arrived_ns, produced, self._count(forward, produced))
            return
        if forward.kind is StepKind.PREFILL:
            passing = await self._thread.submit(self._work.launch, forward)
            self._length += len(forward.token_ids)
            # The device goes on with the next chunk while this one is on its way.
            self._begin(self._pass_on, passing, arrived_ns)
            return
        passed, forward_ns = await self._thread.submit(self._work.pass_on, forward)
        if forward.kind is not StepKind.VERIFY:
            self._length += len(forward.token_ids)
        self._note(passed, arrived_ns, forward_ns)
        await self._downstream.forward(passed)

    async def _settled(self, but: int = 0) -> None:
        """Wait for what was begun here, but for so much. Raises what went wrong with it."""
        while len(self._tasks) > but:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def _pass_on(self, passing: Passing, arrived_ns: int) -> None:
        assert self._downstream is not None
        async with self._in_order:
            passed, forward_ns = passing.wait() if passing.there else await asyncio.to_thread(passing.wait)
            self._note(passed, arrived_ns, forward_ns)
            await self._downstream.forward(passed)

    def _note(self, passed: Forward, arrived_ns: int, forward_ns: int) -> None:
        """A step that is about to go to the next stage."""
        self._record.forward_ns += forward_ns
        self._unanswered.append(InFlight.of(passed, arrived_ns, forward_ns))

    # --- what the device thread did by itself: `Ledger`

    def passed_on(self, passed: Forward, arrived_ns: int, forward_ns: int) -> None:
        self._next_step += 1
        self._record.steps += 1
        if passed.kind is not StepKind.VERIFY:
            self._length += len(passed.token_ids)
        self._note(passed, arrived_ns, forward_ns)

    def unsent(self, passed: Forward) -> None:
        assert self._downstream is not None
        self._begin(self._downstream.forward, passed)

    def decided(self, forward: Forward, arrived_ns: int, produced: Produced) -> None:
        self._next_step += 1
        self._record.steps += 1
        self._begin(self._answer, forward, arrived_ns, produced, self._count(forward, produced))

    def broke(self, error: FlashsplitError) -> None:
        if self._closed or self._error is not None:
            return
        self._error = self._located(error)
        if self._downstream is None:
            self._events.put_nowait(None)
        else:
            # Ends the events below, behind which it is told.
            self._begin(self._downstream.close)

    def _located(self, error: FlashsplitError) -> FlashsplitError:
        location = self._location
        return error.located(stage=location.stage, host=location.host, device=location.device)

    def _begin(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        if self._closed:
            return
        task = asyncio.ensure_future(self._guarded(work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        try:
            await work(*args)
        except FlashsplitError as error:
            self.broke(error)

    # --- the last stage

    def _count(self, forward: Forward, produced: Produced) -> int:
        """The rows of a step that was decided count; how many."""
        counted = len(produced.token_ids if forward.kind is StepKind.VERIFY else forward.token_ids)
        self._record.forward_ns += produced.forward_ns
        self._length += counted
        return counted

    async def _answer(self, forward: Forward, arrived_ns: int, produced: Produced, counted: int) -> None:
        async with self._in_order:
            await self._answer_in_turn(forward, arrived_ns, produced, counted)

    async def _answer_in_turn(self, forward: Forward, arrived_ns: int, produced: Produced, counted: int) -> None:
        token_ids, base = produced.token_ids, forward.base_position
        length = base + counted
        elapsed_ns = max(time.monotonic_ns() - arrived_ns, produced.forward_ns)
        features = produced.features.rows(counted)
        passed_bytes = features.size_bytes if self._draft is not None and self._draft.remote else 0
        timing = StageTiming(produced.forward_ns, elapsed_ns, passed_bytes)
        followed = not forward.propose_tokens and self._work.followed(forward.step)
        self._events.put_nowait(
            Commit(forward.step, length, token_ids, (timing,), produced.logprobs, followed=followed)
        )
        request = None
        if token_ids and forward.propose_tokens:
            request = DraftRequest(forward.step, length, token_ids[-1], forward.propose_tokens)
        # The draft first: the next step waits for its guesses. Counting the rows comes behind, still before the next
        # forward, because jobs run in order.
        then = functools.partial(self._work.go_on, forward, token_ids)
        drafting = asyncio.ensure_future(self._draft_ahead(features, base, request, then))
        await asyncio.sleep(0)
        if forward.kind is StepKind.VERIFY and not produced.counted and not self._closed:
            await self._thread.submit_step(self._work.count, forward.step, length)
        await drafting

    async def _draft_ahead(
        self, features: Features, start: int, request: DraftRequest | None, then: Callable[[tuple[int, ...]], None]
    ) -> None:
        draft = self._draft
        if draft is None:
            return
        started_ns = time.monotonic_ns()
        try:
            draft_tokens = await draft.advance(features, start, request, then)
        except FlashsplitError as error:
            await self._lose_draft(draft, error)
            return
        if request is not None:
            elapsed_ns = time.monotonic_ns() - started_ns
            self._events.put_nowait(Proposal(request.step, draft_tokens, elapsed_ns, self._work.followed(request.step)))

    async def _save_draft(self, save: SnapshotSave) -> SnapshotPart:
        draft, refusal = self._draft, "the draft was lost"
        if draft is not None:
            try:
                return await draft.save_snapshot(save)
            except FlashsplitError as error:
                refusal = error.message
                await self._lose_draft(draft, error)
        return SnapshotPart(replace(self._location, stage=None), 0, 0, (), refusal)

    async def _lose_draft(self, draft: DraftLink, error: FlashsplitError) -> None:
        self._draft = None
        await draft.close()
        self._events.put_nowait(draft_lost(error, self._location))

    # --- every other stage

    async def _own_save(self, saved: SnapshotSaved) -> SnapshotPart:
        """This stage's part. Raises FailedPrecondition for an answer that no save waits for."""
        if not self._saving:
            raise FailedPrecondition(f"snapshot_saved {saved.snapshot_id} came unasked", reason="OUT_OF_STEP")
        return await self._saving.popleft()

    def _apply(self, commit: Commit) -> Commit:
        """Let the rows count that the last stage says count, and add this stage's times.

        Errors as in `answered`.
        """
        # What the device thread sent on by itself may not be heard of yet.
        self._work.tell()
        flight = answered(self._unanswered.popleft() if self._unanswered else None, commit)
        if flight.kind is StepKind.VERIFY and not self._closed:
            self._length = commit.length
            self._thread.queue_step(self._work.counted, commit.step, commit.length)
        elapsed_ns = time.monotonic_ns() - flight.arrived_ns
        own = StageTiming(flight.forward_ns, elapsed_ns, flight.passed_bytes)
        return replace(commit, timings=(own, *commit.timings))
