"""What every server does to every call before its servicer sees it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.errors import InvalidArgument, answering

Parse = Callable[[bytes], Any]


class RefuseGarbage(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message of the method's type with INVALID_ARGUMENT; gRPC itself would say UNKNOWN."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = _refusing(handler.request_deserializer, details.method)
        if handler.stream_stream is not None:
            # The error is raised by the servicer's read().
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, parse, handler.response_serializer)
        if handler.unary_stream is not None:
            answer = _parsing(handler.unary_stream, parse)
            return grpc.unary_stream_rpc_method_handler(answer, None, handler.response_serializer)
        if handler.unary_unary is not None:
            answer = _parsing(handler.unary_unary, parse)
            return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)
        return handler


def _refusing(parse: Parse, method: str) -> Parse:
    def parse_or_refuse(raw: bytes) -> Any:
        try:
            return parse(raw)
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
