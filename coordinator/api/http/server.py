"""The HTTP server for clients: the application on a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from coordinator.api.http.client_connection import ClientConnection, ConnectionConfig
from services.errors import Unavailable
from services.net.client_server import CLIENT_TIMEOUT_S
from services.net.client_tls import ClientTls
from services.net.revocation import Revocations

GRACE_S = 5
"""How long last bytes may take to reach their clients when the server stops."""

MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's line and headers."""


# uvicorn says it in a bare line of its own when it cannot listen; HttpServer raises that in words.
logging.getLogger("uvicorn.error").addFilter(lambda record: not isinstance(record.msg, OSError))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the command that starts the server decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class HttpServer:
    """Serves clients between entering and leaving an `async with`. The engine must be drained before it is left."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, tls: ClientTls | None, *, client_timeout_s: float = CLIENT_TIMEOUT_S
    ) -> None:
        """client_timeout_s: a connection ends on which what was written is not taken for so long."""
        self._host, self._port, self._tls = host, port, tls
        config = ConnectionConfig(
            app,
            http=ClientConnection,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_context_factory=None if tls is None else lambda *_: tls.for_sockets(),
        )
        config.client_timeout_s = client_timeout_s
        config.revocations = Revocations if tls is None else lambda: tls.revocations
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def __aenter__(self) -> HttpServer:
        """Start to listen. Raises Unavailable when the port cannot be had."""
        self._serving = asyncio.ensure_future(self._serve())
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self._serving
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Take no more requests and end when those that run have ended, or GRACE_S later. May be called twice."""
        assert self._serving is not None
        self._server.should_exit = True
        await self._serving

    async def _serve(self) -> None:
        try:
            await self._server.serve()
        except SystemExit as error:
            # How uvicorn says that it cannot listen.
            raise Unavailable(
                f"cannot listen on {self._host}:{self._port}: it is in use or not of this host; choose another --port",
                field="--port",
            ) from error
