"""One client's connection: what is written to it and not taken for too long ends it, and with it the request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import structlog
import uvicorn
from cryptography import x509
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.net.revocation import Revocations

SEND_BUFFER_BYTES = 128 << 10
"""What the system keeps of unread text for one connection; left to itself it would take 4 MiB."""

log = structlog.get_logger()


class ConnectionConfig(uvicorn.Config):
    """uvicorn's settings, how long a client may leave unread what is written to it, and what returns the clients'
    certificates that do not count any more; see `uvicorn.Config`."""

    client_timeout_s: float
    revocations: Callable[[], Revocations]


class ClientConnection(H11Protocol):
    """uvicorn's connection, which would keep a request whose client reads nothing for as long as the client likes.

    Bytes that the system does not take hold up the next piece of an answer, so at most one piece waits in memory.
    """

    config: ConnectionConfig
    _cut_off: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if self._is_revoked(transport):
            log.warning("http.client_refused", client=self.client, why="revoked certificate")
            transport.abort()
            return
        # Not 0, with which asyncio's TLS would pause for ever.
        transport.set_write_buffer_limits(high=1, low=0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the system has no more room for what this client does not read."""
        super().pause_writing()
        self._cut_off = self.loop.call_later(self.config.client_timeout_s, self._cut)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`: all that was written is with the system."""
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._keep()

    def _is_revoked(self, transport: asyncio.Transport) -> bool:
        revocations, tls = self.config.revocations(), transport.get_extra_info("ssl_object")
        shown = tls.getpeercert(binary_form=True) if revocations and tls is not None else None
        return shown is not None and x509.load_der_x509_certificate(shown) in revocations

    def _keep(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
            self._cut_off = None

    def _cut(self) -> None:
        log.info("http.client_does_not_read", client=self.client, seconds=self.config.client_timeout_s)
        # A plain close would wait for the client.
        self.transport.abort()
