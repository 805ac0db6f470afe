"""SharedMemoryService: how two processes get a link, which they keep for as long as the call lasts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

import grpc
import structlog

from flashsplit.shard.v1 import (
    shared_memory_pb2,
    shared_memory_service_pb2 as pb,
    shared_memory_service_pb2_grpc as pb_grpc,
)
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, Unavailable, answering
from services.event_loop import first_done
from services.same_host.frame_socket import FrameListener, connect_frames
from services.same_host.link import SEGMENT_BYTES, SharedLink, SharedLinks
from services.same_host.segment import OwnSegment, PeerSegment, SegmentOffer, available
from services.same_host.step_socket import StepListener, StepSocket, Watcher, connect_steps
from services.streams.client_stream import ClientStream, Guard, unguarded

log = structlog.get_logger()

SERVICE = pb.DESCRIPTOR.services_by_name["SharedMemoryService"].full_name


class SharedMemoryServicer(pb_grpc.SharedMemoryServiceServicer):
    """Adds a link to `links` for each call, and removes it when the call ends."""

    def __init__(self, links: SharedLinks, watcher: Watcher | None = None) -> None:
        """watcher: the thread to which steps of other workers may come directly, None where they may not."""
        self._links, self._watcher, self._ending = links, watcher, asyncio.Event()

    def end(self) -> None:
        """End all links, and those yet to come: a server that stops would wait for its callers to end them."""
        self._ending.set()

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_SharedMemoryServiceServicer_to_server(self, server)
        return SERVICE

    async def ShareMemory(self, _: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            first = await context.read()
            if first is grpc.aio.EOF or first.WhichOneof("frame") != "segment":
                raise InvalidArgument("the first frame must be segment", field="frame")
            link = _link(secrets.randbits(64) or 1, _own(), first.segment)
            self._links.add(link)
            # Each side shows the nonce in the other's segment, and so that it has mapped it.
            nonces = {"own": first.segment.nonce, "expected": link.offer.nonce}
            listener = FrameListener(**nonces, on_connected=link.use_frame_socket)
            step_listener = self._step_listener(link, **nonces)
            try:
                opened = shared_memory_pb2.SharedOpened(link_id=link.link_id, segment=_to_message(link.offer))
                with contextlib.suppress(OSError):
                    opened.socket = await listener.start()
                    if step_listener is not None:
                        opened.step_socket = step_listener.start()
                await context.write(shared_memory_pb2.ShareMemoryResponse(opened=opened))
                response = shared_memory_pb2.ShareMemoryResponse
                await first_done(_listen(link, context), _confirm(link, context, response), self._until_ended())
            finally:
                listener.close()
                if step_listener is not None:
                    step_listener.close()
                self._links.remove(link)
                link.close()

    def _step_listener(self, link: SharedLink, own: bytes, expected: bytes) -> StepListener | None:
        watcher = self._watcher
        if watcher is None:
            return None
        return StepListener(own, expected, lambda sock: link.use_step_socket(StepSocket(sock, watcher)))

    async def _until_ended(self) -> None:
        await self._ending.wait()


class ClientLink:
    """A link that this process asked for. Use `close`."""

    def __init__(self, link: SharedLink, stream: ClientStream) -> None:
        self.link, self._stream = link, stream
        self._loops = asyncio.ensure_future(self._run())

    @property
    def closed(self) -> bool:
        """Whether either side has ended it."""
        return self.link.closed

    async def close(self) -> None:
        """End the call and unmap. Safe to call twice."""
        self._loops.cancel()
        await asyncio.wait([self._loops])
        await self._stream.close()
        self.link.close()

    async def _run(self) -> None:
        try:
            with contextlib.suppress(FlashsplitError):
                await first_done(
                    _listen(self.link, self._stream),
                    _confirm(self.link, self._stream, shared_memory_pb2.ShareMemoryRequest),
                )
        finally:
            # The other process is gone, or wants no more.
            self.link.close()


async def open_link(
    channel: grpc.aio.Channel, address: str, watcher: Watcher | None = None, guard: Guard = unguarded
) -> ClientLink:
    """Share memory with the process at the other end of a channel.

    watcher: the thread to which its steps may come directly, None where they may not. guard: of the call for as long
    as which the memory is shared. Raises FailedPrecondition where
    the two processes cannot share memory.
    """
    if not available():
        raise FailedPrecondition("this system has no anonymous files to share memory by", reason="NOT_SHARED")
    own = _own()
    stream = ClientStream(pb_grpc.SharedMemoryServiceStub(channel).ShareMemory(), address=address)
    guard(stream)
    try:
        await stream.send(shared_memory_pb2.ShareMemoryRequest(segment=_to_message(own.offer)))
        response = await stream.read()
        if response is grpc.aio.EOF:
            raise Unavailable(f"{address} shares no memory", address=address)
        link = _link(response.opened.link_id, own, response.opened.segment)
    except BaseException:
        stream.cancel()
        own.close()
        raise
    opened, nonces = response.opened, {"own": response.opened.segment.nonce, "expected": own.offer.nonce}
    try:
        if opened.HasField("socket"):
            link.use_frame_socket(await connect_frames(opened.socket, **nonces))
        if opened.HasField("step_socket") and watcher is not None:
            link.use_step_socket(StepSocket(await connect_steps(opened.step_socket, **nonces), watcher))
    except FailedPrecondition as error:
        log.info("frame_socket.none", address=address, why=error.message)
    except BaseException:
        stream.cancel()
        link.close()
        raise
    return ClientLink(link, stream)


def _own() -> OwnSegment:
    try:
        return OwnSegment(SEGMENT_BYTES)
    except OSError as error:
        raise FailedPrecondition(f"no memory to share: {error}", reason="NOT_SHARED") from error


def _link(link_id: int, own: OwnSegment, message: shared_memory_pb2.SharedSegment) -> SharedLink:
    try:
        offer = SegmentOffer(message.process_id, message.descriptor, message.size_bytes, message.nonce)
        return SharedLink(link_id, own, PeerSegment(offer))
    except BaseException:
        own.close()
        raise


def _to_message(offer: SegmentOffer) -> shared_memory_pb2.SharedSegment:
    return shared_memory_pb2.SharedSegment(
        process_id=offer.process_id,
        descriptor=offer.descriptor,
        size_bytes=offer.size_bytes,
        nonce=offer.nonce,
    )


async def _listen(link: SharedLink, stream: Any) -> None:
    """Free what the other side has read, until it ends the call."""
    while (frame := await stream.read()) is not grpc.aio.EOF:
        if frame.WhichOneof("frame") != "consumed":
            raise InvalidArgument("only consumed may follow the first frame", field="frame")
        link.release(frame.consumed.sequences, frame.consumed.transfer_ids)


async def _confirm(link: SharedLink, stream: Any, message: Any) -> None:
    """Tell the other side what was read here, for as long as the call lasts."""
    send = stream.send if isinstance(stream, ClientStream) else stream.write
    while True:
        consumed = await link.next_consumed()
        await send(
            message(
                consumed=shared_memory_pb2.SharedConsumed(
                    sequences=consumed.sequences, transfer_ids=consumed.transfer_ids
                )
            )
        )
