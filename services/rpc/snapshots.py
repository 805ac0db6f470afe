"""SnapshotService: the port, the servicer and the remote client for prefix state on its way into and out of a worker.

It runs on a channel of its own, so that no step waits behind a snapshot.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

import grpc

from flashsplit.shard.v1 import (
    snapshot_pb2,
    snapshot_service_pb2 as pb,
    snapshot_service_pb2_grpc as pb_grpc,
)
from services.errors import DataLoss, InvalidArgument, Unavailable, Unimplemented, answering, rpc_failures_as_errors
from services.messages.holder import CheckHolder, anybody, holder_id_of, own_holder
from services.messages.snapshots import (
    OWNERS,
    KeptSnapshot,
    SnapshotChunk,
    SnapshotFrame,
    SnapshotHeader,
    SnapshotImported,
    SnapshotOwner,
    SnapshotTrailer,
    check_id,
    frame_from_message,
    frame_to_message,
    kept_from_message,
    kept_to_message,
)
from services.same_host.link import NO_LINKS, LinkSender, SharedLink, SharedLinks
from services.streams.client_stream import ClientStream, Guard, unguarded

SERVICE = pb.DESCRIPTOR.services_by_name["SnapshotService"].full_name


class SnapshotImport(Protocol):
    """One import on its way. Nothing is kept before `commit`; either `commit` or `abort` ends it."""

    async def write(self, chunk: SnapshotChunk) -> None:
        """Take the next bytes. Raises InvalidArgument for a gap, an overlap or an overrun."""

    async def commit(self, trailer: SnapshotTrailer) -> SnapshotImported:
        """Keep the snapshot. Raises DataLoss when bytes are missing or don't match their digests."""

    def abort(self) -> None:
        """Drop what came. Safe to call after `commit`."""


class SnapshotPort(Protocol):
    """A worker's kept prefixes."""

    def export_snapshot(
        self, owner: SnapshotOwner, snapshot_id: str, first_token: int, parent_id: str | None
    ) -> AsyncIterator[SnapshotFrame]:
        """Yield header, chunks and trailer, with the attention rows from `first_token` on, where the snapshot named by
        `parent_id` ends.

        Raises NotFound when it isn't kept.
        """

    async def import_snapshot(self, header: SnapshotHeader) -> SnapshotImport | None:
        """Begin an import; return None when the name is kept already.

        Raises InvalidArgument when the tensors aren't those of the model at hand, FailedPrecondition for another model
        or a missing parent, ResourceExhausted beyond the budget.
        """

    def list_snapshots(self) -> Sequence[KeptSnapshot]:
        """Return all kept states of all owners, each behind what it builds on."""

    async def free_snapshots(self, snapshot_ids: Sequence[str]) -> int:
        """Drop kept states, unless longer ones build on them, and return the number of bytes freed."""


class SnapshotServicer(pb_grpc.SnapshotServiceServicer):
    """Serves a `SnapshotPort` to callers in other processes."""

    def __init__(self, port: SnapshotPort, links: SharedLinks = NO_LINKS, check_holder: CheckHolder = anybody) -> None:
        """links: the memory that callers share with this process. check_holder: refuses others than the worker's
        holder."""
        self._port, self._links, self._check_holder = port, links, check_holder

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_SnapshotServiceServicer_to_server(self, server)
        return SERVICE

    async def PrefixSnapshotExport(
        self, request: snapshot_pb2.PrefixSnapshotExportRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with answering(context):
            self._check_holder(holder_id_of(request))
            owner, snapshot_id = OWNERS.value(request.owner, "owner"), check_id(request.snapshot_id)
            parent_id = check_id(request.parent_id, "parent_id") if request.HasField("parent_id") else None
            sender = None
            if request.link_id:
                # The sender outlives this call, whose last chunks may be unread when it ends: the caller says when.
                sender = self._links.get(request.link_id).transfer(request.transfer_id)
            async for frame in self._port.export_snapshot(owner, snapshot_id, request.first_token, parent_id):
                response = snapshot_pb2.PrefixSnapshotExportResponse()
                frame_to_message(frame, response, sender)
                await context.write(response)

    async def PrefixSnapshotImport(self, _: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            imported = await self._import(context)
            response = snapshot_pb2.PrefixSnapshotImportResponse()
            response.imported.stored_bytes = imported.stored_bytes
            response.imported.evicted_ids.extend(imported.evicted_ids)
            await context.write(response)

    async def SnapshotList(self, request: snapshot_pb2.SnapshotListRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            self._check_holder(holder_id_of(request))
            for kept in self._port.list_snapshots():
                await context.write(kept_to_message(kept))

    async def SnapshotFree(
        self, request: snapshot_pb2.SnapshotFreeRequest, context: grpc.aio.ServicerContext
    ) -> snapshot_pb2.SnapshotFreeResponse:
        async with answering(context):
            self._check_holder(holder_id_of(request))
            freed = await self._port.free_snapshots(request.snapshot_ids)
            return snapshot_pb2.SnapshotFreeResponse(freed_bytes=freed)
        raise AssertionError("answering() always ends the call")

    async def _import(self, context: grpc.aio.ServicerContext) -> SnapshotImported:
        request = await self._read(context)
        self._check_holder(holder_id_of(request))
        header = frame_from_message(request, self._links)
        if not isinstance(header, SnapshotHeader):
            raise InvalidArgument("the first frame of an import must be the header", field="frame")
        incoming = await self._port.import_snapshot(header)
        if incoming is None:
            return SnapshotImported(0)
        try:
            go_on = snapshot_pb2.PrefixSnapshotImportResponse(wanted=snapshot_pb2.PrefixSnapshotWanted())
            await context.write(go_on)
            while not isinstance(frame := await self._read_frame(context), SnapshotTrailer):
                if not isinstance(frame, SnapshotChunk):
                    raise InvalidArgument("a second header came where a chunk or the trailer was due", field="frame")
                await incoming.write(frame)
            return await incoming.commit(frame)
        finally:
            incoming.abort()

    async def _read_frame(self, context: grpc.aio.ServicerContext) -> SnapshotFrame:
        return frame_from_message(await self._read(context), self._links)

    @staticmethod
    async def _read(context: grpc.aio.ServicerContext) -> snapshot_pb2.PrefixSnapshotImportRequest:
        request = await context.read()
        if request is grpc.aio.EOF:
            raise InvalidArgument("the import ended without its trailer", field="frame")
        return request


def _request(frame: SnapshotFrame, sender: LinkSender | None) -> snapshot_pb2.PrefixSnapshotImportRequest:
    request = snapshot_pb2.PrefixSnapshotImportRequest()
    if isinstance(frame, SnapshotHeader):
        request.holder_id = own_holder().holder_id
    frame_to_message(frame, request, sender)
    return request


class RemoteSnapshots:
    """The kept prefixes of a worker at the other end of a channel.

    Every call raises FailedPrecondition where another process holds the worker.
    """

    def __init__(
        self, channel: grpc.aio.Channel, address: str, link: SharedLink | None = None, guard: Guard = unguarded
    ) -> None:
        """link: memory shared with the worker there."""
        self._stub = pb_grpc.SnapshotServiceStub(channel)
        self._address, self._link, self._guard = address, link, guard
        self._links = SharedLinks() if link is None else SharedLinks(link)

    async def export_snapshot(
        self, owner: SnapshotOwner, snapshot_id: str, first_token: int = 0, parent_id: str | None = None
    ) -> AsyncGenerator[SnapshotFrame]:
        """Yield a kept state's frames, as the port says."""
        request = snapshot_pb2.PrefixSnapshotExportRequest(
            snapshot_id=snapshot_id, owner=OWNERS.number(owner), first_token=first_token, parent_id=parent_id
        )
        request.holder_id = own_holder().holder_id
        if self._link is not None:
            request.link_id, request.transfer_id = self._link.link_id, self._link.begin_transfer()
        stream = ClientStream(self._stub.PrefixSnapshotExport(request), address=self._address)
        self._guard(stream)
        try:
            while (response := await stream.read()) is not grpc.aio.EOF:
                yield frame_from_message(response, self._links)
        finally:
            stream.cancel()
            if self._link is not None:
                self._link.end_transfer(request.transfer_id)

    async def import_snapshot(self, frames: AsyncIterator[SnapshotFrame]) -> SnapshotImported:
        """Send a whole snapshot, and return what it left. Errors as the port's, and whatever reading `frames` raises.

        Raises DataLoss when `frames` ends without a trailer.
        """
        stream = ClientStream(self._stub.PrefixSnapshotImport(), address=self._address)
        self._guard(stream)
        sender = None if self._link is None else self._link.sender()
        try:
            await stream.send(_request(await anext(frames), None))
            response = await stream.read()
            if response is not grpc.aio.EOF and response.WhichOneof("result") == "wanted":
                async for frame in frames:
                    if not await stream.send(_request(frame, sender)) or isinstance(frame, SnapshotTrailer):
                        break
                else:
                    raise DataLoss("the prefix ended without its trailer", address=self._address)
                response = await stream.read()
            if response is grpc.aio.EOF:
                raise Unavailable(f"{self._address} ended an import without a word", address=self._address)
            if response.WhichOneof("result") != "imported":
                raise InvalidArgument(
                    f"{self._address} answered the end of an import without saying what it left: expected imported",
                    field="result",
                )
            imported = response.imported
            return SnapshotImported(imported.stored_bytes, tuple(imported.evicted_ids))
        finally:
            stream.cancel()
            if sender is not None:
                sender.close()

    async def list_snapshots(self) -> list[KeptSnapshot]:
        """Return all kept states, as the port says; none where the worker is of a release that does not tell."""
        request = snapshot_pb2.SnapshotListRequest(holder_id=own_holder().holder_id)
        stream = ClientStream(self._stub.SnapshotList(request), address=self._address)
        self._guard(stream)
        found: list[KeptSnapshot] = []
        try:
            while (response := await stream.read()) is not grpc.aio.EOF:
                found.append(kept_from_message(response))
        except Unimplemented:
            return []
        finally:
            stream.cancel()
        return found

    async def free_snapshots(self, snapshot_ids: Sequence[str]) -> int:
        """Drop kept states, as the port says."""
        with rpc_failures_as_errors(address=self._address):
            request = snapshot_pb2.SnapshotFreeRequest(snapshot_ids=snapshot_ids, holder_id=own_holder().holder_id)
            return (await self._stub.SnapshotFree(request)).freed_bytes
