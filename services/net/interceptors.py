"""What every server does to every call before its servicer sees it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.errors import DataLoss, FlashsplitError, InvalidArgument, answering
from services.net.checksums import Checksums, call_number

Parse = Callable[[bytes], Any]


class RefuseGarbage(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message of the method's type with INVALID_ARGUMENT; gRPC itself would say UNKNOWN.

    In calls with checksums it refuses messages that do not match theirs with DATA_LOSS, and adds those of answers.
    """

    def __init__(self, name: Callable[[], str] = str, *, require_checksums: bool = False) -> None:
        """name: returns where the server listens, for errors. require_checksums: whether calls of other processes of
        the cluster without checksums are refused, as they are where damaged bytes could come in."""
        self._name, self._require_checksums = name, require_checksums

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        where, checksums = self._name(), None
        try:
            call = call_number(details.method, details.invocation_metadata, where, required=self._require_checksums)
        except FlashsplitError as error:
            return _refusal(error)
        if call is not None:
            name = f"a call of {details.method.rpartition('/')[2]} to the worker at {where}"
            checksums = Checksums(call, name, server=True)
        parse = _refusing(handler.request_deserializer, details.method, checksums)
        serialize = handler.response_serializer
        if checksums is not None:
            serialize = checksums.adding(serialize)
        if handler.stream_stream is not None:
            # The error is raised by the servicer's read().
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, parse, serialize)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_parsing(handler.unary_stream, parse), None, serialize)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_parsing(handler.unary_unary, parse), None, serialize)
        return handler


def _refusal(refused: FlashsplitError) -> grpc.RpcMethodHandler:
    """Return a handler that ends a call with this error, whatever its shape: a stream's reads the requests itself."""

    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            raise refused

    return grpc.stream_stream_rpc_method_handler(refuse)


def _refusing(parse: Parse, method: str, checksums: Checksums | None) -> Parse:
    def parse_or_refuse(raw: bytes) -> Any:
        try:
            return parse(raw if checksums is None else checksums.check(raw))
        except DataLoss:
            raise
        except Exception as error:
            raise InvalidArgument(f"a request of {method} could not be parsed", reason="GARBLED") from error

    return parse_or_refuse


def _parsing(behaviour: Callable[..., Any], parse: Parse) -> Callable[..., Awaitable[Any]]:
    """Return a handler that takes bytes, as gRPC would parse a single request before any code that can answer."""

    async def answer(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
        async with answering(context):
            request = parse(raw)
        if not inspect.isasyncgenfunction(behaviour):
            return await behaviour(request, context)
        async for response in behaviour(request, context):
            await context.write(response)
        return None

    return answer
