"""The secret that all processes of one cluster share: it is read, sent with every call and asked for by every server.

It proves that a caller may call, and encrypts nothing. Health checks are answered without it, because probes hold no
secrets. A file may hold several, so that one can take another's place while the cluster runs: the first one is sent,
all of them are taken.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.errors import InvalidArgument, Unauthenticated, answering
from services.net.channel_around import ChannelAround
from services.reread import Reread, constant

FLAG = "--cluster-token-file"
VARIABLE = "FLASHSPLIT_CLUSTER_TOKEN"

_TOKEN = re.compile(r"[!-~]{16,512}")
_HEADER = "authorization"
_OPEN_SERVICE = "/grpc.health.v1.Health/"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ClusterToken:
    """The tokens that this process knows at each moment, and the file that they come from, if they do."""

    held: Reread[tuple[str, ...]]
    file: Path | None = None

    @property
    def sent(self) -> str:
        """The token that goes with a call."""
        return self.held.content[0]

    def takes(self, shown: str) -> bool:
        """Whether a call with this header may come in; the time that it takes tells nothing of the tokens."""
        return sum(hmac.compare_digest(shown.encode(), _bearer(token).encode()) for token in self.held.content) > 0


def read_token(file: str | None) -> ClusterToken | None:
    """Return the token from the file, else from the environment, else None.

    Raises InvalidArgument, without quoting the token, when it cannot be read or is none.
    """
    if file is not None:
        return ClusterToken(Reread([Path(file)], partial(_read_file, Path(file))), Path(file))
    if VARIABLE in os.environ:
        # A variable that is set but empty is more likely a mistake than the choice of no token.
        return ClusterToken(constant(_parse(os.environ[VARIABLE].strip(), VARIABLE, VARIABLE)))
    return None


def _read_file(file: Path) -> tuple[str, ...]:
    source = f"{FLAG} {file}"
    try:
        text = file.read_text(encoding="ascii")
    except OSError as error:
        raise InvalidArgument(f"{source} cannot be read: {error.strerror}", field=FLAG) from error
    except UnicodeDecodeError:
        text = ""
    return _parse(text, source, FLAG)


def _parse(text: str, source: str, field: str) -> tuple[str, ...]:
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens or not all(map(_TOKEN.fullmatch, tokens)):
        raise InvalidArgument(
            f"{source} must hold one token of 16 to 512 visible ASCII characters, like that of openssl rand -hex 32"
            f"{', or several of them, one a line' if field == FLAG else ''}",
            field=field,
        )
    return tokens


class RequireToken(grpc.aio.ServerInterceptor):
    """Ends every call without the token, of whatever method, before a byte of its requests is read.

    name: returns where this server listens, for the error's sentence.
    """

    def __init__(self, token: ClusterToken, name: Callable[[], str]) -> None:
        self._token, self._name = token, name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(_OPEN_SERVICE):
            return await continuation(details)
        tokens = [value for key, value in details.invocation_metadata if key == _HEADER]
        if len(tokens) == 1 and self._token.takes(str(tokens[0])):
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

    def __init__(self, channel: grpc.aio.Channel, token: ClusterToken) -> None:
        super().__init__(channel)
        self._token = token

    def _calls(self, make: Callable[..., Any], *method: Any, **options: Any) -> Callable[..., Any]:
        begin = make(*method, **options)

        def call(*arguments: Any, **settings: Any) -> Any:
            return begin(*arguments, metadata=((_HEADER, _bearer(self._token.sent)),), **settings)

        return call


def _bearer(token: str) -> str:
    return f"Bearer {token}"
