"""CompressService: the port, the servicer and the remote client for saying what of a prompt is worth computing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc

from flashsplit.shard.v1 import compress_service_pb2 as pb, compress_service_pb2_grpc as pb_grpc
from services.errors import DataLoss, InvalidArgument, Unavailable, answering, rpc_failures_as_errors

SERVICE = pb.DESCRIPTOR.services_by_name["CompressService"].full_name
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class CompressRequest:
    """A prompt in the drafter's vocabulary, and the share of it to keep."""

    request_id: str
    fingerprint: str
    token_ids: tuple[int, ...]
    keep_ratio: float


@dataclass(frozen=True, slots=True)
class CompressProgress:
    """Layers of the drafter done, and all of them."""

    layers: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """Half-open token ranges to keep, ascending and apart."""

    kept: tuple[tuple[int, int], ...]
    forward_ns: int


class CompressPort(Protocol):
    """A drafter, here or elsewhere."""

    def compress(self, request: CompressRequest) -> AsyncGenerator[CompressProgress | Compressed]:
        """Progress, and at the end what to keep; closing it ends the work.

        Raises FailedPrecondition when no or another drafter is loaded, InvalidArgument for tokens that it doesn't have.
        """


class CompressServicer(pb_grpc.CompressServiceServicer):
    """Frames to port."""

    def __init__(self, port: CompressPort) -> None:
        self._port = port

    def register(self, server: grpc.aio.Server) -> str:
        pb_grpc.add_CompressServiceServicer_to_server(self, server)
        return SERVICE

    async def Compress(self, request: pb.CompressRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            if len(request.token_ids) > MAX_TOKENS:
                raise InvalidArgument(
                    f"token_ids has {len(request.token_ids)} tokens; at most {MAX_TOKENS} are taken", field="token_ids"
                )
            wanted = CompressRequest(
                request.request_id, request.fingerprint, tuple(request.token_ids), request.keep_ratio
            )
            async with aclosing(self._port.compress(wanted)) as events:
                async for event in events:
                    await context.write(_event_to_message(event))


class RemoteCompressor:
    """Port to frames: a drafter over a channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = pb_grpc.CompressServiceStub(channel)
        self._address = address

    async def compress(
        self,
        request: CompressRequest,
        on_progress: Callable[[CompressProgress], None] = lambda progress: None,
        *,
        timeout_s: float | None = None,
    ) -> Compressed:
        """What to keep; errors as in `CompressPort`, and DataLoss for ranges that are none of the prompt's."""
        message = pb.CompressRequest(
            request_id=request.request_id,
            fingerprint=request.fingerprint,
            token_ids=request.token_ids,
            keep_ratio=request.keep_ratio,
        )
        found = None
        call = self._stub.Compress(message, timeout=timeout_s)
        try:
            with rpc_failures_as_errors(address=self._address):
                async for response in call:
                    if response.WhichOneof("event") == "compressed":
                        found = _compressed_from_message(response.compressed, len(request.token_ids))
                    elif response.WhichOneof("event") == "progress":
                        on_progress(CompressProgress(response.progress.layers, response.progress.num_layers))
        finally:
            call.cancel()
        if found is None:
            raise Unavailable(f"{self._address} ended Compress without an answer", address=self._address)
        return found


def _event_to_message(event: CompressProgress | Compressed) -> pb.CompressResponse:
    if isinstance(event, CompressProgress):
        return pb.CompressResponse(progress=pb.CompressProgress(layers=event.layers, num_layers=event.num_layers))
    message = pb.Compressed(forward_ns=event.forward_ns)
    for first, last in event.kept:
        message.kept.add(first=first, last=last)
    return pb.CompressResponse(compressed=message)


def _compressed_from_message(message: pb.Compressed, length: int) -> Compressed:
    kept, before = [], 0
    for one in message.kept:
        if not before <= one.first < one.last <= length:
            raise DataLoss(f"kept has [{one.first}, {one.last}) of a prompt of {length} tokens", field="kept")
        kept.append((one.first, one.last))
        before = one.last
    if not kept:
        raise DataLoss("kept is empty: something is always kept", field="kept")
    return Compressed(tuple(kept), message.forward_ns)
