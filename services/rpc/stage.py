"""StageService: the port, the servicer and the remote client for sessions on a chain of stages.

The coordinator and every stage but the last are its clients. What the frames mean stands in `stage.proto`; this module
hands them over to the port and back, and ends the stream with the session and the session with the stream.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from flashsplit.shard.v1 import (
    shared_memory_pb2,
    stage_pb2,
    stage_service_pb2 as pb,
    stage_service_pb2_grpc as pb_grpc,
)
from services.errors import CLOSED, InvalidArgument, Unavailable, answering, ending
from services.event_loop import first_done
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
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageIdentity,
)
from services.same_host.link import NO_LINKS, LinkSender, SharedLink, SharedLinks
from services.streams.client_stream import ClientStream, Guard, unguarded
from services.streams.frame_reading import read_frame
from services.streams.server_stream import ServerStream
from services.streams.step_lane import StepLane
from services.telemetry.trace_context import log_for

SERVICE = pb.DESCRIPTOR.services_by_name["StageService"].full_name

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

    async def close(self, why: str = CLOSED) -> None:
        """Free the session here and below. Safe to call twice. why: what ended it, in a word for the log."""


class StagePort(Protocol):
    """A stage, in this process or in another one."""

    async def open(self, request: OpenSession, above: StepLane | None = None) -> StageSession:
        """Begin a session.

        above: the lane from the stage before, through which steps that follow by themselves come. Raises
        FailedPrecondition when the stage holds something else than the caller expects.
        """


class StageServicer(pb_grpc.StageServiceServicer):
    """Serves a `StagePort` to callers in other processes."""

    def __init__(self, port: StagePort, links: SharedLinks = NO_LINKS) -> None:
        """links: the memory that callers share with this process."""
        self._port, self._links = port, links

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
                opened = opened_to_message(session.stages, lane=lane is not None, step_lane=above is not None)
                await stream.write(pb.RunStageResponse(opened=opened))
                if lane is not None:
                    stream.use_lane(lane)
                # A failure that was answered in-band decides over an error that it caused in the other loop.
                await first_done(self._answer(session, stream, ahead), self._receive(session, stream, ahead))
            finally:
                stream.close()
                # A caller that cancels meanwhile must not leave a session half closed.
                await asyncio.shield(session.close(ending(sys.exception())))

    def _step_lane(self, message: stage_pb2.Open) -> StepLane | None:
        found = self._links.step_socket(message.lane) if message.HasField("lane") else None
        return None if found is None else StepLane(*found, message.lane.stream_id)

    async def _receive(self, session: StageSession, stream: ServerStream, ahead: asyncio.Semaphore) -> None:
        limits = TensorLimits(session.max_tensor_bytes, session.max_feature_slices)
        reader = FrameReader(STREAM_FRAMES, limits, self._links)
        while await ahead.acquire() and (frame := await read_frame(stream, reader)) is not None:
            match frame:
                case Forward():
                    await session.forward(frame)
                case SnapshotSave():
                    await session.save_snapshot(frame)
                case SnapshotRestore():
                    await session.restore_snapshot(frame)

    @staticmethod
    async def _answer(session: StageSession, stream: ServerStream, ahead: asyncio.Semaphore) -> None:
        async for event in session.events():
            await stream.write(event_to_message(event))
            # The last answer to a frame: the steps that follow it by themselves came in none.
            if isinstance(event, SnapshotSaved | SnapshotRestored) or (isinstance(event, Commit) and not event.more):
                ahead.release()
            if isinstance(event, Failure) and event.reason is not FailureReason.DRAFT_LOST:
                return


class RemoteStage:
    """A `StagePort` at the other end of a channel."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, link: SharedLink | None = None, guard: Guard = unguarded
    ) -> None:
        """link: the memory shared with the worker there."""
        self._stub = pb_grpc.StageServiceStub(channel)
        self._address, self._link, self._guard = address, link, guard

    async def open(
        self, request: OpenSession, above: StepLane | None = None, *, steps: bool = False
    ) -> RemoteStageSession:
        """Begin a session, as the port says; `above` has no use here.

        steps: whether to have a lane for steps that follow by themselves.
        """
        stream = ClientStream(self._stub.RunStage(), stage=request.stage, address=self._address)
        self._guard(stream)
        opening = pb.RunStageRequest(open=open_to_message(request))
        lane = None if self._link is None else self._link.begin_lane(opening.open.lane)
        step_lane = self._step_lane(opening.open.lane) if lane is not None and steps else None
        try:
            await stream.send(opening)
            response = await stream.read()
            if response is grpc.aio.EOF:
                raise Unavailable(f"{self._address} closed the session without opening it", address=self._address)
            if lane is not None and response.opened.lane:
                stream.use_lane(lane, pb.RunStageResponse.FromString)
            sender = None if self._link is None else self._link.sender()
            if not response.opened.step_lane:
                step_lane = None
            return RemoteStageSession(stream, opened_from_message(response.opened), sender, step_lane)
        except BaseException:
            stream.cancel()
            raise
        finally:
            if lane is not None and not stream.uses_lane(lane):
                lane.close()

    def _step_lane(self, message: shared_memory_pb2.FrameLane) -> StepLane | None:
        link = self._link
        if link is None or link.step_socket is None:
            return None
        message.steps = True
        return StepLane(link, link.step_socket, message.stream_id)


class RemoteStageSession:
    """A `StageSession` at the other end of a stream."""

    def __init__(
        self,
        stream: ClientStream,
        stages: tuple[StageIdentity, ...],
        sender: LinkSender | None = None,
        step_lane: StepLane | None = None,
    ) -> None:
        self._stream, self._sender, self.step_lane = stream, sender, step_lane
        self.stages = stages
        self.max_tensor_bytes = 0
        self.max_feature_slices = 0
        stream.where |= {"host": stages[0].location.host, "device": stages[0].location.device}

    async def forward(self, forward: Forward) -> None:
        """Take one step, as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(forward, self._sender))

    async def save_snapshot(self, save: SnapshotSave) -> None:
        """Do as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(save))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        """Do as the port says, but raise nothing: where the stream is over, events() says why."""
        await self._stream.send_all(request_to_messages(restore))

    async def events(self) -> AsyncIterator[Event]:
        """Yield what comes back, as the port says. Raises the FlashsplitError that ended the stream, if one did."""
        reader = FrameReader(EVENT_FRAMES)
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            # No event has tensors, so that each message is one.
            if (event := reader.read(message)) is not None:
                yield event

    async def close(self, why: str = CLOSED) -> None:
        await self._stream.close()
        if self._sender is not None:
            self._sender.close()
