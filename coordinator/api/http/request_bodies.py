"""What the bodies of requests may take: bytes, time to arrive, and how many large ones arrive at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.types import Message, Receive

from coordinator.api.http.errors import HttpError, HttpRefusal
from services.text_threads import LARGE_BYTES

MIN_MAX_BYTES = 4 << 20
"""Bodies up to this size are taken whatever the context is."""

BYTES_PER_TOKEN = 32
"""Bytes of a body for each token of the context; JSON may write a character as twelve bytes."""

MAX_LARGE = 16
"""Large bodies that arrive at once; further ones wait."""

DISCARDED_BYTES = 64 << 20
"""How much of too large a body is read and thrown away, so that its client hears of the refusal."""


class RequestBodies:
    """Bounds the bodies of one server's requests.

    context: most tokens of a request. timeout_s: how long a body may take to arrive.
    """

    def __init__(self, context: int, timeout_s: float) -> None:
        self._context, self._timeout_s = context, timeout_s
        self._max_bytes = max(MIN_MAX_BYTES, BYTES_PER_TOKEN * context)
        self._large = asyncio.Semaphore(MAX_LARGE)

    @contextlib.asynccontextmanager
    async def bounded(self, request: Request, receive: Receive) -> AsyncIterator[Receive]:
        """Give the block a `receive` that raises HttpRefusal where a body goes beyond the bounds.

        Too large a body is read to its end first, as far as that is bearable: many clients read no reply before.
        """
        async with contextlib.AsyncExitStack() as arriving:
            length = request.headers.get("content-length", "")
            announced = int(length[:20]) if length.isascii() and length.isdigit() else 0
            # A body without a length comes in chunks and may become large.
            large = announced > LARGE_BYTES or "transfer-encoding" in request.headers
            received, whole, deadline = 0, False, 0.0

            async def next_message() -> Message:
                nonlocal received, whole, deadline
                if whole:
                    return await receive()
                if not deadline:
                    if large:
                        await arriving.enter_async_context(self._large)
                    deadline = asyncio.get_running_loop().time() + self._timeout_s
                try:
                    async with asyncio.timeout_at(deadline):
                        message = await receive()
                except TimeoutError:
                    raise _refusal(
                        408,
                        "request_timeout",
                        f"of the body {received} bytes arrived within {self._timeout_s:g} s: send it faster, or start "
                        "the server with a longer --client-timeout",
                    ) from None
                received += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if whole:
                    await arriving.aclose()
                return message

            async def bounded() -> Message:
                message = {} if announced > self._max_bytes else await next_message()
                if max(announced, received) > self._max_bytes:
                    with contextlib.suppress(HttpRefusal):
                        while not whole and max(announced, received) <= DISCARDED_BYTES:
                            await next_message()
                    raise _refusal(
                        413,
                        "request_too_large",
                        f"This model's maximum context length is {self._context} tokens, so a request's body may have "
                        f"{self._max_bytes} bytes. However, you sent {'' if announced else 'at least '}"
                        f"{max(announced, received)} bytes. Please reduce the length of the messages or prompt.",
                    )
                return message

            yield bounded


def _refusal(status: int, code: str, message: str) -> HttpRefusal:
    return HttpRefusal(HttpError(status, message, "invalid_request_error", code, code))
