"""A gRPC server with what every flashsplit process has: health, reflection, bounded messages, clean shutdown.

It owns the listening socket and nothing of the engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.addresses import parse_address, socket_path
from services.errors import Unavailable
from services.net.channel import SERVER_OPTIONS
from services.net.cluster_token import RequireToken
from services.net.health_port import HealthPort
from services.net.interceptors import RefuseGarbage
from services.net.listening import listen
from services.net.reflection import enable_reflection
from services.net.revocation import RefuseRevoked
from services.net.security import OPEN, Security

Registration = Callable[[grpc.aio.Server], str]
"""Adds a servicer to a server and returns the service's full name."""


class Server:
    """A server for other processes of the cluster; its attribute `address` says where it listens once it is started.

    address: where to listen, with port 0 for a free one. health_port: the TCP port on which health checks are answered
    too, without TLS; 0 for no such port.
    """

    def __init__(
        self,
        address: str,
        registrations: Iterable[Registration],
        *,
        security: Security = OPEN,
        health_port: int = 0,
    ) -> None:
        self._requested = parse_address(address, "--listen")
        self.address = self._requested
        tcp = socket_path(self._requested) is None
        self._credentials = security.tls.for_server() if tcp and security.tls is not None else None
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if tcp and (tls := security.tls) is not None:
            interceptors.append(RefuseRevoked(lambda: tls.revocations, lambda: self.address))
        if security.token is not None:
            interceptors.append(RequireToken(security.token, lambda: self.address))
        interceptors.append(RefuseGarbage(lambda: self.address, require_checksums=tcp))
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = [register(self._server) for register in registrations]
        enable_reflection([*self._services, health.SERVICE_NAME], self._server)
        self._health_port = None if not health_port else HealthPort(self._requested, health_port, self._health)

    async def start(self) -> None:
        """Listen. Raises Unavailable when the address is taken or cannot be bound."""
        path = socket_path(self._requested)
        if path is not None and _answers(path):
            # gRPC would take the socket away from the process that listens on it.
            raise Unavailable(f"cannot listen on {self._requested}: another process does", address=self._requested)
        try:
            with _private_files():
                port = listen(self._server, self._requested, self._credentials)
        except OSError as error:
            why = "the address is in use or not of this host" if path is None else "no socket can be made at this path"
            raise Unavailable(f"cannot listen on {self._requested}: {why}", address=self._requested) from error
        if path is None:
            self.address = f"{self._requested.rpartition(':')[0]}:{port}"
        await self._server.start()
        if self._health_port is not None:
            try:
                await self._health_port.start()
            except Unavailable:
                await self._server.stop(0)
                raise
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """Set what `grpc.health.v1` answers for the process and for each of its services."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for service in ["", *self._services]:
            await self._health.set(service, value)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s` seconds, cut the rest; gRPC removes the socket."""
        await self._server.stop(grace_s)
        if self._health_port is not None:
            await self._health_port.stop()

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        await self._server.wait_for_termination()


def _answers(path: str) -> bool:
    """Tell whether a process listens on a socket file; a killed process leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (BlockingIOError, PermissionError):
            # The queue of its connections is full, or it is another user's.
            return True
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Make files that the block creates, sockets among them, private to this user from their first moment."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
