"""One request's session on one stage: what every stage of a chain does.

`TargetSession` is the half on the event loop: it takes steps in order and refuses those that do not follow. The other
half is `device_session`. What the last stage does stands in `last_stage`, what all others do in `relay`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine

from services.errors import CANCELLED, CLOSED, LEFT, FailedPrecondition, FlashsplitError, InvalidArgument
from services.messages.steps import (
    Event,
    Forward,
    Location,
    OpenSession,
    SnapshotPart,
    SnapshotRestore,
    SnapshotSave,
    StageIdentity,
    StepKind,
    StepLimit,
)
from services.streams.step_lane import StepLane
from shard_worker.session.background import BackgroundTasks
from shard_worker.session.checks import check_held, check_restore, check_rows, check_save, check_tensors
from shard_worker.session.device_session import DeviceSession
from shard_worker.session.following import StepLimits, check_limit, check_more
from shard_worker.session.resting import RestingSession
from shard_worker.session.sent_rows import SentRows
from shard_worker.session.session_errors import reported
from shard_worker.session.session_host import SessionHost
from shard_worker.session_record import SessionRecord
from shard_worker.stage.stage import StageState


class TargetSession(ABC):
    """Implements `services.rpc.stage.StageSession` on this worker's devices; see there for its public methods."""

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        device: DeviceSession,
        below: tuple[StageIdentity, ...] = (),
        sent: SentRows | None = None,
    ) -> None:
        """device: the session's half on the device thread. below: the stages behind this one. sent: the session's
        tokens, and the rows that went to the next stage, also those of the session that rested; None where it does
        not rest."""
        self.host, self._request, self._device, self._sent = host, request, device, sent
        self.stages = (host.identity, *below)
        self.step_lane: StepLane | None = None
        self.max_feature_slices = len(device.captures)
        self.max_tensor_bytes = request.max_rows * host.stage.config.hidden_size * 4
        self._record = SessionRecord(request.request_id, request.trace, self._location, host.identity.layers)
        self._next_step = 0
        self._length = 0
        self._held = host.identity.held_length
        """How many tokens are computed already, by the session that rested."""
        self._below_lost = self._forgotten = False
        """Whether the session ends since a stage behind this one is lost, and whether it is known that none is."""
        self._tasks = BackgroundTasks(self.fail)
        # Steps go on, and answers go out, in their order.
        self._in_order = asyncio.Lock()
        self._closed = False
        self._error: FlashsplitError | None = None
        device.listen(self.max_tensor_bytes, self.max_feature_slices)
        host.sessions.add(self)

    async def forward(self, forward: Forward) -> None:
        arrived_ns = time.monotonic_ns()
        try:
            if forward.step != self._next_step:
                # The device thread may be ahead of what has been heard of it here.
                await self.host.thread.submit(int)
                self.host.events.handle_waiting()
            await self._settle(self._tasks_allowed(forward))
            self._check(forward)
            await self._run(forward, arrived_ns)
        except FlashsplitError as error:
            raise self._located(error) from None

    async def limit_steps(self, limit: StepLimit) -> None:
        if self.host.stage.embedding is None:
            raise self._located(InvalidArgument("a later stage takes no step_limit", field="frame"))
        if self._error is None:
            self.host.events.handle_waiting()
            check_limit(limit, self._next_step)
            self.limits.change(limit)

    @property
    def limits(self) -> StepLimits:
        """Of its steps that follow by themselves."""
        return self._device.limits

    async def save_snapshot(self, save: SnapshotSave) -> None:
        await self._settle()
        if save.length != self._length:
            # The device thread may be ahead of what it has told.
            await self.host.thread.submit_step(int)
        self._check_save(save)
        await self._save(save, self.host.keeper.save(save, self._device.views(), self._location))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        if self._next_step or self._length:
            raise FailedPrecondition("restore comes before the first step", reason="OUT_OF_STEP", field="frame")
        check_restore(restore, self._request, self.host.stage.config.vocab_size)
        if self._held and restore.length > self._held:
            raise FailedPrecondition(
                f"length is {restore.length}, and {self._held} tokens are held: say first_position when the session is "
                "opened",
                reason="OUT_OF_STEP",
                field="length",
            )
        if self._held:
            own = SnapshotPart(self._location, 0, 0)
        else:
            own = await self.host.keeper.restore(restore, self._device.views(), self._location)
            self._device.state().length = restore.length
        self._length = restore.length
        await self._restore(restore, own)

    @abstractmethod
    def events(self) -> AsyncIterator[Event]: ...

    @abstractmethod
    def answer_at_once(self, take: Callable[[Event], bool]) -> None: ...

    @property
    def held_bytes(self) -> int:
        """Memory that its caches take by now, those of a draft beside it included."""
        return self._device.held_bytes

    @property
    def state(self) -> StageState:
        """The session's memory on the stage. Raises FailedPrecondition once the session is closed."""
        return self._device.state()

    async def close(self, why: str = CLOSED) -> None:
        if self._closed:
            return
        self.host.events.handle_waiting()
        self._closed = True
        rests = self._below_lost or (self._above_lost(why) and not self._forgotten)
        self._leave_memory(rests=rests)
        self._device.close()
        self._tasks.cancel()
        self.host.sessions.discard(self)
        self._record.end(why, self._length)
        await self._close_others(LEFT if rests else CLOSED if self._forgotten else why)

    @property
    def session_id(self) -> str | None:
        """Names it to whoever opens it anew; None where it does not rest."""
        return None if self._request.rest is None else self._request.rest.session_id

    def forget(self) -> None:
        """Leave nothing that rests: no stage was lost."""
        self._forgotten = True

    def _above_lost(self, why: str) -> bool:
        """Return whether a stage before this one may be lost. why: as of `close`; LEFT also says that the session was
        opened anew before its end was noticed."""
        return why == LEFT or (why == CANCELLED and bool(self._request.stage))

    def _leave_memory(self, *, rests: bool) -> None:
        """Leave the session's memory to who takes it up, where it rests."""
        sent, self._sent = self._sent, None
        if sent is not None and rests:
            # The device thread may be at a step, whose rows it adds to them: the memory holds these too.
            self.host.resting.add(self._resting(sent))
        elif sent is not None:
            sent.forget()

    def _resting(self, sent: SentRows) -> RestingSession:
        """Return what is left of the session. sent: as of the constructor."""
        return RestingSession(self.host.stage, self._request, self.state, sent)

    # --- what differs between the last stage and the others

    @abstractmethod
    async def _run(self, forward: Forward, arrived_ns: int) -> None:
        """Take a step that was checked."""

    @abstractmethod
    async def _save(self, save: SnapshotSave, own: asyncio.Future[SnapshotPart]) -> None:
        """Keep the state below or beside this stage too. own: this stage's part of the snapshot."""

    @abstractmethod
    async def _restore(self, restore: SnapshotRestore, own: SnapshotPart) -> None:
        """Restore the state below or beside this stage too. own: this stage's part of the snapshot."""

    @abstractmethod
    def _end_events(self) -> None:
        """Let `events` end after an error, which it raises then."""

    @abstractmethod
    async def _close_others(self, why: str) -> None:
        """Close what this session has opened below or beside the stage."""

    def _tasks_allowed(self, _: Forward) -> int:
        """How many background tasks may still run when this step is taken."""
        return 0

    @property
    def _awaits_verify(self) -> bool:
        """Whether a verify has not been answered yet, so that the next position is unknown."""
        return False

    # --- checks

    def _check(self, forward: Forward) -> None:
        if forward.step != self._next_step:
            raise FailedPrecondition(
                f"step is {forward.step}, expected {self._next_step}: a frame was lost or repeated",
                reason="OUT_OF_STEP",
                field="step",
            )
        check_more(forward)
        self._check_answered()
        stage = self.host.stage
        if not self._next_step and not self._length:
            # What is held need not be gone through again.
            self._length = min(forward.base_position, self._held)
        check_rows(forward, self._length, self._request, stage.config.vocab_size)
        check_held(forward, self._held)
        if forward.kind is not StepKind.RESUME and not self._holds(forward):
            check_tensors(forward, stage, self._device.captures)

    def _holds(self, forward: Forward) -> bool:
        """Return whether a step's rows are computed already."""
        return bool(forward.token_ids) and forward.base_position + len(forward.token_ids) <= self._held

    def _check_answered(self) -> None:
        if self._awaits_verify:
            raise FailedPrecondition("the last verify has not been answered yet", reason="OUT_OF_STEP", field="step")

    def _check_save(self, save: SnapshotSave) -> None:
        self._check_answered()
        if save.length != self._length:
            # The device thread may have answered steps that are not heard of here yet.
            self.host.events.handle_waiting()
        check_save(save, self._length, self._held)

    # --- background work and errors

    async def _settle(self, remaining: int = 0) -> None:
        """Wait until no more than `remaining` background tasks run. Raises the error that ended the session."""
        await self._tasks.settle(remaining)
        if self._error is not None:
            raise self._error

    def _begin(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        if not self._closed:
            self._tasks.begin(work, *args)

    def fail(self, error: Exception) -> None:
        """End the session with this error, unless another one or the client has ended it before."""
        if self._closed or self._error is not None:
            return
        self._error = self._located(reported(error, self._request.request_id))
        self._end_events()

    @property
    def _location(self) -> Location:
        return self.host.identity.location

    def _located(self, error: FlashsplitError) -> FlashsplitError:
        location = self._location
        return error.located(stage=location.stage, host=location.host, device=location.device)

    def _count_step(self) -> None:
        """Count a step that is taken, whatever will become of it."""
        self._next_step += 1
        self._record.steps += 1
