"""A session on the last stage of a chain: it decides what a step produces, answers, and feeds the session's draft."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

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
from services.streams.direct_queue import DirectQueue
from shard_worker.batches.stepping import BatchResults, SteppingSession, WaitingStep
from shard_worker.cache.prefix_state import StateView
from shard_worker.drafting.draft_batches import DraftWork
from shard_worker.drafting.engine import DraftRequest
from shard_worker.drafting.link import DraftLink, LocalDraftLink
from shard_worker.model.features import Features
from shard_worker.sampling.drawing import Draw
from shard_worker.sampling.verifier import ComputedStep, StepOutcome, Verifier
from shard_worker.session.device_events import (
    AnswerNotSent,
    DeviceEvent,
    DraftFailed,
    SessionBroken,
    StepDecided,
    StepDrafted,
)
from shard_worker.session.device_session import DeviceSession, Lanes
from shard_worker.session.following import (
    following_step,
    is_followed,
    probable_following_block,
    probable_following_step,
)
from shard_worker.session.resting import RestingSession
from shard_worker.session.sent_rows import SentRows
from shard_worker.session.session import TargetSession
from shard_worker.session.session_errors import failure_below
from shard_worker.session.session_host import SessionHost
from shard_worker.stage.stage import StageState
from shard_worker.stage.step_graph import StepPart

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import Following, IssuedBlock
    from shard_worker.model.kernels.step_parameters import StepParameters


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


def draft_request(step: Forward, length: int, outcome: StepOutcome) -> DraftRequest | None:
    """Return what a step's draft is asked for, None for nothing. length: the committed tokens behind the step."""
    if not outcome.token_ids or not step.propose_tokens:
        return None
    return DraftRequest(step.step, length, outcome.token_ids[-1], step.propose_tokens)


def without_unused(step: Forward, outcome: StepOutcome) -> Forward:
    """Return a step that asks for no draft tokens where too few of its own were accepted for others to be verified;
    not where the draft was set to work before that was known."""
    # Most steps spare nothing, and a prompt's chunks produce no token.
    if not step.least_accepted or outcome.issued is not None:
        return step
    return replace(step, propose_tokens=0) if len(outcome.token_ids) <= step.least_accepted else step


class LastStageSession(TargetSession):
    """The half on the event loop. draft: the session's draft, None where it has none, has lost it or is closed."""

    _device: LastStageDeviceSession

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        state: StageState,
        lanes: Lanes,
        verifier: Verifier,
        draft: DraftLink | None,
        sent: SentRows | None = None,
    ) -> None:
        """sent: as of `TargetSession`."""
        self.draft = draft
        self._verifier = verifier
        self._only_stage = host.stage.embedding is not None
        self._more = 0
        """How many steps follow the last one that was answered by themselves, on an only stage."""
        self._answers: DirectQueue[Event | None] = DirectQueue()
        self._undrafted = 0
        """Steps whose features the draft beside the stage has not taken yet."""
        self._all_drafted = asyncio.Event()
        local = draft if isinstance(draft, LocalDraftLink) else None
        self._drafts_elsewhere = draft is not None and local is None
        """Whether the session was opened with a draft in another worker."""
        device = LastStageDeviceSession(
            host,
            request,
            state,
            lanes,
            self._handle,
            verifier,
            local,
            sent,
            drafts_elsewhere=self._drafts_elsewhere,
        )
        super().__init__(host, request, device, sent=sent)
        if self._held:
            assert request.rest is not None
            verifier.observe(request.rest.token_ids[: self._held])

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._answers.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error

    def answer_at_once(self, take: Callable[[Event], bool]) -> None:
        self._answers.take = lambda event: event is not None and take(event)

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + (0 if self.draft is None else self.draft.held_bytes)

    # --- steps

    async def _run(self, forward: Forward, arrived_ns: int) -> None:
        self.limits.change(None)
        if self._holds(forward):
            assert self._request.rest is not None
            end = forward.base_position + len(forward.token_ids)
            if forward.kind is not StepKind.DECODE or end < len(self._request.rest.token_ids):
                self._answer_held(forward)
                return
            # The row of the last token is computed, and what was chosen behind it was not told: it is chosen again.
            self._length = end
            forward = replace(
                forward, kind=StepKind.RESUME, base_position=end, token_ids=(), activation=None, features=()
            )
        # It is counted as the device thread tells of it, in one order with those that follow by themselves.
        await self.host.thread.awaited(self._device.answer(forward, arrived_ns))
        self.host.events.handle_waiting()

    def _answer_held(self, forward: Forward) -> None:
        """Answer a step whose rows are computed already, all of which count: what it produced is known."""
        assert self._request.rest is not None
        known, first = self._request.rest.token_ids, forward.base_position
        self._count_step()
        self._device.skip(forward.step)
        self._length = end = first + len(forward.token_ids)
        produced: tuple[int, ...] = ()
        if forward.kind is StepKind.VERIFY:
            produced = known[first + 1 : end + 1]
        elif forward.kind is StepKind.DECODE:
            produced = known[end : end + 1]
        self._answers.put(Commit(forward.step, end, produced, (StageTiming(0, 0),)))

    def _resting(self, sent: SentRows) -> RestingSession:
        draft = self.draft if isinstance(self.draft, LocalDraftLink) else None
        return replace(super()._resting(sent), last=self._verifier.last, draft=draft)

    def _handle(self, event: DeviceEvent) -> None:
        match event:
            case StepDecided(step, arrived_ns, queued_ns, outcome, drafting, answered):
                self._count_step()
                self._record.queued_ns += queued_ns
                rows = self._count_rows(step, outcome)
                self._undrafted += drafting
                if answered:
                    self._more = step.more if self._only_stage else 0
                    return
                if self._drafts_elsewhere:
                    self._begin(self._answer, step, arrived_ns, outcome, rows)
                else:
                    length = step.base_position + rows
                    self._answers.put(self._answer_to(step, arrived_ns, outcome, length))
            case StepDrafted(request, draft_tokens, elapsed_ns):
                if request is not None:
                    followed = self._device.is_followed(request.step)
                    self._answers.put(Proposal(request.step, draft_tokens, elapsed_ns, followed))
                self._undrafted -= 1
                self._all_drafted.set()
            case AnswerNotSent(answer):
                self._answers.put(answer.commit)
                if answer.proposal is not None:
                    self._answers.put(answer.proposal)
            case DraftFailed(error):
                self._lose_draft(error)
            case SessionBroken(error):
                self.fail(error)

    def _count_rows(self, forward: Forward, outcome: StepOutcome) -> int:
        """Count the rows of a step that was decided. Returns how many of them are committed."""
        rows = len(outcome.token_ids if forward.kind is StepKind.VERIFY else forward.token_ids)
        self._record.forward_ns += outcome.forward_ns
        self._length += rows
        return rows

    async def _answer(self, forward: Forward, arrived_ns: int, outcome: StepOutcome, rows: int) -> None:
        """Send a step's answer and have a draft elsewhere propose the next block; rows: how many of the step are
        committed."""
        async with self._in_order:
            length = forward.base_position + rows
            features = outcome.features.rows(rows)
            passed_bytes = 0 if self.draft is None else features.size_bytes
            self._answers.put(self._answer_to(forward, arrived_ns, outcome, length, passed_bytes))
            request = draft_request(forward, length, outcome)
            # The draft first: the next step waits for its tokens. The commit comes behind, still before the next
            # forward, because jobs run in order.
            drafting = asyncio.ensure_future(self._advance_draft(forward, outcome.token_ids, features, request))
            await asyncio.sleep(0)
            if forward.kind is StepKind.VERIFY and not self._closed:
                await self.host.thread.submit_step(self._device.commit, forward.step, length)
            await drafting

    def _answer_to(
        self, forward: Forward, arrived_ns: int, outcome: StepOutcome, length: int, passed_bytes: int = 0
    ) -> Commit:
        """Return a step's answer. length: the session's behind it; passed_bytes: what goes to a draft's own worker."""
        followed = not forward.propose_tokens and self._device.is_followed(forward.step)
        if self._only_stage and is_followed(forward.more, length, outcome.token_ids, self._request):
            self._more = forward.more
        else:
            self._more = 0
        return _answer_to(outcome, forward, length, arrived_ns, passed_bytes, more=self._more, followed=followed)

    async def _advance_draft(
        self, forward: Forward, token_ids: tuple[int, ...], features: Features, request: DraftRequest | None
    ) -> None:
        """Give a draft elsewhere the features of a step's committed rows, and have it propose where asked.

        What it was asked for is answered with no draft tokens where there is no draft any more. token_ids: those that
        the step produced.
        """
        draft, draft_tokens = self.draft, tuple[int, ...]()
        started_ns = time.monotonic_ns()
        if draft is not None:
            assert not isinstance(draft, LocalDraftLink)
            try:
                draft_tokens = await draft.advance(features, forward.base_position, request)
            except FlashsplitError as error:
                self._lose_draft(error)
        if request is not None:
            # Who asked waits for it, also where the draft was lost before or meanwhile.
            elapsed_ns = time.monotonic_ns() - started_ns
            if self._only_stage and not self._closed:
                await self.host.thread.submit_step(self._device.follow, forward, token_ids, draft_tokens)
            self._answers.put(Proposal(request.step, draft_tokens, elapsed_ns, self._device.is_followed(request.step)))

    def _lose_draft(self, error: FlashsplitError) -> None:
        """Go on without the draft, unless it was lost before."""
        draft, self.draft = self.draft, None
        if draft is not None:
            self._device.draft = None
            self._answers.put(draft_lost(error, self._location))
            self._begin(draft.close)

    # --- snapshots

    async def save_snapshot(self, save: SnapshotSave) -> None:
        with self.host.events.awaiting():
            while self._undrafted and not self._closed and self._error is None:
                self._all_drafted.clear()
                await self._all_drafted.wait()
        await super().save_snapshot(save)

    def _check_save(self, save: SnapshotSave) -> None:
        if self._more:
            raise FailedPrecondition("steps still follow by themselves", reason="OUT_OF_STEP", field="step")
        super()._check_save(save)

    async def _save(self, save: SnapshotSave, own: asyncio.Future[SnapshotPart]) -> None:
        parts = [await own]
        if self._request.draft is not None:
            parts.append(await self._save_draft(save))
        self._answers.put(SnapshotSaved(save.snapshot_id, save.length, tuple(parts)))

    async def _save_draft(self, save: SnapshotSave) -> SnapshotPart:
        draft, refusal = self.draft, "the draft was lost"
        if draft is not None:
            try:
                if isinstance(draft, LocalDraftLink):
                    await self.host.thread.submit_step(draft.catch_up)
                return await draft.save_snapshot(save)
            except FlashsplitError as error:
                refusal = error.message
                self._lose_draft(error)
        return SnapshotPart(replace(self._location, stage=None), 0, 0, (), refusal)

    async def _restore(self, restore: SnapshotRestore, own: SnapshotPart) -> None:
        if not self._held:
            self._verifier.observe(restore.token_ids)
            if self._sent is not None:
                self._sent.begin(restore.token_ids)
        parts, draft = [own], self.draft
        if self._held and isinstance(draft, LocalDraftLink):
            # Its context rested with the session.
            parts.append(SnapshotPart(replace(self._location, stage=None), 0, 0))
        elif draft is not None:
            try:
                parts.append(await draft.restore_snapshot(restore))
            except (NotFound, FailedPrecondition, InvalidArgument):
                # The draft is there: the request may begin anew with it, or asks for what no draft could do.
                raise
            except FlashsplitError as error:
                self._lose_draft(error)
        self._answers.put(SnapshotRestored(restore.snapshot_id, restore.length, tuple(parts)))

    # --- its end

    def _end_events(self) -> None:
        self._answers.put(None)
        self._all_drafted.set()

    async def _close_others(self, why: str) -> None:
        self._end_events()
        draft = self.draft
        self.draft = self._device.draft = None
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
        draft: LocalDraftLink | None,
        sent: SentRows | None,
        *,
        drafts_elsewhere: bool,
    ) -> None:
        """draft: the session's draft, where it is beside the stage. drafts_elsewhere: the event loop has the draft."""
        super().__init__(host, request, state, lanes, handle, sent)
        self.draft = draft
        self._drafting, self._drafts_elsewhere = host.drafting, drafts_elsewhere
        self._verifier = verifier
        self._alone = host.stage.embedding is not None
        """Whether this is the only stage."""
        self._followed = -1
        """The last step whose following one was sent up the chain."""
        self._launched_ahead: Forward | None = None
        """What may have been launched last before the results were read of the step that it follows."""

    # --- on the event loop

    def is_followed(self, step: int) -> bool:
        """Return whether the step behind this one was sent up the chain already."""
        return self._followed >= step

    def views(self) -> list[StateView]:
        return [*super().views(), self._verifier.last]

    # --- steps

    def _features(self) -> Features | None:
        features = super()._features()
        if features is not None and self.draft is not None:
            features.waits = self.draft.takes_rows_later
        return features

    def decide(self, step: ComputedStep) -> StepOutcome:
        """Decide what a step produces."""
        forward = step.forward
        if self._request.draft is not None:
            step.features.to(self._stage.device)

        def meanwhile() -> None:
            if not forward.more or self._request.draft is not None or self._together:
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
            rows = len(token_ids if forward.kind is StepKind.VERIFY else forward.token_ids)
            length = forward.base_position + rows
            if forward.propose_tokens and is_followed(forward.more, length, token_ids, self._request):
                # What was launched behind it is asked for when the draft tokens are there.
                return
            self._batches.end_following(self)

        return self._verifier.decide(step, self.state(), meanwhile, then)

    def answer(self, forward: Forward, arrived_ns: int) -> Future[None]:
        """Have a step computed and decided, from any thread, and the event loop told what it produces."""
        return self._batches.queue(self, forward, functools.partial(self._tell, arrived_ns))

    def _tell(self, arrived_ns: int, step: ComputedStep, *, together: bool = False) -> None:
        """Decide a step, and tell of it. together: it came with those of other sessions, and is answered with them."""
        self._together = together
        forward, kept = step.forward, self._sent()
        if kept is not None and forward.kind is StepKind.PREFILL:
            # A session that was closed as they were computed may be taken up behind them: nothing is chosen there.
            kept.add_tokens(forward.base_position, forward.token_ids)
        outcome = self.decide(step)
        forward = without_unused(forward, outcome)
        rows = len(outcome.token_ids if forward.kind is StepKind.VERIFY else forward.token_ids)
        if kept is not None and forward.kind is not StepKind.PREFILL:
            kept.add_tokens(forward.base_position, forward.token_ids[:rows])
        request = None if self._drafts_elsewhere else draft_request(forward, forward.base_position + rows, outcome)
        draft, features = self.draft, outcome.features.rows(rows)
        if request is None and outcome.issued is not None:
            # The draft has the features already.
            draft = None
        if draft is not None and request is None and draft.keep(features, forward.base_position):
            draft = None
        # The event loop has a draft elsewhere, and so the answer.
        answered = not self._drafts_elsewhere and (
            together or self._tells_of(step, forward.base_position + rows, outcome, drafts=request is not None)
        )
        commit = self._answer(outcome, forward, forward.base_position + rows, arrived_ns) if answered else None
        if commit is not None and request is None:
            self._answer_together(commit, None)
        queued_ns = max(0, time.monotonic_ns() - arrived_ns - outcome.forward_ns)
        drafting = draft is not None or request is not None
        decided = StepDecided(forward, arrived_ns, queued_ns, outcome, drafting, answered)
        if commit is not None and draft is None and request is None:
            self.tell_soon(decided, pressing=False)
        else:
            self.tell(decided, pressing=not answered)
        if step.alone:
            self.announce()
            self._events.announce()
        if draft is not None:
            then = functools.partial(self._drafted, forward, outcome.token_ids, request, commit)
            failed = functools.partial(self._draft_failed, then)
            base = forward.base_position
            self._drafting.add(DraftWork(draft, features, base, request, then, failed, outcome.issued))
        elif request is not None:
            self._drafted(forward, outcome.token_ids, request, commit, (), 0)
        elif not self._drafts_elsewhere:
            self.commit(forward.step, forward.base_position + rows)

    def _tells_of(self, step: ComputedStep, length: int, outcome: StepOutcome, *, drafts: bool) -> bool:
        """Return whether the coordinator hears of a step of an only stage from here. length: the session's behind it;
        drafts: draft tokens for the next step are asked for."""
        if not self._alone or step.alone or not self._tells_caller:
            return False
        followed = is_followed(step.forward.more, length, outcome.token_ids, self._request)
        return followed and (drafts or self.is_followed(step.forward.step))

    def _answer(self, outcome: StepOutcome, forward: Forward, length: int, arrived_ns: int) -> Commit:
        """Return what the device thread answers a step with. length: the session's behind it."""
        if not self._alone:
            return _answer_to(outcome, forward, length, arrived_ns)
        followed = not forward.propose_tokens and self.is_followed(forward.step)
        return _answer_to(outcome, forward, length, arrived_ns, more=forward.more, followed=followed)

    def _drafted(
        self,
        forward: Forward,
        token_ids: tuple[int, ...],
        request: DraftRequest | None,
        commit: Commit | None,
        draft_tokens: tuple[int, ...],
        elapsed_ns: int,
    ) -> None:
        """Go on behind a step whose features the draft has taken, if there is one; arguments as of `follow`. commit:
        its answer, where the device thread answers it."""
        if request is not None:
            self.follow(forward, token_ids, draft_tokens)
        if request is not None and commit is not None:
            self._answer_together(
                commit, Proposal(request.step, draft_tokens, elapsed_ns, self.is_followed(request.step))
            )
            request = None
        if forward.kind is StepKind.VERIFY:
            self.commit(forward.step, forward.base_position + len(token_ids))
        self.tell(StepDrafted(request, draft_tokens, elapsed_ns), pressing=request is not None)

    def _draft_failed(self, then: Callable[[tuple[int, ...], int], None], error: Exception) -> None:
        """Go on without the draft; an error that is not its own ends the session."""
        self.draft = None
        if isinstance(error, FlashsplitError):
            self.tell(DraftFailed(error))
            then((), 0)
        else:
            self.break_by(error)

    def follow(self, forward: Forward, token_ids: tuple[int, ...], draft_tokens: tuple[int, ...]) -> None:
        """Begin the step that follows by itself, where that can be done from here: on an only stage, or through the
        lane to the stages above."""
        state = self._progress.state
        if not forward.more or state is None or not (self._alone or self._lanes.above is not None):
            return
        if self._together:
            # The first stage begins it, when it has the answer.
            return
        verify = forward.kind is StepKind.VERIFY
        length = forward.base_position + len(token_ids if verify else forward.token_ids)
        following = following_step(forward, length, token_ids, draft_tokens, self._request)
        if following is None:
            return
        if self._alone:
            following = self._limited(following)
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
            then = functools.partial(self._tell, time.monotonic_ns())
            self._batches.add_following(WaitingStep(self, following, then, self.break_by))

    def following(self, forward: Forward) -> Forward | None:
        if not self._alone:
            return super().following(forward)
        if forward.kind not in (StepKind.DECODE, StepKind.VERIFY):
            return None
        if forward.propose_tokens:
            # How many rows a block has that may be cut short is not known before its tokens are.
            cut = self.draft is not None and self.draft.cuts_blocks
            following = None if cut else probable_following_block(forward, self._request)
        # Behind a verify a single row begins nobody knows where; one of recurrent layers could not be taken back.
        elif forward.kind is StepKind.VERIFY or (self._request.draft is not None and self._stage.is_recurrent):
            following = None
        else:
            following = probable_following_step(forward, self._request)
        self._launched_ahead = None if following is None else self.limits.applied(following)
        return self._launched_ahead

    def _limited(self, following: Forward) -> Forward:
        """Return a step that follows by itself as it is to be by now, or as it was launched."""
        launched = self._launched_ahead
        if launched is None or launched.step != following.step:
            return self.limits.applied(following)
        if (following.propose_tokens, following.more) == (launched.propose_tokens, launched.more):
            return following
        return replace(following, propose_tokens=launched.propose_tokens, more=launched.more)

    def complete_step(self, parameters: StepParameters) -> None:
        assert self.draft is not None
        assert self.draft.ahead_together is not None
        self.draft.ahead_together.complete(parameters)

    def issue_together(
        self, steps: Sequence[tuple[SteppingSession, Forward]], outputs: Sequence[StepPart]
    ) -> Sequence[IssuedBlock | None]:
        results, blocks = outputs[0].whole, None if self.draft is None else self.draft.ahead_together
        only_prefill = all(forward.kind is StepKind.PREFILL for _, forward in steps)
        if blocks is None or results.argmax is None or results.total is None or only_prefill:
            return super().issue_together(steps, outputs)
        following = []
        for session, forward in steps:
            assert isinstance(session, LastStageDeviceSession)
            following.append(session._following_rows(forward))
        if not blocks.takes(following):
            return super().issue_together(steps, outputs)
        step, commit = self._stage.batch_runners[-1].parameters, self._stage.commit_last
        try:
            return blocks.issue(step, following, results.argmax, results.total, commit).parts()
        except FlashsplitError:
            # There is no memory for a draft's context: the host decides, and the draft is asked by itself, and lost.
            return super().issue_together(steps, outputs)

    def _following_rows(self, forward: Forward) -> Following:
        """Return what can follow this session's rows on the device."""
        # Triton is there where something can.
        from shard_worker.drafting.ahead import Following

        rows, draft = len(forward.token_ids), self.draft
        if draft is None or not self._verifier.is_decided_on_device(forward):
            return Following(rows, decided=False)
        whole = forward.kind is not StepKind.VERIFY
        # The context is as long as the session, but for rows of which the host does not know yet whether they count.
        before = forward.base_position - draft.state.length
        stops = self._request.stop_token_ids
        return Following(rows, draft.state, forward.propose_tokens, stops, whole=whole, before=before)

    def is_copied_at_once(self, forward: Forward) -> bool:
        return self._request.draft is None and self._verifier.needs_no_logits(forward)

    def draws(self, forward: Forward) -> list[Draw] | None:
        return self._verifier.draws(forward)

    def draws_with_step(self, forward: Forward) -> list[Draw] | None:
        return self._verifier.draws_with_step(forward)

    def send_ahead(self, results: BatchResults) -> None:
        if self._alone:
            return
        for row, output, tokens in zip(results.rows, results.outputs, results.drawn, strict=True):
            session, forward = row.session, row.forward
            assert isinstance(session, LastStageDeviceSession)
            if row.step is not None and forward.kind is StepKind.DECODE and session._is_followed_from_above(forward):
                token = session._verifier.token_ahead(output, tokens)
                if token is not None:
                    self._edges.add_token(session, forward.step, token)
        self._edges.send_tokens()

    def _is_followed_from_above(self, forward: Forward) -> bool:
        """Return whether the first stage begins a step behind a single row as soon as it knows the token: it came
        together with others, and no draft tokens are asked for. An event loop that has the draft answers by itself."""
        together = forward.step == self._came_together and not self._drafts_elsewhere
        return together and bool(forward.more) and not forward.propose_tokens

    def _take_step(self, forward: Forward, arrived_ns: int) -> None:
        self._check_next(forward)
        self._compute_from_lane(forward, functools.partial(self._tell, arrived_ns))

    def _take_together(self, arrived_ns: int, step: ComputedStep) -> None:
        self._tell(arrived_ns, step, together=True)


def _answer_to(
    outcome: StepOutcome,
    forward: Forward,
    length: int,
    arrived_ns: int,
    passed_bytes: int = 0,
    *,
    more: int = 0,
    followed: bool = False,
) -> Commit:
    """Return a step's answer. length: the session's behind it; passed_bytes: what goes to a draft's own worker; more,
    followed: as of `Commit`."""
    elapsed_ns = max(time.monotonic_ns() - arrived_ns, outcome.forward_ns)
    return Commit(
        forward.step,
        length,
        outcome.token_ids,
        (StageTiming(outcome.forward_ns, elapsed_ns, passed_bytes),),
        outcome.logprobs,
        more,
        followed,
        outcome.prompt_logprobs,
        outcome.batch_sessions,
        outcome.batch_rows,
        forward.propose_tokens,
        outcome.batch_proposing,
    )
