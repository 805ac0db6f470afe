"""The plain port for probes: health and nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.errors import FlashsplitError, Unavailable
from services.net.channel import connect
from services.net.security import OPEN, Security
from services.net.server import Server
from services.rpc import worker
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.fakes import WORKER, FakeWorker
from tests.services.net.certificates import Certificates


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def status(channel: grpc.aio.Channel, service: str = "") -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@pytest.mark.parametrize("listen", ["tcp", "unix"])
async def test_it_answers_probes_and_nothing_else(listen: str, tmp_path: Path) -> None:
    """Without certificate or token: the same health as behind them, no other service, no reflection."""
    security = Certificates(tmp_path / "tls").security(token="0123456789abcdef")
    port = free_port()
    address = "127.0.0.1:0" if listen == "tcp" else f"unix:{tmp_path}/a.sock"
    server = Server(address, [WorkerServicer(FakeWorker()).register], security=security, health_port=port)
    await server.start()
    try:
        probe = await connect(f"127.0.0.1:{port}", timeout_s=5)
        assert await status(probe) == await status(probe, worker.SERVICE) == "SERVING"
        with pytest.raises(FlashsplitError) as raised:
            await RemoteWorker(probe, "probe").describe()
        assert raised.value.code_name == "UNIMPLEMENTED"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await probe.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(b"")
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.set_serving(False)
        assert await status(probe) == "NOT_SERVING"
        await probe.close()
        inside = await connect(server.address, timeout_s=5, security=security)
        assert await RemoteWorker(inside, "inside").describe() == WORKER
        await inside.close()
    finally:
        await server.stop(0)
    with pytest.raises(Unavailable):
        await connect(f"127.0.0.1:{port}", timeout_s=0.2)


async def test_a_taken_port_is_named() -> None:
    """The flag and the address; the worker's own port is free again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server("127.0.0.1:0", [], security=Security(), health_port=taken.getsockname()[1])
        with pytest.raises(Unavailable, match="--health-port: cannot listen on 127.0.0.1:"):
            await server.start()
    with pytest.raises(Unavailable):
        await connect(server.address, timeout_s=0.2, security=OPEN)
