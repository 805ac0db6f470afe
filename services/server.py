"""A gRPC server with what every flashsplit process has: health, reflection, bounded messages, clean shutdown.

Owns the listening socket and nothing of the engine.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.addresses import parse_address, socket_path
from services.channel import SERVER_OPTIONS
from services.errors import Unavailable

Registration = Callable[[grpc.aio.Server], str]
"""Adds a servicer to a server and returns the service's full name."""


class Server:
    """A listening server; `address` is where peers reach it (a free port is filled in)."""

    def __init__(self, address: str, registrations: Iterable[Registration]) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = [register(self._server) for register in registrations]
        reflection.enable_server_reflection(
            [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        self._requested = parse_address(address, "--listen")
        self.address = self._requested

    async def start(self) -> None:
        """Listen. Raises Unavailable when the address is taken or cannot be bound."""
        path = socket_path(self._requested)
        if path is not None:
            _remove_stale_socket(path)
        try:
            port = self._server.add_insecure_port(self._requested)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {self._requested}: the address is in use or not of this host",
                address=self._requested,
            ) from error
        if path is not None:
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        else:
            self.address = f"{self._requested.rpartition(':')[0]}:{port}"
        await self._server.start()
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """What `grpc.health.v1` answers, for the process and for each of its services."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for service in ["", *self._services]:
            await self._health.set(service, value)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s`, cut the rest, remove the socket."""
        await self._server.stop(grace_s)
        path = socket_path(self._requested)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


def _remove_stale_socket(path: str) -> None:
    """A socket file that nobody listens on is left over from a killed process."""
    import socket

    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
