"""The secret that all processes of one cluster share: it is read, sent with every call and asked for by every server.

It proves that a caller may call, and encrypts nothing. Health checks are answered without it, because probes hold no
secrets.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.errors import InvalidArgument, Unauthenticated, answering
from services.net.channel_around import ChannelAround

FLAG = "--cluster-token-file"
VARIABLE = "FLASHSPLIT_CLUSTER_TOKEN"

_TOKEN = re.compile(r"[!-~]{16,512}")
_HEADER = "authorization"
_OPEN_SERVICE = "/grpc.health.v1.Health/"

log = structlog.get_logger()


def read_token(file: str | None) -> str | None:
    """Return the token from the file, else from the environment, else None.

    Raises InvalidArgument, without quoting the token, when it cannot be read or is none.
    """
    if file is not None:
        source = f"{FLAG} {file}"
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError as error:
            raise InvalidArgument(f"{source} cannot be read: {error.strerror}", field=FLAG) from error
        except UnicodeDecodeError:
            text = ""
    elif VARIABLE in os.environ:
        # A variable that is set but empty is more likely a mistake than the choice of no token.
        source, text = VARIABLE, os.environ[VARIABLE].strip()
    else:
        return None
    if _TOKEN.fullmatch(text) is None:
        raise InvalidArgument(
            f"{source} must hold one token of 16 to 512 visible ASCII characters, like that of openssl rand -hex 32",
            field=FLAG if file is not None else VARIABLE,
        )
    return text


class RequireToken(grpc.aio.ServerInterceptor):
    """Ends every call without the token, of whatever method, before a byte of its requests is read.

    name: returns where this server listens, for the error's sentence.
    """

    def __init__(self, token: str, name: Callable[[], str]) -> None:
        self._expected, self._name = _bearer(token).encode(), name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(_OPEN_SERVICE):
            return await continuation(details)
        tokens = [value for key, value in details.invocation_metadata if key == _HEADER]
        if len(tokens) == 1 and hmac.compare_digest(str(tokens[0]).encode(), self._expected):
            return await continuation(details)
        fault = "another token" if tokens else "no token"

        async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
            log.warning("call.refused", method=details.method, peer=context.peer(), why=fault)
            async with answering(context):
                raise Unauthenticated(
                    f"the call carried {fault}, the worker at {self._name()} asks for its cluster's: give both the "
                    f"same with {FLAG} FILE or {VARIABLE}",
                    reason="TOKEN_WRONG" if tokens else "TOKEN_MISSING",
                )

        # A stream's handler reads the requests itself, so this one fits calls of every shape.
        return grpc.stream_stream_rpc_method_handler(refuse)


class TokenChannel(ChannelAround):
    """A channel whose calls all carry the token."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        super().__init__(channel)
        self._metadata = ((_HEADER, _bearer(token)),)

    def _calls(self, make: Callable[..., Any], *method: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(make(*method, **options), metadata=self._metadata)


def _bearer(token: str) -> str:
    return f"Bearer {token}"
