"""CompressService: the port, the servicer and the remote client for finding what of a prompt is worth computing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

import grpc

from flashsplit.shard.v1 import compress_service_pb2 as pb, compress_service_pb2_grpc as pb_grpc
from services.errors import Unavailable, answering
from services.messages.compression import (
    Compressed,
    CompressProgress,
    CompressRequest,
    event_from_message,
    event_to_message,
    request_from_message,
    request_to_message,
)
from services.messages.holder import CheckHolder, anybody, holder_id_of, own_holder
from services.streams.client_stream import ClientStream, Guard, unguarded

SERVICE = pb.DESCRIPTOR.services_by_name["CompressService"].full_name


class CompressPort(Protocol):
    """A drafter, in this process or in another one."""

    def compress(self, request: CompressRequest) -> AsyncGenerator[CompressProgress | Compressed]:
        """Yield progress, and at the end what to keep; closing the generator ends the work.

        Raises FailedPrecondition when no or another drafter is loaded, InvalidArgument for tokens that it doesn't have.
        """


class CompressServicer(pb_grpc.CompressServiceServicer):
    """Serves a `CompressPort` to callers in other processes."""

    def __init__(self, port: CompressPort, check_holder: CheckHolder = anybody) -> None:
        """check_holder: refuses others than the worker's holder."""
        self._port, self._check_holder = port, check_holder

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_CompressServiceServicer_to_server(self, server)
        return SERVICE

    async def Compress(self, request: pb.CompressRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            self._check_holder(holder_id_of(request))
            async with aclosing(self._port.compress(request_from_message(request))) as events:
                async for event in events:
                    await context.write(event_to_message(event))


class RemoteCompressor:
    """A drafter at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str, guard: Guard = unguarded) -> None:
        self._stub = pb_grpc.CompressServiceStub(channel)
        self._address, self._guard = address, guard

    async def compress(
        self,
        request: CompressRequest,
        on_progress: Callable[[CompressProgress], None] = lambda progress: None,
        *,
        timeout_s: float | None = None,
    ) -> Compressed:
        """Return what to keep.

        Errors as in `CompressPort`, FailedPrecondition where another process holds the worker, and DataLoss for ranges
        that are none of the prompt's.
        """
        compressed: Compressed | None = None
        message = request_to_message(request)
        message.holder_id = own_holder().holder_id
        call = self._stub.Compress(message, timeout=timeout_s)
        stream = ClientStream(call, address=self._address)
        self._guard(stream)
        try:
            while (response := await stream.read()) is not grpc.aio.EOF:
                match event_from_message(response, len(request.token_ids)):
                    case Compressed() as compressed:
                        pass
                    case CompressProgress() as progress:
                        on_progress(progress)
        finally:
            stream.cancel()
        if compressed is None:
            raise Unavailable(f"{self._address} ended Compress without an answer", address=self._address)
        return compressed
