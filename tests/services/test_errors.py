"""Exceptions to gRPC status and back, over real connections."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services import errors
from services.errors import (
    FailedPrecondition,
    FlashsplitError,
    InternalError,
    InvalidArgument,
    Unavailable,
    error_named,
    for_clients,
    from_rpc_error,
    to_status,
)
from services.net.channel import connect
from services.rpc.peers import Peers
from services.rpc.stage import RemoteStage, StageServicer
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.conftest import Dial, Serve
from tests.services.fakes import OPEN, FakeStage, FakeWorker

KINDS = FlashsplitError.__subclasses__()
ROOT = Path(__file__).parents[2]


def test_the_table_has_every_kind_once() -> None:
    """Every exception has a code of its own, found by code and by name."""
    assert len({kind.code for kind in KINDS}) == len(KINDS) == 12
    for kind in KINDS:
        assert type(error_named(kind("x").code_name, "x")) is kind
    assert type(error_named("NO_SUCH_CODE", "x")) is InternalError


@pytest.mark.parametrize("kind", KINDS)
async def test_unary_calls_raise_what_the_port_raised(kind: type[FlashsplitError], serve: Serve, dial: Dial) -> None:
    """The exception of a unary handler arrives as the same kind with text, reason and place."""
    port = FakeWorker()
    server = await serve(WorkerServicer(port).register)
    port.fault = kind("too bad: 7 €", reason="TOO_BAD", device="cuda:1", nothing=None)
    with pytest.raises(FlashsplitError) as raised:
        await RemoteWorker(await dial(server.address), server.address).describe()
    assert type(raised.value) is kind
    assert (raised.value.message, raised.value.reason) == ("too bad: 7 €", "TOO_BAD")
    assert raised.value.where == {"device": "cuda:1", "address": server.address}


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_raise_what_the_port_raised(kind: type[FlashsplitError], serve: Serve, dial: Dial) -> None:
    """The exception of a stream arrives as the same kind, at opening and later among the events."""
    port = FakeStage()
    server = await serve(StageServicer(port).register)
    stage = RemoteStage(await dial(server.address), server.address)
    session = await stage.open(OPEN)
    port.session.out.put_nowait(kind("later", host="beta"))
    with pytest.raises(kind, match="later") as raised:
        await anext(session.events())
    assert raised.value.where == {"stage": "1", "host": "beta", "device": "cuda:0", "address": server.address}
    port.fault = kind("at once")
    with pytest.raises(kind, match="at once") as raised:
        await stage.open(OPEN)
    assert raised.value.where == {"stage": "1", "address": server.address}


async def test_places_survive_two_hops(serve: Serve, dial: Dial) -> None:
    """A worker in between adds what the first one left open and changes nothing that it said."""
    far = FakeStage()
    far.fault = FailedPrecondition("wrong layers", reason="LAYER_MISMATCH", stage=2, host="gamma", field="layers")
    far_server = await serve(StageServicer(far).register)
    near = RemoteStage(await dial(far_server.address), far_server.address)
    near_server = await serve(StageServicer(near).register)
    with pytest.raises(FailedPrecondition) as raised:
        await RemoteStage(await dial(near_server.address), near_server.address).open(OPEN)
    assert (raised.value.message, raised.value.reason) == ("wrong layers", "LAYER_MISMATCH")
    expected = {"stage": "2", "host": "gamma", "field": "layers", "address": far_server.address}
    assert raised.value.where == expected


@pytest.mark.parametrize("fault", [RuntimeError("secret"), ValueError("secret"), ExceptionGroup("secret", [OSError()])])
async def test_unexpected_exceptions_tell_nothing(fault: Exception, serve: Serve, dial: Dial) -> None:
    """What nobody foresaw becomes INTERNAL with a fixed text, for unary calls and streams alike."""
    worker, stage = FakeWorker(), FakeStage()
    server = await serve(WorkerServicer(worker).register, StageServicer(stage).register)
    channel = await dial(server.address)
    worker.fault = stage.fault = fault
    with pytest.raises(InternalError) as unary:
        await RemoteWorker(channel, server.address).describe()
    with pytest.raises(InternalError) as stream:
        await RemoteStage(channel, server.address).open(OPEN)
    for raised in (unary, stream):
        assert raised.value.message == "internal error: the log has the details"
        assert "secret" not in repr(raised.value.where)
        assert "secret" not in repr(raised.value.__cause__)


async def test_a_dead_worker_is_unavailable_by_address(serve: Serve, dial: Dial) -> None:
    """A call to a worker that is gone names its address."""
    server = await serve(WorkerServicer(FakeWorker()).register)
    channel = await dial(server.address)
    await server.stop(0)
    with pytest.raises(Unavailable, match=f"{server.address} does not answer") as raised:
        await RemoteWorker(channel, server.address).describe()
    assert raised.value.where["address"] == server.address
    with pytest.raises(Unavailable, match=f"{server.address} does not answer"):
        await RemoteStage(channel, server.address).open(OPEN)


async def test_a_killed_worker_is_unavailable_at_once(tmp_path: Path) -> None:
    """A process killed while it answers is noticed by its closed socket, within a second."""
    address = f"unix:{tmp_path}/a.sock"
    code = (
        "import asyncio\n"
        "from services.net.server import Server\n"
        "from services.rpc.worker import WorkerServicer\n"
        "class Port:\n"
        "    async def describe(self):\n"
        "        print('asked', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "async def main():\n"
        f"    server = Server({address!r}, [WorkerServicer(Port()).register])\n"
        "    await server.start()\n"
        "    print('ready', flush=True)\n"
        "    await server.wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, env=os.environ, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    peers = Peers(timeout_s=5.0)
    try:
        assert await process.stdout.readline() == b"ready\n"
        call = asyncio.create_task((await peers.worker(address)).describe())
        assert await process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(1.0):
            with pytest.raises(Unavailable, match=f"{address} does not answer"):
                await call
    finally:
        await process.wait()
        await peers.close()


async def test_a_foreign_server_is_understood(tmp_path: Path) -> None:
    """A gRPC server without our services is UNIMPLEMENTED, a code without counterpart INTERNAL, both by address."""
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{tmp_path}/a.sock")
    await server.start()
    channel = await connect(f"unix:{tmp_path}/a.sock", timeout_s=2.0)
    try:
        with pytest.raises(errors.Unimplemented) as raised:
            await RemoteWorker(channel, "a").describe()
        assert raised.value.where == {"address": "a"}
        with pytest.raises(errors.Unimplemented):
            await RemoteStage(channel, "a").open(OPEN)
    finally:
        await channel.close()
        await server.stop(0)


async def test_long_texts_are_cut(serve: Serve, dial: Dial) -> None:
    """A text that quotes a megabyte from the caller still arrives with its own status."""
    port = FakeWorker()
    server = await serve(WorkerServicer(port).register)
    port.fault = InvalidArgument("é" * (1 << 20), field="x" * (1 << 20))
    with pytest.raises(InvalidArgument) as raised:
        await RemoteWorker(await dial(server.address), server.address).describe()
    assert raised.value.message.startswith("ééé")
    assert len(raised.value.message) == len(raised.value.where["field"]) == 2001


def rpc_error(code: grpc.StatusCode, text: str, details: bytes) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=text)


def test_details_that_cannot_be_trusted_are_left_out() -> None:
    """Garbled or contradicting details don't get in the way of code and text."""
    right = to_status(InvalidArgument("text", field="f")).trailing_metadata[0][1]
    info = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "text", right))
    assert info.where == {"field": "f"}
    for code, text, details in [
        (grpc.StatusCode.INVALID_ARGUMENT, "text", b"\xff\xff\xff"),
        (grpc.StatusCode.INVALID_ARGUMENT, "other text", right),
        (grpc.StatusCode.NOT_FOUND, "text", right),
    ]:
        error = from_rpc_error(rpc_error(code, text, details), address="a")
        assert (error.code, error.message, error.where) == (code, text, {"address": "a"})


def test_any_key_may_name_a_place() -> None:
    """Places named like an argument of the exceptions are places still."""
    status = status_pb2.Status(code=3, message="text")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="R", metadata={"message": "m", "reason": "r"}))
    details = rpc_status.to_status(status).trailing_metadata[0][1]
    error = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "text", details), stage=3)
    assert (error.message, error.reason) == ("text", "R")
    assert error.where == {"message": "m", "reason": "r", "stage": "3"}


def test_cut_calls_are_unavailable() -> None:
    """CANCELLED from a server means that it stops, and "Stream removed" that the connection broke; other codes without
    a counterpart are INTERNAL."""
    cut = from_rpc_error(rpc_error(grpc.StatusCode.CANCELLED, "", b""), address="a")
    assert type(cut) is Unavailable
    assert cut.message == "a does not answer: no details"
    for code in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNKNOWN):
        assert type(from_rpc_error(rpc_error(code, "x", b""))) is InternalError
    removed = from_rpc_error(rpc_error(grpc.StatusCode.UNKNOWN, "Stream removed (Socket closed)", b""), address="a")
    assert type(removed) is Unavailable


def test_clients_are_not_told_where_workers_of_this_host_listen() -> None:
    """Neither in the sentence nor in the fields; what is said of other hosts stays, and so do kind and reason."""
    error = Unavailable(
        "stage 1 (cpu on vm, unix:/tmp/flashsplit-a_1/worker.sock): unix:///run/b.sock: closed; gpu-a:7001 is there",
        reason="LOST",
        address="unix:/tmp/flashsplit-a_1/worker.sock",
        stage=1,
    )
    told = for_clients(error)
    assert told.message == "stage 1 (cpu on vm, a local worker): a local worker: closed; gpu-a:7001 is there"
    assert (type(told), told.reason) == (Unavailable, "LOST")
    assert told.where == {"address": "a local worker", "stage": "1"}
