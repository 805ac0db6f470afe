"""DraftService: the port, the servicer and the remote client for a draft in a worker of its own.

Its client is the last stage of the target.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc

from flashsplit.shard.v1 import (
    draft_pb2,
    draft_service_pb2 as pb,
    draft_service_pb2_grpc as pb_grpc,
)
from services.errors import CLOSED, InvalidArgument, Unavailable, answering, ending
from services.messages import session_frames
from services.messages.steps import FeatureSlice, SnapshotPart, SnapshotRestore, SnapshotSave
from services.messages.tensors import OutgoingTensors, WireTensor, incomplete
from services.same_host.link import NO_LINKS, Sender, SharedLink, SharedLinks
from services.streams.client_stream import ClientStream
from services.streams.server_stream import ServerStream
from services.streams.tensor_reading import read_tensors
from services.telemetry.trace_context import Trace, log_for

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """First frame of a draft session."""

    request_id: str
    fingerprint: str
    max_length: int
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask for `tokens` guesses after the known token at `position`.

    embed: embedding rows of the known and of the mask token, [2, hidden], for HeadPlace.PROJECTED.
    """

    step: int
    position: int
    token_id: int
    tokens: int
    embed: WireTensor | None = None


DraftAnswer = tuple[int, ...] | WireTensor
"""Guessed token ids, or hidden rows [guesses, hidden] that the caller must project."""


class DraftSession(Protocol):
    """One request's draft state."""

    host: str
    device: str
    max_tensor_bytes: int

    async def feature_slice(self, piece: FeatureSlice) -> None:
        """Take features of committed rows; positions must follow each other without gap."""

    async def propose(self, request: Propose) -> DraftAnswer:
        """Guess. Raises FailedPrecondition when the features end somewhere else than at `position`."""

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        """Keep the state behind the features so far. Raises FailedPrecondition when they end elsewhere."""

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        """Begin from a kept state. Raises NotFound when it isn't kept, FailedPrecondition after the first features."""

    async def close(self, why: str = CLOSED) -> None:
        """Free the session. why: what ended it, in a word for the log. Safe to call twice."""


class DraftPort(Protocol):
    """A draft, here or elsewhere."""

    async def open(self, request: OpenDraft) -> DraftSession:
        """Begin a session. Raises FailedPrecondition when another draft is loaded."""


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Frames to port."""

    def __init__(self, port: DraftPort, links: SharedLinks = NO_LINKS) -> None:
        """links: the memory that callers share with this process."""
        self._port, self._links = port, links

    def register(self, server: grpc.aio.Server) -> str:
        pb_grpc.add_DraftServiceServicer_to_server(self, server)
        return SERVICE

    async def RunDraft(self, _: object, context: grpc.aio.ServicerContext) -> None:
        stream = ServerStream(context, pb.RunDraftRequest.FromString)
        async with answering(context):
            first = await stream.read()
            if first is grpc.aio.EOF or first.WhichOneof("frame") != "open":
                raise InvalidArgument("the first frame of a session must be open", field="frame")
            opening = _open_from_message(first.open)
            log_for(opening.request_id, opening.trace)
            session = await self._port.open(opening)
            try:
                lane = self._links.lane(first.open.lane) if first.open.HasField("lane") else None
                opened = draft_pb2.DraftOpened(host=session.host, device=session.device, lane=lane is not None)
                await stream.write(pb.RunDraftResponse(opened=opened))
                if lane is not None:
                    stream.use(lane)
                await self._serve(session, stream)
            finally:
                stream.close()
                # A caller that cancels meanwhile must not leave a session half closed.
                await asyncio.shield(session.close(ending(sys.exception())))

    async def _serve(self, session: DraftSession, stream: ServerStream) -> None:
        while (request := await stream.read()) is not grpc.aio.EOF:
            match request.WhichOneof("frame"):
                case "feature_slice":
                    message = request.feature_slice
                    tensor = incomplete(message.features, "features", session.max_tensor_bytes, self._links)
                    [features] = await read_tensors(stream, [tensor], self._links)
                    piece = session_frames.slice_from_message(message, features)
                    await session.feature_slice(piece)
                case "propose":
                    propose = await _propose_from_message(request.propose, session, stream, self._links)
                    for frame in _draft_tokens_to_messages(propose.step, await session.propose(propose)):
                        await stream.write(frame)
                case "snapshot_save":
                    part = await session.save_snapshot(session_frames.save_from_message(request.snapshot_save))
                    await stream.write(pb.RunDraftResponse(snapshot_part=session_frames.part_to_message(part)))
                case "snapshot_restore":
                    part = await session.restore_snapshot(session_frames.restore_from_message(request.snapshot_restore))
                    await stream.write(pb.RunDraftResponse(snapshot_part=session_frames.part_to_message(part)))
                case other:
                    raise InvalidArgument(f"frame {other} is not expected here", field="frame")


def _open_from_message(message: draft_pb2.DraftOpen) -> OpenDraft:
    return OpenDraft(
        session_frames.check_request_id(message.request_id),
        message.fingerprint,
        message.max_length,
        session_frames.trace_from_message(message),
    )


async def _propose_from_message(
    message: draft_pb2.Propose, session: DraftSession, stream: ServerStream, links: SharedLinks
) -> Propose:
    embed = None
    if message.HasField("embed"):
        tensor = incomplete(message.embed.rows, "embed.rows", session.max_tensor_bytes, links)
        [embed] = await read_tensors(stream, [tensor], links)
    return Propose(message.step, message.position, message.token_id, message.tokens, embed)


def _draft_tokens_to_messages(step: int, draft_tokens: DraftAnswer) -> Iterator[pb.RunDraftResponse]:
    response, tensors = pb.RunDraftResponse(), OutgoingTensors()
    response.proposed.step = step
    if isinstance(draft_tokens, WireTensor):
        tensors.put(draft_tokens, response.proposed.project.hidden)
    else:
        response.proposed.tokens.token_ids.extend(draft_tokens)
    yield response
    for chunk in tensors.chunks():
        yield pb.RunDraftResponse(chunk=chunk)


class RemoteDraft:
    """Port to frames: a `DraftPort` over a channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str, link: SharedLink | None = None) -> None:
        """link: memory shared with the worker there."""
        self._stub = pb_grpc.DraftServiceStub(channel)
        self._address, self._link = address, link

    async def open(self, request: OpenDraft) -> RemoteDraftSession:
        stream = ClientStream(self._stub.RunDraft(), address=self._address)
        message = draft_pb2.DraftOpen(
            request_id=request.request_id,
            fingerprint=request.fingerprint,
            max_length=request.max_length,
            traceparent=request.trace.traceparent if request.trace is not None else None,
        )
        lane = None if self._link is None else self._link.begin_lane(message.lane)
        try:
            await stream.send(pb.RunDraftRequest(open=message))
            response = await stream.read()
            if response is grpc.aio.EOF:
                raise Unavailable(f"{self._address} closed the draft session without opening it", address=self._address)
            if lane is not None and response.opened.lane:
                stream.use(lane, pb.RunDraftResponse.FromString)
            sender = None if self._link is None else self._link.sender()
            return RemoteDraftSession(stream, response.opened.host, response.opened.device, sender)
        except BaseException:
            stream.cancel()
            raise
        finally:
            if lane is not None and not stream.uses(lane):
                lane.close()


class RemoteDraftSession:
    """A `DraftSession` at the other end of a stream. Its answers are bounded by what a block can hold."""

    max_tensor_bytes = 64 << 20

    def __init__(self, stream: ClientStream, host: str, device: str, sender: Sender | None = None) -> None:
        self._stream, self._sender = stream, sender
        self.host, self.device = host, device
        stream.where |= {"host": host, "device": device}

    async def feature_slice(self, piece: FeatureSlice) -> None:
        request, tensors = pb.RunDraftRequest(), OutgoingTensors(self._sender)
        session_frames.slice_to_message(piece, request.feature_slice, tensors)
        await self._send(request, tensors)

    async def propose(self, request: Propose) -> DraftAnswer:
        frame, tensors = pb.RunDraftRequest(), OutgoingTensors(self._sender)
        message = frame.propose
        message.step, message.position = request.step, request.position
        message.token_id, message.tokens = request.token_id, request.tokens
        if request.embed is not None:
            tensors.put(request.embed, message.embed.rows)
        await self._send(frame, tensors)
        proposed = (await self._answer("proposed")).proposed
        if proposed.WhichOneof("result") != "project":
            return tuple(proposed.tokens.token_ids)
        tensor = incomplete(proposed.project.hidden, "project.hidden", self.max_tensor_bytes)
        [hidden] = await read_tensors(self._stream, [tensor])
        return hidden

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        message = session_frames.save_to_message(save)
        await self._send(pb.RunDraftRequest(snapshot_save=message), OutgoingTensors())
        return session_frames.part_from_message((await self._answer("snapshot_part")).snapshot_part)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        message = session_frames.restore_to_message(restore)
        await self._send(pb.RunDraftRequest(snapshot_restore=message), OutgoingTensors())
        return session_frames.part_from_message((await self._answer("snapshot_part")).snapshot_part)

    async def close(self, why: str = CLOSED) -> None:
        await self._stream.close()
        if self._sender is not None:
            self._sender.close()

    async def _answer(self, expected: str) -> pb.RunDraftResponse:
        response = await self._stream.read()
        if response is grpc.aio.EOF:
            raise await self._stream.ended()
        if (frame_name := response.WhichOneof("frame")) != expected:
            raise InvalidArgument(f"answer {frame_name} is not expected here", field="frame")
        return response

    async def _send(self, frame: pb.RunDraftRequest, tensors: OutgoingTensors) -> None:
        chunks = (pb.RunDraftRequest(chunk=chunk) for chunk in tensors.chunks())
        if not await self._stream.send_all(itertools.chain([frame], chunks)):
            raise await self._stream.ended()
