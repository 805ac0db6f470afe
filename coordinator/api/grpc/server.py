"""The gRPC door: the inference service over an engine, open from entering to leaving it, healthy while it answers."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from coordinator.api.api_keys import ApiKeys
from coordinator.api.grpc.inference_port import EnginePort
from coordinator.engine.engine import Engine
from services.net.client_server import ClientServer
from services.net.client_tls import ClientTls
from services.rpc.inference import InferenceServicer

HEALTH_PERIOD_S = 0.25
GRACE_S = 2.0
"""For last words to reach clients when the door closes."""


class GrpcDoor:
    """Use as `async with`; `address` is where it listens. Drain the engine before leaving."""

    def __init__(self, engine: Engine, keys: ApiKeys, host: str, port: int, tls: ClientTls | None) -> None:
        self._engine = engine
        self._servicer = InferenceServicer(EnginePort(engine))
        self._server = ClientServer(host, port, [self._servicer.register], keys.check, tls)
        self._health: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._server.address

    async def __aenter__(self) -> GrpcDoor:
        """Raises Unavailable when the port is taken."""
        await self._server.start()
        self._health = asyncio.ensure_future(self._tell_health())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What still runs is told that the server is shutting down; answers that are done reach their clients."""
        assert self._health is not None
        self._health.cancel()
        await asyncio.wait([self._health])
        await self._server.set_serving(False)
        load = self._engine.load
        if load.running + load.waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._servicer.end_all()
        await self._server.stop(GRACE_S)

    async def _tell_health(self) -> None:
        """Health follows the engine: NOT_SERVING while it drains and when a worker is lost."""
        told = None
        while True:
            if told is not self._engine.ready:
                told = self._engine.ready
                await self._server.set_serving(told)
            await asyncio.sleep(HEALTH_PERIOD_S)
