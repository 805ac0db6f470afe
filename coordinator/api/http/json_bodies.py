"""Reads the bodies of requests: strict JSON, and a refusal that says what is wrong with anything else.

Python's own reader lets through what JSON does not have (NaN, infinity) and what UTF-8 cannot write (half of a
surrogate pair); both would break replies that repeat them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from services.errors import InvalidArgument


class JsonRoute(APIRoute):
    """A route whose body, where it has one, is read strictly before FastAPI looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def read_first(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            read.value = read_json(request.headers.get("content-type", ""), await read.body())
            return await handler(read)

        return read_first


class _JsonRequest(Request):
    """A request whose body has been read already."""

    value: Any = None

    async def json(self) -> Any:
        """Return the value that was read."""
        return self.value


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
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        # What is UTF-8 can spell half of a pair only as an escape.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise InvalidArgument(r"the body escapes half of a surrogate pair (\ud800): it is no Unicode text") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from error
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it has no {constant}")
