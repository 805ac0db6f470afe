"""DraftService: the port, the servicer and the remote client for a draft in a worker of its own.

Its client is the last stage of the target.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol, TypeVar

import grpc

from flashsplit.shard.v1 import draft_pb2, draft_service_pb2 as pb, draft_service_pb2_grpc as pb_grpc
from services.errors import CLOSED, InvalidArgument, Unavailable, answering, ending
from services.messages.draft_session import (
    DRAFT_FRAMES,
    PART_FRAMES,
    PROPOSED_FRAMES,
    DraftAnswer,
    DraftRequest,
    OpenDraft,
    Propose,
    answer_to_messages,
    open_from_message,
    open_to_message,
    part_to_response,
    request_to_messages,
)
from services.messages.frames import FrameKinds, FrameReader, TensorLimits
from services.messages.steps import FeatureSlice, SnapshotPart, SnapshotRestore, SnapshotSave
from services.same_host.link import NO_LINKS, LinkSender, SharedLink, SharedLinks
from services.streams.client_stream import ClientStream, Guard, unguarded
from services.streams.frame_reading import read_frame
from services.streams.server_stream import ServerStream
from services.telemetry.trace_context import log_for

_Answer = TypeVar("_Answer")

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftSession(Protocol):
    """One request's state in a draft."""

    host: str
    device: str
    max_tensor_bytes: int

    async def feature_slice(self, piece: FeatureSlice) -> None:
        """Take features of committed rows; their positions follow each other without a gap."""

    async def propose(self, request: Propose) -> DraftAnswer:
        """Propose draft tokens. Raises FailedPrecondition when the features end elsewhere than at `position`."""

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        """Keep the state behind the features so far. Raises FailedPrecondition when they have another length."""

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        """Begin from a kept state. Raises NotFound when it isn't kept, FailedPrecondition after the first features."""

    async def close(self, why: str = CLOSED) -> None:
        """Free the session. Safe to call twice. why: what ended it, in a word for the log."""


class DraftPort(Protocol):
    """A draft, in this process or in another one."""

    async def open(self, request: OpenDraft) -> DraftSession:
        """Begin a session. Raises FailedPrecondition when another draft is loaded."""


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Serves a `DraftPort` to callers in other processes."""

    def __init__(self, port: DraftPort, links: SharedLinks = NO_LINKS) -> None:
        """links: the memory that callers share with this process."""
        self._port, self._links = port, links

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_DraftServiceServicer_to_server(self, server)
        return SERVICE

    async def RunDraft(self, _: object, context: grpc.aio.ServicerContext) -> None:
        stream = ServerStream(context, pb.RunDraftRequest.FromString)
        async with answering(context):
            first = await stream.read()
            if first is grpc.aio.EOF or first.WhichOneof("frame") != "open":
                raise InvalidArgument("the first frame of a session must be open", field="frame")
            opening = open_from_message(first.open)
            log_for(opening.request_id, opening.trace)
            session = await self._port.open(opening)
            try:
                lane = self._links.lane(first.open.lane) if first.open.HasField("lane") else None
                opened = draft_pb2.DraftOpened(host=session.host, device=session.device, lane=lane is not None)
                await stream.write(pb.RunDraftResponse(opened=opened))
                if lane is not None:
                    stream.use_lane(lane)
                await self._serve(session, stream)
            finally:
                stream.close()
                # A caller that cancels meanwhile must not leave a session half closed.
                await asyncio.shield(session.close(ending(sys.exception())))

    async def _serve(self, session: DraftSession, stream: ServerStream) -> None:
        reader = FrameReader(DRAFT_FRAMES, TensorLimits(session.max_tensor_bytes), self._links)
        while (frame := await read_frame(stream, reader)) is not None:
            match frame:
                case FeatureSlice():
                    await session.feature_slice(frame)
                case Propose():
                    for message in answer_to_messages(frame.step, await session.propose(frame)):
                        await stream.write(message)
                case SnapshotSave():
                    await stream.write(part_to_response(await session.save_snapshot(frame)))
                case SnapshotRestore():
                    await stream.write(part_to_response(await session.restore_snapshot(frame)))


class RemoteDraft:
    """A `DraftPort` at the other end of a channel."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, link: SharedLink | None = None, guard: Guard = unguarded
    ) -> None:
        """link: the memory shared with the worker there."""
        self._stub = pb_grpc.DraftServiceStub(channel)
        self._address, self._link, self._guard = address, link, guard

    async def open(self, request: OpenDraft) -> RemoteDraftSession:
        stream = ClientStream(self._stub.RunDraft(), address=self._address)
        self._guard(stream)
        message = open_to_message(request)
        lane = None if self._link is None else self._link.begin_lane(message.lane)
        try:
            await stream.send(pb.RunDraftRequest(open=message))
            response = await stream.read()
            if response is grpc.aio.EOF:
                raise Unavailable(f"{self._address} closed the draft session without opening it", address=self._address)
            if response.WhichOneof("frame") != "opened":
                raise InvalidArgument(f"{self._address} answered open otherwise: expected opened", field="frame")
            if lane is not None and response.opened.lane:
                stream.use_lane(lane, pb.RunDraftResponse.FromString)
            sender = None if self._link is None else self._link.sender()
            return RemoteDraftSession(stream, response.opened.host, response.opened.device, sender)
        except BaseException:
            stream.cancel()
            raise
        finally:
            if lane is not None and not stream.uses_lane(lane):
                lane.close()


class RemoteDraftSession:
    """A `DraftSession` at the other end of a stream."""

    max_tensor_bytes = 64 << 20
    """The largest answer in bytes: more than a block of hidden rows takes."""

    def __init__(self, stream: ClientStream, host: str, device: str, sender: LinkSender | None = None) -> None:
        self._stream, self._sender = stream, sender
        self.host, self.device = host, device
        stream.where |= {"host": host, "device": device}

    async def feature_slice(self, piece: FeatureSlice) -> None:
        await self._send(piece)

    async def propose(self, request: Propose) -> DraftAnswer:
        await self._send(request)
        return await self._answer(PROPOSED_FRAMES)

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        await self._send(save)
        return await self._answer(PART_FRAMES)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        await self._send(restore)
        return await self._answer(PART_FRAMES)

    async def close(self, why: str = CLOSED) -> None:
        await self._stream.close()
        if self._sender is not None:
            self._sender.close()

    async def _answer(self, kinds: FrameKinds[_Answer]) -> _Answer:
        answer = await read_frame(self._stream, FrameReader(kinds, TensorLimits(self.max_tensor_bytes)))
        if answer is None:
            raise await self._stream.ended()
        return answer

    async def _send(self, request: DraftRequest) -> None:
        if not await self._stream.send_all(request_to_messages(request, self._sender)):
            raise await self._stream.ended()
