"""The gRPC server that clients talk to: it asks for their API key, bounds messages, and offers health and reflection.

Unlike `services.net.server` it listens on TCP for strangers, with a certificate of its own, and knows nothing of the
cluster's certificates and token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.addresses import parse_address
from services.errors import Unavailable, answering
from services.net.channel import SERVER_OPTIONS
from services.net.client_tls import ClientTls
from services.net.interceptors import RefuseGarbage
from services.net.listening import listen
from services.net.message_parts import BoundParts
from services.net.reflection import enable_reflection
from services.net.revocation import RefuseRevoked
from services.net.server import Registration

CheckKey = Callable[[str, str], object]
"""Checks the values of the headers `authorization` and `x-api-key`, empty where absent; raises Unauthenticated."""

CLIENT_TIMEOUT_S = 60.0
"""How long a client may leave untaken what a server has written to it, unless told otherwise."""

MAX_REQUEST_BYTES = 4 << 20
"""Most bytes of a request; a larger one takes long to parse, and no model's context holds so much text."""

_OPEN_SERVICE = f"/{health.SERVICE_NAME}/"


_OPTIONS = [*dict(SERVER_OPTIONS, **{"grpc.max_receive_message_length": MAX_REQUEST_BYTES}).items()]


class RequireKey(grpc.aio.ServerInterceptor):
    """Ends every call without a valid key before a byte of its request is read; only health checks need none."""

    def __init__(self, check: CheckKey) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(_OPEN_SERVICE):
            return await continuation(details)
        # Of a header that is there twice the last one counts.
        headers = {key: str(value) for key, value in details.invocation_metadata}
        try:
            self._check(headers.get("authorization", ""), headers.get("x-api-key", ""))
        except Exception as error:
            return _refusing(error)
        return await continuation(details)


class ClientServer:
    """Listens on a port of a host, 0 for a free one; its attribute `address` says where once it listens."""

    def __init__(self, host: str, port: int, check_key: CheckKey, tls: ClientTls | None = None) -> None:
        self.address = parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "--host")
        self._tls = tls
        interceptors = [RequireKey(check_key), BoundParts(), RefuseGarbage()]
        if tls is not None:
            interceptors.insert(0, RefuseRevoked(lambda: tls.revocations, lambda: self.address))
        self._server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._services: list[str] = []

    def listen(self) -> None:
        """Take the port; calls wait until `start`. Raises Unavailable when it is taken or the host is another one's."""
        try:
            port = listen(self._server, self.address, None if self._tls is None else self._tls.for_server())
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {self.address} for gRPC: it is in use or not of this host; choose another "
                "--grpc-port, or --no-grpc",
                field="--grpc-port",
            ) from error
        self.address = f"{self.address.rpartition(':')[0]}:{port}"

    async def start(self, registrations: Sequence[Registration]) -> None:
        """Answer calls of these services, of health and of reflection, at the port that `listen` has taken."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = [register(self._server) for register in registrations]
        enable_reflection([*self._services, health.SERVICE_NAME], self._server)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set what `grpc.health.v1` answers for the process and for each of its services."""
        status = health_pb2.HealthCheckResponse
        for service in ["", *self._services]:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s` seconds, and cut the rest."""
        await self._server.stop(grace_s)


def _refusing(error: Exception) -> grpc.RpcMethodHandler:
    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            raise error

    # A stream's handler reads the requests itself, so this one fits calls of every shape.
    return grpc.stream_stream_rpc_method_handler(refuse)
