"""Refuses messages of too many parts before they are parsed.

The parser lets nothing else run until it has made all parts of a message, and a part may take two bytes: for 4 MiB of
them that is a tenth of a second or more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from services.errors import InvalidArgument, answering
from services.text_threads import on_text_thread

MAX_PARTS = 1 << 16
"""Most fields and list items of one message. Numbers of one list are one part: protobuf writes them in a row."""

SHORT_BYTES = 16 << 10
"""A message up to this size has no more parts than are parsed at once."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_NUMBER_BITS = 70
"""Of the longest number."""


class BoundParts(grpc.aio.ServerInterceptor):
    """Refuses requests of more than MAX_PARTS parts with INVALID_ARGUMENT.

    Handlers behind it must take a single request as bytes, as those of `RefuseGarbage` do. Streams of requests are not
    looked at: strangers have none but that of reflection, whose requests have no lists.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        method = descriptor_pool.Default().FindMethodByName(details.method.removeprefix("/").replace("/", "."))
        behaviour = handler.unary_stream or handler.unary_unary

        async def answer(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            if len(raw) > SHORT_BYTES:
                async with answering(context):
                    await on_text_thread(len(raw), check_parts, raw, method.input_type)
            return await behaviour(raw, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, None, handler.response_serializer)


def check_parts(raw: bytes, kind: Descriptor, most: int = MAX_PARTS) -> None:
    """Raise InvalidArgument for the bytes of a message of this kind that has more than so many parts.

    Bytes that are no message are left to the parser, which refuses them no later than here the reading ends.
    """
    at, end, parts = 0, len(raw), 0
    outer: list[tuple[int, int, Descriptor]] = []
    with contextlib.suppress(IndexError):
        while True:
            while at >= end:
                if not outer:
                    return
                at, end, kind = outer.pop()
            parts += 1
            if parts > most:
                raise InvalidArgument(
                    f"the request has more than {most} fields and list items: send fewer messages or strings"
                )
            tag, at = _number(raw, at)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _number(raw, at)
            elif wire_type == _FIXED64:
                at += 8
            elif wire_type == _FIXED32:
                at += 4
            elif wire_type == _BYTES:
                size, at = _number(raw, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is None or field.message_type is None:
                    at += size
                else:
                    outer.append((at + size, end, kind))
                    end, kind = at + size, field.message_type


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, seven bits a byte, and the place behind it.

    Raises IndexError where it does not end within the bytes, or not as soon as numbers do.
    """
    value = 0
    for shift in range(0, _NUMBER_BITS, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError
