"""A session on the last stage of a chain: it decides what a step produces, answers, and feeds the session's draft."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    Location,
    OpenSession,
    Proposal,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageTiming,
    StepKind,
)
from services.streams.step_lane import StepLane
from shard_worker.cache.prefix_state import StateView
from shard_worker.drafting.engine import DraftRequest
from shard_worker.drafting.link import DraftLink
from shard_worker.model.features import Features
from shard_worker.sampling.verifier import ComputedStep, StepOutcome, Verifier
from shard_worker.session.following import following_step, is_followed, probable_following_step
from shard_worker.session.session import (
    DeviceEvent,
    DeviceSession,
    Lanes,
    SessionBroken,
    SessionHost,
    StepDecided,
    TargetSession,
    failure_below,
)
from shard_worker.stage.stage import StageState


def draft_lost(error: FlashsplitError, beside: Location) -> Failure:
    """Return what to tell up the chain about a session's draft that failed; the session goes on without it.

    beside: the last stage's place, for what the error does not say about the draft's own.
    """
    where = error.where
    place = Location(
        None,
        where.get("host", beside.host),
        where.get("device", beside.device),
        where.get("address", beside.address),
    )
    return replace(failure_below(error, place), reason=FailureReason.DRAFT_LOST)


class LastStageSession(TargetSession):
    """The half on the event loop. draft: the session's draft, None where it has none, has lost it or is closed."""

    _device: LastStageDeviceSession

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        state: StageState,
        above: StepLane | None,
        verifier: Verifier,
        draft: DraftLink | None,
    ) -> None:
        self.draft = draft
        self._verifier = verifier
        self._only_stage = host.stage.embedding is not None
        self._more = 0
        """How many steps follow the last one that was answered by themselves, on an only stage."""
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        device = LastStageDeviceSession(host, request, state, Lanes(above), self._handle, verifier)
        super().__init__(host, request, device)

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + (0 if self.draft is None else self.draft.held_bytes)

    # --- steps

    async def _run(self, forward: Forward, arrived_ns: int) -> None:
        # It is counted as the device thread tells of it, in one order with those that follow by themselves.
        await self.host.thread.awaited(self._device.answer(forward, arrived_ns))
        self.host.events.handle_waiting()

    def _handle(self, event: DeviceEvent) -> None:
        match event:
            case StepDecided(step, arrived_ns, outcome):
                self._count_step()
                rows = self._count_rows(step, outcome)
                drafted = self.draft is not None or step.propose_tokens
                if drafted or self._tasks or (step.kind is StepKind.VERIFY and not outcome.committed):
                    self._begin(self._answer, step, arrived_ns, outcome, rows)
                else:
                    # Nothing is to be waited for.
                    length = step.base_position + rows
                    self._events.put_nowait(self._answer_to(step, arrived_ns, outcome, length))
            case SessionBroken(error):
                self.fail(error)

    def _count_rows(self, forward: Forward, outcome: StepOutcome) -> int:
        """Count the rows of a step that was decided. Returns how many of them are committed."""
        rows = len(outcome.token_ids if forward.kind is StepKind.VERIFY else forward.token_ids)
        self._record.forward_ns += outcome.forward_ns
        self._length += rows
        return rows

    async def _answer(self, forward: Forward, arrived_ns: int, outcome: StepOutcome, rows: int) -> None:
        """Send a step's answer and have the draft propose the next block; rows: how many of the step are committed."""
        async with self._in_order:
            length = forward.base_position + rows
            features = outcome.features.rows(rows)
            passed_bytes = features.size_bytes if self.draft is not None and self.draft.remote else 0
            self._events.put_nowait(self._answer_to(forward, arrived_ns, outcome, length, passed_bytes))
            request = None
            if outcome.token_ids and forward.propose_tokens:
                request = DraftRequest(forward.step, length, outcome.token_ids[-1], forward.propose_tokens)
            # The draft first: the next step waits for its tokens. The commit comes behind, still before the next
            # forward, because jobs run in order.
            then = functools.partial(self._device.follow, forward, outcome.token_ids)
            drafting = asyncio.ensure_future(self._advance_draft(features, forward.base_position, request, then))
            await asyncio.sleep(0)
            if forward.kind is StepKind.VERIFY and not outcome.committed and not self._closed:
                await self.host.thread.submit_step(self._device.commit, forward.step, length)
            await drafting

    def _answer_to(
        self, forward: Forward, arrived_ns: int, outcome: StepOutcome, length: int, passed_bytes: int = 0
    ) -> Commit:
        """Return a step's answer. length: the session's behind it; passed_bytes: what goes to a draft's own worker."""
        elapsed_ns = max(time.monotonic_ns() - arrived_ns, outcome.forward_ns)
        timing = StageTiming(outcome.forward_ns, elapsed_ns, passed_bytes)
        followed = not forward.propose_tokens and self._device.is_followed(forward.step)
        if self._only_stage and is_followed(forward, length, outcome.token_ids, self._request):
            self._more = forward.more
        else:
            self._more = 0
        return Commit(
            forward.step,
            length,
            outcome.token_ids,
            (timing,),
            outcome.logprobs,
            more=self._more,
            followed=followed,
            prompt_logprobs=outcome.prompt_logprobs,
        )

    async def _advance_draft(
        self, features: Features, start: int, request: DraftRequest | None, then: Callable[[tuple[int, ...]], None]
    ) -> None:
        """Give the draft the features of committed rows from position `start` on, and have it propose where asked.

        What it was asked for is answered with no draft tokens where there is no draft any more. then: called on the
        device thread with the draft tokens, as `DraftLink.advance` says; on an only stage in any case.
        """
        draft, draft_tokens = self.draft, tuple[int, ...]()
        started_ns = time.monotonic_ns()
        if draft is not None:
            try:
                draft_tokens = await draft.advance(features, start, request, then)
            except FlashsplitError as error:
                await self._lose_draft(draft, error)
        if request is not None:
            # Who asked waits for it, also where the draft was lost before or meanwhile.
            elapsed_ns = time.monotonic_ns() - started_ns
            if self._only_stage and not self._device.is_followed(request.step) and not self._closed:
                await self.host.thread.submit_step(then, draft_tokens)
            followed = self._device.is_followed(request.step)
            self._events.put_nowait(Proposal(request.step, draft_tokens, elapsed_ns, followed))

    async def _lose_draft(self, draft: DraftLink, error: FlashsplitError) -> None:
        self.draft = None
        self._events.put_nowait(draft_lost(error, self._location))
        await draft.close()

    # --- snapshots

    def _check_save(self, save: SnapshotSave) -> None:
        if self._more:
            raise FailedPrecondition("steps still follow by themselves", reason="OUT_OF_STEP", field="step")
        super()._check_save(save)

    async def _save(self, save: SnapshotSave, own: asyncio.Future[SnapshotPart]) -> None:
        parts = [await own]
        if self._request.draft is not None:
            parts.append(await self._save_draft(save))
        self._events.put_nowait(SnapshotSaved(save.snapshot_id, save.length, tuple(parts)))

    async def _save_draft(self, save: SnapshotSave) -> SnapshotPart:
        draft, refusal = self.draft, "the draft was lost"
        if draft is not None:
            try:
                return await draft.save_snapshot(save)
            except FlashsplitError as error:
                refusal = error.message
                await self._lose_draft(draft, error)
        return SnapshotPart(replace(self._location, stage=None), 0, 0, (), refusal)

    async def _restore(self, restore: SnapshotRestore, own: SnapshotPart) -> None:
        self._verifier.observe(restore.token_ids)
        parts = [own]
        if (draft := self.draft) is not None:
            try:
                parts.append(await draft.restore_snapshot(restore))
            except (NotFound, FailedPrecondition, InvalidArgument):
                # The draft is there: the request may begin anew with it, or asks for what no draft could do.
                raise
            except FlashsplitError as error:
                await self._lose_draft(draft, error)
        self._events.put_nowait(SnapshotRestored(restore.snapshot_id, restore.length, tuple(parts)))

    # --- its end

    def _end_events(self) -> None:
        self._events.put_nowait(None)

    async def _close_others(self, why: str) -> None:
        self._end_events()
        draft, self.draft = self.draft, None
        if draft is not None:
            await draft.close(why)


class LastStageDeviceSession(DeviceSession):
    """The half on the device thread."""

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        state: StageState,
        lanes: Lanes,
        handle: Callable[[DeviceEvent], None],
        verifier: Verifier,
    ) -> None:
        super().__init__(host, request, state, lanes, handle)
        self._verifier = verifier
        self._alone = host.stage.embedding is not None
        """Whether this is the only stage."""
        self._followed = -1
        """The last step whose following one was sent up the chain."""

    # --- on the event loop

    def is_followed(self, step: int) -> bool:
        """Return whether the step behind this one was sent up the chain already."""
        return self._followed >= step

    def views(self) -> list[StateView]:
        return [*super().views(), self._verifier.last]

    # --- steps

    def decide(self, step: ComputedStep) -> StepOutcome:
        """Decide what a step produces."""
        forward = step.forward
        if self._request.draft is not None:
            step.features.to(self._stage.device)

        def meanwhile() -> None:
            if not forward.more or self._request.draft is not None:
                return
            if self._alone:
                # With stages above, this is done when the step's outcome is on its way to them.
                self._next.prelaunch(1, running=True)
            elif self._lanes.above is not None:
                following = probable_following_step(forward, self._request)
                if following is not None:
                    self._lanes.above.prepare(following)

        def then(token_ids: tuple[int, ...]) -> None:
            if not forward.propose_tokens:
                self.follow(forward, token_ids, ())

        return self._verifier.decide(step, self.state(), meanwhile, then)

    def answer(self, forward: Forward, arrived_ns: int) -> Future[None]:
        """Have a step computed and decided, from any thread, and the event loop told what it produces."""
        return self._batches.queue(self, forward, functools.partial(self._tell, arrived_ns))

    def _tell(self, arrived_ns: int, step: ComputedStep) -> None:
        self.tell(StepDecided(step.forward, arrived_ns, self.decide(step)))
        if step.alone:
            self._events.announce()

    def follow(self, forward: Forward, token_ids: tuple[int, ...], draft_tokens: tuple[int, ...]) -> None:
        """Begin the step that follows by itself, where that can be done from here: on an only stage, or through the
        lane to the stages above."""
        state = self._progress.state
        if not forward.more or state is None or not (self._alone or self._lanes.above is not None):
            return
        verify = forward.kind is StepKind.VERIFY
        length = forward.base_position + len(token_ids if verify else forward.token_ids)
        following = following_step(forward, length, token_ids, draft_tokens, self._request)
        if following is None:
            return
        sent = self._lanes.above is not None and self._lanes.above.send(following)
        # Before the following step's rows come, and not before those above can begin with them.
        self.commit(forward.step, length)
        if sent or self._alone:
            self._followed = forward.step
        if sent:
            if self._batches.lone:
                rows = self._next.rows_of(following)
                self._expect_activation(following, rows)
                self._next.expect(following, rows)
        elif self._alone:
            if self._batches.lone:
                self._stage.release(state, self._next.rows_of(following), None, certain=False)
            self._batches.add(self, following, functools.partial(self._tell, time.monotonic_ns()), self._break_by)

    def _take_step(self, forward: Forward, arrived_ns: int) -> None:
        self._check_next(forward)
        self._compute_from_lane(forward, functools.partial(self._tell, arrived_ns))
