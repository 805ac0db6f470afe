"""The gRPC server for clients: the inference service over an engine, and its health."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from coordinator.api.api_keys import ApiKeys
from coordinator.api.grpc.inference_port import EnginePort
from coordinator.engine.engine import Engine
from services.net.client_server import CLIENT_TIMEOUT_S, ClientServer
from services.net.client_tls import ClientTls
from services.rpc.inference import InferenceServicer

HEALTH_PERIOD_S = 0.25
"""Between two looks at whether the engine is ready."""

GRACE_S = 2.0
"""How long answers and errors may take to reach their clients when the server stops."""


class GrpcServer:
    """Listens between entering and leaving an `async with`, and answers once there is an engine (`serve`).

    The engine must be drained before the server stops.
    """

    def __init__(
        self,
        keys: ApiKeys,
        host: str,
        port: int,
        tls: ClientTls | None,
        *,
        access_log: bool = True,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> None:
        """access_log: whether each request has a line in the log. client_timeout_s: an answer ends whose client takes
        nothing for so long."""
        self._access_log, self._client_timeout_s = access_log, client_timeout_s
        self._server = ClientServer(host, port, keys.check, tls)
        self._engine: Engine | None = None
        self._servicer: InferenceServicer | None = None
        self._health: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The host and port on which the server listens."""
        return self._server.address

    async def __aenter__(self) -> GrpcServer:
        """Start to listen: calls wait until there is an engine. Raises Unavailable when the port is taken."""
        self._server.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def serve(self, engine: Engine) -> None:
        """Answer calls by an engine from now on."""
        self._engine = engine
        self._servicer = InferenceServicer(
            EnginePort(engine), access_log=self._access_log, client_timeout_s=self._client_timeout_s
        )
        await self._server.start([self._servicer.register])
        self._health = asyncio.ensure_future(self._follow_health(engine))

    async def stop(self) -> None:
        """Stop: requests that still run fail as "shutting down", finished answers reach their clients first.

        May be called twice.
        """
        if self._health is not None:
            self._health.cancel()
            await asyncio.wait([self._health])
            await self._server.set_serving(False)
        if self._engine is not None and self._servicer is not None:
            load = self._engine.load
            if load.running + load.waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        await self._servicer.end_all()
        await self._server.stop(GRACE_S)

    async def _follow_health(self, engine: Engine) -> None:
        """Keep the health service as the engine is: NOT_SERVING while it drains and after a worker was lost."""
        serving = None
        while True:
            if serving is not engine.ready:
                serving = engine.ready
                await self._server.set_serving(serving)
            await asyncio.sleep(HEALTH_PERIOD_S)
