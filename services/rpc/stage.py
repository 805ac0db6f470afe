"""StageService: the port, the servicer and the remote client for sessions on a chain of stages.

The coordinator and every stage but the last are its clients. What the frames mean stands in `stage.proto`; this module
hands them over to the port and back, and ends the stream with the session and the session with the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc
import structlog

from flashsplit.shard.v1 import (
    shared_memory_pb2,
    stage_pb2,
    stage_service_pb2 as pb,
    stage_service_pb2_grpc as pb_grpc,
)
from services.errors import CANCELLED, CLOSED, LEFT, FlashsplitError, InvalidArgument, Unavailable, answering, ending
from services.event_loop import first_done
from services.messages.batch_frames import (
    BATCH_FRAMES,
    BatchAnswer,
    StepBatch,
    answers_from_message,
    answers_to_message,
    batch_to_messages,
)
from services.messages.frames import FrameReader, TensorLimits
from services.messages.session_frames import (
    EVENT_FRAMES,
    STREAM_FRAMES,
    event_to_message,
    open_from_message,
    open_to_message,
    opened_from_message,
    opened_to_message,
    request_to_messages,
)
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    OpenSession,
    Proposal,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageIdentity,
    StepLimit,
)
from services.same_host.frame_socket import BROKEN_S
from services.same_host.link import NO_LINKS, LinkSender, SharedLink, SharedLinks
from services.streams.batch_lane import BatchLane
from services.streams.batch_stream import BatchStream, TogetherOnly
from services.streams.client_stream import ClientStream, Guard, unguarded
from services.streams.frame_reading import read_frame
from services.streams.server_stream import ServerStream
from services.streams.step_lane import StepLane
from services.streams.step_order import StepOrder
from services.telemetry.trace_context import log_for

SERVICE = pb.DESCRIPTOR.services_by_name["StageService"].full_name

log = structlog.get_logger()

FORGET_S = 5.0
"""How long a stage may take to hear that a session's state need not rest."""

_forgetting = set[asyncio.Task[None]]()
"""Calls that tell stages so, which nobody awaits."""

MAX_STEPS_AHEAD = 64
"""The steps that a stage takes before it waits for the caller to read answers, so that unread ones cannot pile up."""


class StageSession(Protocol):
    """One request on one stage and all below it."""

    stages: tuple[StageIdentity, ...]
    """This stage and those below it."""

    max_tensor_bytes: int
    """The largest tensor in bytes that a step of this session may carry."""

    max_feature_slices: int
    """The most feature slices that a step of this session may carry."""

    step_lane: StepLane | None
    """The lane through which steps that follow by themselves go to this stage, and the next ones come back."""

    async def forward(self, forward: Forward) -> None:
        """Take one step; return when the next one may be sent, which is before the result is there.

        Raises InvalidArgument for a malformed step and FailedPrecondition for one out of sequence.
        """

    async def limit_steps(self, limit: StepLimit) -> None:
        """Change what follows by itself, from the next step on that begins so.

        Raises InvalidArgument for a step too far ahead, and on any stage but the first.
        """

    async def save_snapshot(self, save: SnapshotSave) -> None:
        """Keep the session's state here and below; a SnapshotSaved event says what came of it.

        Raises FailedPrecondition when the session has another length than the request says.
        """

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        """Begin from a kept state, before the first step; a SnapshotRestored event confirms it.

        Raises NotFound when it isn't kept, FailedPrecondition when it cannot begin there.
        """

    def events(self) -> AsyncIterator[Event]:
        """Yield what comes back: one Commit for each step, in order; a Proposal behind it where one was asked for;
        a SnapshotSaved or SnapshotRestored for each request; a Failure when something below broke."""

    def answer_at_once(self, take: Callable[[Event], bool]) -> None:
        """Have events handed over as they come, behind those that `events` has yielded, rather than wake its reader:
        `take` returns whether it is done with one, which `events` yields otherwise. To be called before `events`."""

    async def close(self, why: str = CLOSED) -> None:
        """Free the session here and below. Safe to call twice. why: what ended it, in a word for the log; LEFT and
        CANCELLED leave its state to rest, where it may."""


class StagePort(Protocol):
    """A stage, in this process or in another one."""

    async def open(self, request: OpenSession, above: StepLane | None = None) -> StageSession:
        """Begin a session.

        above: the lane from the stage before, through which steps that follow by themselves come. Raises
        FailedPrecondition when the stage holds something else than the caller expects.
        """

    async def forget(self, session_id: str) -> None:
        """Let a session's state not rest, here and below: no stage was lost."""


class StageServicer(pb_grpc.StageServiceServicer):
    """Serves a `StagePort` to callers in other processes."""

    def __init__(self, port: StagePort, links: SharedLinks = NO_LINKS) -> None:
        """links: the memory that callers share with this process."""
        self._port, self._links = port, links
        self._batches: dict[int, BatchStream[Any]] = {}
        """Calls of RunBatches, by their number."""
        self._ending = asyncio.Event()

    def end_batches(self) -> None:
        """End all calls of RunBatches, and those yet to come: a server that stops would wait for its callers to end
        them."""
        self._ending.set()

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_StageServiceServicer_to_server(self, server)
        return SERVICE

    async def RunStage(self, _: object, context: grpc.aio.ServicerContext) -> None:
        stream = ServerStream(context, pb.RunStageRequest.FromString)
        async with answering(context):
            first = await stream.read()
            if first is grpc.aio.EOF or first.WhichOneof("frame") != "open":
                raise InvalidArgument("the first frame of a session must be open", field="frame")
            opening = open_from_message(first.open)
            log_for(opening.request_id, opening.trace)
            above = self._step_lane(first.open)
            session = await self._port.open(opening, above)
            ahead = asyncio.Semaphore(MAX_STEPS_AHEAD)
            try:
                lane = self._links.lane(first.open.lane) if first.open.HasField("lane") else None
                opened = opened_to_message(
                    session.stages,
                    lane=lane is not None,
                    step_lane=above is not None,
                    batches=above is not None and above.batches is not None,
                )
                await stream.write(pb.RunStageResponse(opened=opened))
                if lane is not None:
                    stream.use_lane(lane)
                session.answer_at_once(functools.partial(self._answer_now, stream, ahead))
                # A failure that was answered in-band decides over an error that it caused in the other loop.
                await first_done(self._answer(session, stream, ahead), self._receive(session, stream, ahead))
            finally:
                stream.close()
                # A caller that cancels meanwhile must not leave a session half closed.
                why = ending(sys.exception())
                if why == CLOSED and opening.rest is not None and opening.stage:
                    # A caller that is gone looks like one that has done with the session; this one says so.
                    why = CANCELLED
                await asyncio.shield(session.close(why))

    def _step_lane(self, message: stage_pb2.Open) -> StepLane | None:
        found = self._links.step_socket(message.lane) if message.HasField("lane") else None
        if found is None:
            together = self._batches.get(message.batches.batches_id) if message.HasField("batches") else None
            return None if together is None else TogetherOnly(message.batches.stream_id, together)
        batches: BatchLane[Any] | None = BatchLane.of(*found, above=False) if message.lane.batches else None
        if batches is not None and message.lane.tokens:
            batches.takes_tokens = True
        if batches is not None and not message.lane.steps:
            return TogetherOnly(message.lane.stream_id, batches)
        return StepLane(*found, message.lane.stream_id, batches)

    async def RunBatches(self, _: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            first = await context.read()
            if first is grpc.aio.EOF or first.WhichOneof("frame") != "open":
                raise InvalidArgument("the first frame of a call must be open", field="frame")
            if self._ending.is_set():
                raise Unavailable("this worker is stopping", reason="STOPPING")
            number = first.open.batches_id
            if number in self._batches:
                raise InvalidArgument(f"batches_id {number} is in use", field="batches_id")
            batches: BatchStream[Any] = BatchStream()
            self._batches[number] = batches
            try:
                await context.write(pb.RunBatchesResponse(opened=pb.BatchesOpened()))
                await first_done(
                    self._receive_batches(batches, context), self._answer_batches(batches, context), self._ended()
                )
            finally:
                del self._batches[number]
                batches.close()

    async def ForgetSession(
        self, request: pb.ForgetSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForgetSessionResponse:
        async with answering(context):
            await self._port.forget(request.session_id)
            return pb.ForgetSessionResponse()

    async def _ended(self) -> None:
        await self._ending.wait()

    async def _receive_batches(self, batches: BatchStream[Any], context: grpc.aio.ServicerContext) -> None:
        reader: FrameReader[StepBatch] | None = None
        while (message := await context.read()) is not grpc.aio.EOF:
            if reader is None:
                limits = batches.limits(message.step_batch)
                reader = FrameReader(BATCH_FRAMES, limits, self._links)
            if (batch := reader.read(message)) is not None:
                reader = None
                batches.take_batch(batch)

    @staticmethod
    async def _answer_batches(batches: BatchStream[Any], context: grpc.aio.ServicerContext) -> None:
        async for answers in batches.outgoing():
            assert not isinstance(answers, StepBatch)
            await context.write(pb.RunBatchesResponse(batch_answers=answers_to_message(answers)))

    async def _receive(self, session: StageSession, stream: ServerStream, ahead: asyncio.Semaphore) -> None:
        limits = TensorLimits(session.max_tensor_bytes, session.max_feature_slices)
        reader = FrameReader(STREAM_FRAMES, limits, self._links)
        while await ahead.acquire() and (frame := await read_frame(stream, reader)) is not None:
            match frame:
                case Forward():
                    await session.forward(frame)
                case StepLimit():
                    await session.limit_steps(frame)
                    # It has no answer.
                    ahead.release()
                case SnapshotSave():
                    await session.save_snapshot(frame)
                case SnapshotRestore():
                    await session.restore_snapshot(frame)

    @staticmethod
    async def _answer(session: StageSession, stream: ServerStream, ahead: asyncio.Semaphore) -> None:
        async for event in session.events():
            await stream.write(event_to_message(event))
            if _ends_frame(event):
                ahead.release()
            if isinstance(event, Failure) and event.reason is not FailureReason.DRAFT_LOST:
                return

    @staticmethod
    def _answer_now(stream: ServerStream, ahead: asyncio.Semaphore, event: Event) -> bool:
        """Send what a step came to, if that can be done at once; return whether it was."""
        if not isinstance(event, Commit | Proposal) or not stream.write_now(functools.partial(event_to_message, event)):
            return False
        if _ends_frame(event):
            ahead.release()
        return True


def _ends_frame(event: Event) -> bool:
    """Return whether it is the last answer to a frame: the steps that follow it by themselves came in none."""
    return isinstance(event, SnapshotSaved | SnapshotRestored) or (isinstance(event, Commit) and not event.more)


class RemoteBatches:
    """The call by which a worker's stage gets the steps of several sessions at once. Use `close`."""

    def __init__(self, channel: grpc.aio.Channel, address: str, guard: Guard = unguarded) -> None:
        self._stub = pb_grpc.StageServiceStub(channel)
        self._address, self._guard = address, guard
        self._beginning = asyncio.Lock()
        self._number = 0
        self._stream_ids = itertools.count(1)
        self._batches: BatchStream[Any] | None = None
        self._running: asyncio.Task[None] | None = None

    async def lane(self, message: stage_pb2.Open) -> TogetherOnly | None:
        """Return the lane of a session that is about to be opened, None where the stage takes no batches.

        message: the session's first frame, which is filled with the lane's name.
        """
        async with self._beginning:
            if self._batches is None or self._batches.closed:
                await self._begin()
        if self._batches is None or self._batches.closed:
            return None
        message.batches.batches_id, message.batches.stream_id = self._number, next(self._stream_ids)
        return TogetherOnly(message.batches.stream_id, self._batches)

    async def close(self) -> None:
        """End the call. Safe to call twice."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _begin(self) -> None:
        self._batches, self._number = None, secrets.randbits(64)
        stream = ClientStream(self._stub.RunBatches(), address=self._address)
        self._guard(stream)
        try:
            await stream.send(pb.RunBatchesRequest(open=pb.BatchesOpen(batches_id=self._number)))
            if await stream.read() is grpc.aio.EOF:
                return
        except FlashsplitError as error:
            # A worker of a release before has no such call.
            log.info("batches.none", address=self._address, why=error.message)
            return
        except BaseException:
            stream.cancel()
            raise
        self._batches = BatchStream()
        self._running = asyncio.ensure_future(self._run(self._batches, stream))

    async def _run(self, batches: BatchStream[Any], stream: ClientStream) -> None:
        error: FlashsplitError = Unavailable(f"{self._address} ended the call for steps of several sessions")
        try:
            await first_done(self._send(batches, stream), self._receive(batches, stream))
        except FlashsplitError as raised:
            error = raised
        finally:
            batches.close()
            stream.cancel()
        # Where the worker is lost the sessions' own streams know better why.
        await asyncio.sleep(BROKEN_S)
        batches.fail(error.located(address=self._address))

    @staticmethod
    async def _send(batches: BatchStream[Any], stream: ClientStream) -> None:
        async for batch in batches.outgoing():
            assert isinstance(batch, StepBatch)
            if not await stream.send_all(batch_to_messages(batch, pb.RunBatchesRequest)):
                raise await stream.ended()

    @staticmethod
    async def _receive(batches: BatchStream[Any], stream: ClientStream) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            batches.take_answers(answers_from_message(message.batch_answers).answers)


class _Answers:
    """Puts answers to steps of several sessions into the streams of these, as a `BatchListener`."""

    def before_reading(self) -> None:
        """Do nothing."""

    def memory_for(self, _: int) -> bytearray:
        raise AssertionError("answers have no tensors")

    def take_steps(self, *_: object) -> None:
        raise AssertionError("steps go down the chain, and here is its end above")

    def take_answers(self, answers: Sequence[tuple[ClientStream, BatchAnswer]]) -> None:
        for stream, answer in answers:
            stream.hand_over(answer)

    def take_tokens(self, tokens: Sequence[tuple[ClientStream, int, int]]) -> None:
        """Pass over them: the answers say the same."""

    def fail(self, members: Sequence[ClientStream], error: FlashsplitError) -> None:
        for stream in members:
            stream.fail(error)


_ANSWERS = _Answers()


class RemoteStage:
    """A `StagePort` at the other end of a channel."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        link: SharedLink | None = None,
        guard: Guard = unguarded,
        batches: RemoteBatches | None = None,
    ) -> None:
        """link: the memory shared with the worker there. batches: the call for steps of several sessions, where there
        is no lane for each; None for no such call."""
        self._stub = pb_grpc.StageServiceStub(channel)
        self._address, self._link, self._guard, self._batches = address, link, guard, batches

    async def open(
        self, request: OpenSession, above: StepLane | None = None, *, steps: bool = False, answers: bool = False
    ) -> RemoteStageSession:
        """Begin a session, as the port says; `above` has no use here.

        steps: whether to have a lane for steps that follow by themselves. answers: whether the session's events may
        come with those of other sessions instead; this event loop watches the link's socket for steps then.
        """
        stream = ClientStream(self._stub.RunStage(), stage=request.stage, address=self._address)
        self._guard(stream)
        opening = pb.RunStageRequest(open=open_to_message(request))
        lane = None if self._link is None else self._link.begin_lane(opening.open.lane)
        step_lane: StepLane | None = None
        if lane is not None and (steps or answers):
            step_lane = self._step_lane(opening.open.lane, steps=steps)
        try:
            if step_lane is None and steps and self._batches is not None:
                step_lane = await self._batches.lane(opening.open)
            await stream.send(opening)
            response = await stream.read()
            if response is grpc.aio.EOF:
                raise Unavailable(f"{self._address} closed the session without opening it", address=self._address)
            if lane is not None and response.opened.lane:
                stream.use_lane(lane, pb.RunStageResponse.FromString)
            sender = None if self._link is None else self._link.sender()
            if not response.opened.step_lane:
                step_lane = None
            elif step_lane is not None and not response.opened.batches:
                step_lane.batches = None
            if answers and step_lane is not None and (lane is None or not stream.uses_lane(lane)):
                # Answers would come on a way that cannot be read in one order with the stream.
                raise Unavailable("the socket for the session's frames broke", reason="LANE_BROKEN").located(
                    **stream.where
                )
            # A first stage knows by itself how its session ends.
            resting_id = request.rest.session_id if request.rest is not None and request.stage else None
            forget = None if resting_id is None else functools.partial(self.forget, resting_id)
            session = RemoteStageSession(stream, opened_from_message(response.opened), sender, step_lane, forget)
            if answers:
                session.take_answers()
            return session
        except BaseException:
            stream.cancel()
            raise
        finally:
            if lane is not None and not stream.uses_lane(lane):
                lane.close()

    async def forget(self, session_id: str) -> None:
        """Have the stage forget a session; where that fails its state rests for as long as it may."""
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await self._stub.ForgetSession(pb.ForgetSessionRequest(session_id=session_id), timeout=FORGET_S)

    def _step_lane(self, message: shared_memory_pb2.FrameLane, *, steps: bool) -> StepLane | None:
        link = self._link
        if link is None or link.step_socket is None:
            return None
        message.steps, message.batches, message.tokens = steps, True, steps
        batches: BatchLane[Any] = BatchLane.of(link, link.step_socket, above=True)
        if not steps:
            return TogetherOnly(message.stream_id, batches)
        return StepLane(link, link.step_socket, message.stream_id, batches)


class RemoteStageSession:
    """A `StageSession` at the other end of a stream."""

    def __init__(
        self,
        stream: ClientStream,
        stages: tuple[StageIdentity, ...],
        sender: LinkSender | None = None,
        step_lane: StepLane | None = None,
        forget: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """forget: has the stage forget the session whose stream ends; None where its state does not rest."""
        self._stream, self._sender, self.step_lane = stream, sender, step_lane
        self._forget = forget
        self._answers: StepLane | None = None
        """By which answers come that are not in the stream."""
        self._order: StepOrder | None = None
        """Of the answers that come on both ways."""
        self.stages = stages
        self.max_tensor_bytes = 0
        self.max_feature_slices = 0
        stream.where |= {"host": stages[0].location.host, "device": stages[0].location.device}

    async def forward(self, forward: Forward) -> None:
        """Take one step, as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(forward, self._sender))

    async def limit_steps(self, limit: StepLimit) -> None:
        """Do as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(limit))

    async def save_snapshot(self, save: SnapshotSave) -> None:
        """Do as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(save))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        """Do as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(restore))

    async def events(self) -> AsyncIterator[Event]:
        """Yield what comes back, as the port says. Raises the FlashsplitError that ended the stream, if one did."""
        reader, order = FrameReader(EVENT_FRAMES), self._order
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            # No event has tensors, so that each message is one.
            if order is None:
                if (event := reader.read(message)) is not None:
                    yield event
                continue
            came = message if isinstance(message, BatchAnswer) else reader.read(message)
            for event in () if came is None else order.add(came):
                yield event

    def take_answers(self) -> None:
        """Take answers to the session's steps that come with those of other sessions."""
        lane = self.step_lane
        if lane is not None and lane.batches is not None:
            lane.batches.join(lane.stream_id, self._stream, _ANSWERS)
            self._answers, self._order = lane, StepOrder()

    def answer_at_once(self, _: Callable[[Event], bool]) -> None:
        """Do nothing: who reads the stream is woken in any case."""

    async def close(self, why: str = CLOSED) -> None:
        if why == LEFT:
            self._stream.cancel()
        else:
            forget, self._forget = self._forget, None
            if forget is not None:
                # The session's end does not wait for it.
                forgetting = asyncio.ensure_future(forget())
                _forgetting.add(forgetting)
                forgetting.add_done_callback(_forgetting.discard)
            await self._stream.close()
        if self._sender is not None:
            self._sender.close()
        if self._answers is not None:
            self._answers.close()
