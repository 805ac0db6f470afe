"""A second port that answers grpc.health.v1 and nothing else, without TLS.

Probes such as those of Kubernetes carry neither certificates nor tokens.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from services.addresses import socket_path
from services.errors import Unavailable
from services.net.channel import SERVER_OPTIONS
from services.net.listening import listen


class HealthPort:
    """Serves a server's health service on a port of the host on which the server listens.

    beside: the server's address; beside a Unix socket the port is on 127.0.0.1. servicer: the server's own.
    """

    def __init__(self, beside: str, port: int, servicer: health.aio.HealthServicer) -> None:
        host = "127.0.0.1" if socket_path(beside) is not None else beside.rpartition(":")[0]
        self.address = f"{host}:{port}"
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)

    async def start(self) -> None:
        """Listen. Raises Unavailable when the port is taken."""
        try:
            listen(self._server, self.address, None)
        except OSError as error:
            raise Unavailable(
                f"--health-port: cannot listen on {self.address}: the address is in use or not of this host",
                address=self.address,
            ) from error
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening at once: probes have heard by then that the server does not serve."""
        await self._server.stop(0)
