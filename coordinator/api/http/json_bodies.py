"""Reads the bodies of requests: strict JSON, and a refusal that says what is wrong with anything else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from coordinator.text.bounded_json import TooMuchJson, parse_json
from services.errors import InvalidArgument
from services.text_threads import on_text_thread

SHORT_BYTES = 16 << 10
"""Bodies up to this size are read at once, which takes less time than a thread's answer."""


class JsonRoute(APIRoute):
    """A route whose body, where it has one, is read strictly before FastAPI looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def read_first(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            await read.read()
            return await handler(read)

        return read_first


class _JsonRequest(Request):
    """A request whose body is read once, and whose bytes are not kept."""

    _value: Any = None

    async def read(self) -> None:
        """Read the body. Raises InvalidArgument as `read_json` does."""
        body = b"".join([piece async for piece in self.stream()])
        kind = self.headers.get("content-type", "")
        if len(body) <= SHORT_BYTES:
            self._value = read_json(kind, body)
        else:
            self._value = await on_text_thread(len(body), read_json, kind, body)

    async def body(self) -> bytes:
        """Return some bytes, for FastAPI, which looks whether there are any."""
        return b"{}"

    async def json(self) -> Any:
        """Return the value that was read."""
        return self._value


def read_json(content_type: str, body: bytes) -> Any:
    """Return a body's value. Raises InvalidArgument for another content type, an empty body and one that isn't JSON."""
    header = Message()
    header["content-type"] = content_type
    kind = header.get_content_type() if content_type else "missing"
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidArgument(f"the body's content-type is {kind}: send JSON as application/json")
    if not body:
        raise InvalidArgument("the body is empty: send a JSON object")
    try:
        return parse_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise InvalidArgument(r"the body escapes half of a surrogate pair (\ud800): it is no Unicode text") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error
    except TooMuchJson as error:
        raise InvalidArgument(f"the body is more than this server reads: {error}") from error
    except ValueError as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from error
