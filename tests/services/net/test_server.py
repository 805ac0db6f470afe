"""What every process serves, and where it listens."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.errors import InvalidArgument, Unavailable
from services.net.server import Server
from services.rpc import draft, stage, worker
from services.rpc.draft import DraftServicer
from services.rpc.stage import RemoteStage, StageServicer
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.conftest import Dial, Serve
from tests.services.fakes import OPEN, WORKER, FakeDraft, FakeStage, FakeWorker, prefill, until

SERVICES = [worker.SERVICE, stage.SERVICE, draft.SERVICE]


def registrations() -> list:
    return [
        WorkerServicer(FakeWorker()).register,
        StageServicer(FakeStage()).register,
        DraftServicer(FakeDraft()).register,
    ]


async def health(channel: grpc.aio.Channel, service: str) -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(channel).Check(request)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_health(serve: Serve, dial: Dial) -> None:
    """Health answers for the process and each service, and says NOT_SERVING while it drains; others are NOT_FOUND."""
    server = await serve(*registrations())
    channel = await dial(server.address)
    for name in ["", *SERVICES]:
        assert await health(channel, name) == "SERVING"
    await server.set_serving(False)
    for name in ["", *SERVICES]:
        assert await health(channel, name) == "NOT_SERVING"
    await server.set_serving(True)
    assert await health(channel, "") == "SERVING"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health(channel, "flashsplit.shard.v1.NoSuchService")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched(serve: Serve, dial: Dial) -> None:
    """A watcher is told when the process stops serving."""
    server = await serve(*registrations())
    watch = health_pb2_grpc.HealthStub(await dial(server.address)).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await server.set_serving(False)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_reflection(serve: Serve, dial: Dial) -> None:
    """Under both of its names reflection lists every service and has the files that define it, its own as well."""
    server = await serve(*registrations())
    channel = await dial(server.address)
    stubs = {
        "grpc.reflection.v1alpha.ServerReflection": reflection_pb2_grpc.ServerReflectionStub(
            channel
        ).ServerReflectionInfo,
        # As a client's own stub for v1 does it: its messages are the same.
        "grpc.reflection.v1.ServerReflection": channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        ),
    }
    for own_name, call in stubs.items():
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=stage.SERVICE),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=own_name),
        ]
        listed, *described = [response async for response in call(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {*SERVICES, "grpc.health.v1.Health", *stubs}
        for reply, text in zip(described, (b"RunStage", own_name.rpartition(".")[0].encode()), strict=True):
            assert text in b"".join(reply.file_descriptor_response.file_descriptor_proto)


async def test_an_unknown_method_is_unimplemented(serve: Serve, dial: Dial) -> None:
    """What no service has is UNIMPLEMENTED, for a single answer and for a stream."""
    channel = await dial((await serve(*registrations())).address)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/flashsplit.shard.v1.WorkerService/Nothing")(b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- sockets


async def test_a_socket_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    """Only the owner may use the socket, and nothing is left of it after a stop; the umask stays as it was."""
    umask = os.umask(0o022)
    os.umask(umask)
    path = tmp_path / "a.sock"
    server = Server(f"unix:{path}", registrations())
    await server.start()
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").touch(0o666)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    await server.stop(0)
    assert not path.exists()
    await server.stop(0)


async def test_a_stale_socket_is_replaced(tmp_path: Path, serve: Serve, dial: Dial) -> None:
    """The socket file of a killed process does not keep the next one from listening."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    assert path.exists()
    server = await serve(*registrations(), address=f"unix:{path}")
    assert await RemoteWorker(await dial(server.address), server.address).describe() == WORKER


async def test_a_live_socket_is_refused(serve: Serve, dial: Dial) -> None:
    """A second server on the same path is refused, and neither its start nor its stop disturbs the first."""
    first = await serve(*registrations())
    second = Server(first.address, registrations())
    with pytest.raises(Unavailable, match=f"cannot listen on {first.address}: another process does"):
        await second.start()
    await second.stop(0)
    assert await RemoteWorker(await dial(first.address), first.address).describe() == WORKER


async def test_a_live_socket_with_a_full_queue_is_refused(tmp_path: Path) -> None:
    """A process that listens but takes no connections is alive still."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        server = Server(f"unix:{path}", registrations())
        with pytest.raises(Unavailable, match="another process does"):
            await server.start()
        await server.stop(0)
        assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "missing"])
async def test_a_path_that_cannot_be_listened_on(kind: str, tmp_path: Path) -> None:
    """A file, a directory and a missing directory are refused by path, and left as they are."""
    path = tmp_path / "a"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path = tmp_path / "no" / "a"
    server = Server(f"unix:{path}", registrations())
    with pytest.raises(Unavailable, match=f"cannot listen on unix:{path}: no socket can be made at this path"):
        await server.start()
    await server.stop(0)
    assert path.exists() is (kind != "missing")
    if kind == "file":
        assert path.read_text() == "precious"


async def test_a_free_port_is_filled_in(serve: Serve, dial: Dial) -> None:
    """Port 0 becomes the port that peers can reach."""
    server = await serve(*registrations(), address="127.0.0.1:0")
    assert server.address.startswith("127.0.0.1:")
    assert not server.address.endswith(":0")
    assert await RemoteWorker(await dial(server.address), server.address).describe() == WORKER


async def test_a_taken_port_is_refused(serve: Serve) -> None:
    """A port in use is refused by address instead of shared."""
    first = await serve(*registrations(), address="127.0.0.1:0")
    second = Server(first.address, registrations())
    with pytest.raises(Unavailable, match=f"cannot listen on {first.address}: the address is in use"):
        await second.start()
    await second.stop(0)


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def loopback(request: pytest.FixtureRequest) -> tuple[int, str]:
    """One of the addresses that localhost stands for; not every machine has the second."""
    family, host = request.param
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        pytest.skip(f"this machine has no {host}")
    return family, host


async def test_a_name_is_listened_on_at_all_its_addresses(loopback: tuple[int, str]) -> None:
    """Callers of localhost reach this server whichever address they try first."""
    family, host = loopback
    server = Server("localhost:0", registrations())
    await server.start()
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(server.address.removeprefix("localhost:"))))
    await server.stop(0)


async def test_a_name_whose_port_is_taken_at_one_address_is_refused(loopback: tuple[int, str]) -> None:
    """A caller of the name could reach the other process."""
    family, host = loopback
    with socket.socket(family) as other:
        other.bind((host, 0))
        other.listen()
        address = f"localhost:{other.getsockname()[1]}"
        server = Server(address, registrations())
        with pytest.raises(Unavailable, match=f"cannot listen on {address}: the address is in use"):
            await server.start()
        await server.stop(0)


async def test_an_address_of_another_host_is_refused() -> None:
    """An address that this host doesn't have is refused by name."""
    server = Server("192.0.2.1:7001", registrations())
    with pytest.raises(Unavailable, match="cannot listen on 192.0.2.1:7001"):
        await server.start()
    await server.stop(0)


def test_a_senseless_address_is_refused() -> None:
    """What is no address is refused before anything is opened."""
    with pytest.raises(InvalidArgument, match="--listen 'nowhere'"):
        Server("nowhere", registrations())


async def test_stop_waits_for_running_calls(serve: Serve, dial: Dial) -> None:
    """Within the grace a running session goes on to its end, and new calls are refused."""
    port = FakeStage()
    server = await serve(StageServicer(port).register)
    remote = RemoteStage(await dial(server.address), server.address)
    session = await remote.open(OPEN)
    stopping = asyncio.create_task(server.stop(5.0))

    async def open_until_refused() -> None:
        while True:
            await (await remote.open(OPEN)).close()

    with pytest.raises(Unavailable):
        await asyncio.wait_for(open_until_refused(), 5.0)
    assert not stopping.done()
    await session.forward(prefill())
    assert (await anext(session.events())).step == 0
    await session.close()
    async with asyncio.timeout(1.0):
        await stopping
    assert all(session.closed == 1 for session in port.sessions)


async def test_stop_cuts_what_outlasts_the_grace(serve: Serve, dial: Dial) -> None:
    """After the grace a session is cut, freed here, and Unavailable for its caller."""
    port = FakeStage()
    server = await serve(StageServicer(port).register)
    session = await RemoteStage(await dial(server.address), server.address).open(OPEN)
    async with asyncio.timeout(2.0):
        await server.stop(0.1)
    with pytest.raises(Unavailable, match=f"{server.address} does not answer"):
        await anext(session.events())
    await until(lambda: port.session.closed == 1)
