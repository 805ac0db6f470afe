"""Connections to other workers: shared, renewed, given up in time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.errors import InvalidArgument, ResourceExhausted, Unavailable
from services.messages.description import WorkerDescription
from services.messages.draft_session import OpenDraft
from services.messages.snapshots import SnapshotOwner
from services.net.server import Server
from services.rpc import peers as peers_module
from services.rpc.draft import DraftServicer
from services.rpc.liveness import WORKER_SILENT, Life, LivenessServicer
from services.rpc.peers import Peers
from services.rpc.snapshots import SnapshotServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import WorkerServicer
from tests.links import Fault, Link
from tests.services.conftest import Serve
from tests.services.fakes import (
    HEADER,
    OPEN,
    WORKER,
    FakeDraft,
    FakeSnapshots,
    FakeStage,
    FakeWorker,
    commit,
    frames_of,
    prefill,
    stays,
    until,
)

REGISTRATIONS = [
    WorkerServicer(FakeWorker()).register,
    StageServicer(FakeStage()).register,
    DraftServicer(FakeDraft()).register,
]


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    """Peers that give up after half a second."""
    peers = Peers(timeout_s=0.5)
    yield peers
    await peers.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were connected to, in order."""
    opened: list[str] = []
    connect = peers_module.connect

    async def counted(address: str, **options: Any) -> object:
        opened.append(address)
        return await connect(address, **options)

    monkeypatch.setattr(peers_module, "connect", counted)
    return opened


async def test_all_services_share_a_channel(serve: Serve, peers: Peers, connections: list[str]) -> None:
    """Calls to one worker, at the same time and later, of any service, use one connection."""
    address = (await serve(*REGISTRATIONS)).address
    workers = await asyncio.gather(*(peers.worker(address) for _ in range(20)))
    assert await asyncio.gather(*(worker.describe() for worker in workers)) == [WORKER] * 20
    session = await (await peers.stage(address)).open(OPEN)
    await session.forward(prefill())
    assert await anext(session.events()) == commit(prefill())
    draft = await (await peers.draft(address)).open(OpenDraft("r", "f", 9))
    await asyncio.gather(session.close(), draft.close())
    assert connections == [address]


async def test_snapshots_have_a_connection_of_their_own(serve: Serve, peers: Peers, connections: list[str]) -> None:
    """Snapshots go over a second connection, shared among themselves: bytes held up there hold up no step."""
    port = FakeSnapshots()
    port.kept[SnapshotOwner.STAGE, "one"] = frames_of(HEADER, 7) * 4000
    address = (await serve(*REGISTRATIONS, SnapshotServicer(port).register)).address
    session = await (await peers.stage(address)).open(OPEN)
    assert connections == [address]
    snapshots = await asyncio.gather(*(peers.snapshots(address) for _ in range(5)))
    assert connections == [address] * 2
    frames = snapshots[0].export_snapshot(SnapshotOwner.STAGE, "one")
    assert await anext(frames) == HEADER
    await session.forward(prefill())
    async with asyncio.timeout(2):
        assert await anext(session.events()) == commit(prefill())
    assert await snapshots[1].free_snapshots(["x"]) == 1 << 40
    assert await (await peers.worker(address)).describe() == WORKER
    assert connections == [address] * 2
    await frames.aclose()
    await session.close()


async def test_snapshots_of_a_worker_that_is_gone(tmp_path: Path, peers: Peers) -> None:
    """Nobody at the address is Unavailable here too."""
    with pytest.raises(Unavailable, match="no worker answers"):
        await peers.snapshots(f"unix:{tmp_path}/a.sock")


async def test_a_worker_that_is_left(serve: Serve, tmp_path: Path, connections: list[str]) -> None:
    """Who waits for a connection to it is told at once; calls that run go on, and it can be called again."""
    peers = Peers(timeout_s=60)
    waiting = [asyncio.ensure_future(peers.snapshots(f"unix:{tmp_path}/a.sock")) for _ in range(2)]
    address = (await serve(*REGISTRATIONS)).address
    session = await (await peers.stage(address)).open(OPEN)
    for gone in (f"unix:{tmp_path}/a.sock", address):
        await asyncio.wait_for(peers.leave(gone), 10)
    for attempt in waiting:
        with pytest.raises(Unavailable, match="is gone, and is not called any more"):
            await asyncio.wait_for(attempt, 10)
    await session.forward(prefill())
    assert await anext(session.events()) == commit(prefill())
    await (await peers.worker(address)).describe()
    assert connections.count(address) == 2
    await session.close()
    await peers.close()


@pytest.mark.parametrize("listen", ["unix", "tcp"])
async def test_a_restarted_worker_is_reached_again(listen: str, tmp_path: Path, peers: Peers) -> None:
    """After a worker was restarted at its address the next call reaches the new one."""
    address = f"unix:{tmp_path}/a.sock" if listen == "unix" else "127.0.0.1:0"
    for _ in range(5):
        server = Server(address, REGISTRATIONS)
        await server.start()
        address = server.address
        assert await (await peers.worker(address)).describe() == WORKER
        lost = asyncio.create_task(peers.lost(address))
        await server.stop(0)
        # A connection that breaks under a call is that call's error; no process comes back sooner than it is missed.
        assert (await lost).reason == "WORKER_UNREACHABLE"


async def test_a_description_has_the_time_that_the_link_needs(serve: Serve) -> None:
    """More than what was asked for, where connecting took longer; a worker whose answer comes later is not lost, unlike
    one that is silent or that nobody reaches, which are told long before others give up."""
    server = await serve(*REGISTRATIONS, LivenessServicer(Life(), Peers()).register, address="127.0.0.1:0")
    peers = Peers(timeout_s=60.0)
    async with Link(server.address, Fault(delay_s=0.5)) as far, Link(server.address) as near:
        for _ in range(2):
            assert await peers.description(far.address, 0.01) == WORKER
        assert await peers.description(near.address, 0.01) == WORKER
        near.fault = Fault(delay_s=30)
        with pytest.raises(ResourceExhausted, match="lives, and has not answered within"):
            await peers.description(near.address, 0.01)
        near.fault = far.fault = Fault(silent=True)
        with pytest.raises(Unavailable, match="has been silent") as raised:
            await peers.description(far.address, 60.0)
        assert raised.value.reason == WORKER_SILENT
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match="no connection to the worker at .* within"):
                await peers.description(far.address, 0.01)
    await peers.close()


async def test_a_worker_that_comes_back_while_it_is_awaited(tmp_path: Path) -> None:
    """A worker that begins to listen a little late is reached within the time."""
    peers = Peers(timeout_s=5.0)
    address = f"unix:{tmp_path}/a.sock"
    asking = asyncio.create_task(peers.worker(address))
    assert await stays(lambda: not asking.done(), 0.3)
    server = Server(address, REGISTRATIONS)
    await server.start()
    assert await (await asking).describe() == WORKER
    await peers.close()
    await server.stop(0)


async def test_a_worker_that_was_lost_is_awaited_again(serve: Serve) -> None:
    """A worker whose connection broke gets the whole time to come back, however often it was asked meanwhile."""
    impatient, patient = Peers(timeout_s=0.1), Peers(timeout_s=5.0)
    first = await serve(*REGISTRATIONS)

    async def ask(peers: Peers) -> WorkerDescription:
        return await (await peers.worker(first.address)).describe()

    for peers in (impatient, patient):
        assert await ask(peers) == WORKER
    await first.stop(0)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await ask(impatient)
    asking = asyncio.create_task(ask(patient))
    assert await stays(lambda: not asking.done(), 0.3)
    await serve(*REGISTRATIONS, address=first.address)
    assert await asking == WORKER
    assert await ask(impatient) == WORKER
    for peers in (impatient, patient):
        await peers.close()


@pytest.mark.parametrize("kind", ["no-socket", "refused", "silent"])
async def test_an_unreachable_worker_is_given_up_in_time(kind: str, tmp_path: Path, peers: Peers) -> None:
    """Whether nobody listens or nobody answers: within the timeout an error names the address and what to do."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":
            listener.listen()
        address = f"unix:{tmp_path}/a.sock" if kind == "no-socket" else f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Unavailable, match=f"no worker answers at {address} within 0.5 s") as raised:
            await peers.worker(address)
        assert 0.4 < time.monotonic() - began < 1.0
    assert f"flashsplit-worker --listen {address}" in raised.value.message
    assert raised.value.reason == "WORKER_UNREACHABLE"
    assert raised.value.where == {"address": address}


async def test_an_unreachable_worker_holds_up_nobody_else(serve: Serve, tmp_path: Path, peers: Peers) -> None:
    """While one address is being waited for, others are reached at once."""
    address = (await serve(*REGISTRATIONS)).address
    lost = asyncio.create_task(peers.worker(f"unix:{tmp_path}/nobody.sock"))
    async with asyncio.timeout(0.3):
        assert await (await peers.worker(address)).describe() == WORKER
    with pytest.raises(Unavailable):
        await lost


async def test_giving_up_while_connecting(serve: Serve, tmp_path: Path, peers: Peers) -> None:
    """A caller that is cancelled while it connects leaves the address usable for the next one."""
    address = f"unix:{tmp_path}/late.sock"
    asking = asyncio.create_task(peers.worker(address))
    assert await stays(lambda: not asking.done())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await serve(*REGISTRATIONS, address=address)
    assert await (await peers.worker(address)).describe() == WORKER


async def test_close_ends_sessions_and_is_safe_twice(serve: Serve) -> None:
    """Closing frees what was open over the connections; the peers can be used again afterwards."""
    port = FakeStage()
    address = (await serve(StageServicer(port).register)).address
    peers = Peers(timeout_s=0.5)
    await (await peers.stage(address)).open(OPEN)
    await peers.close()
    await peers.close()
    await until(lambda: bool(port.session.closed))
    session = await (await peers.stage(address)).open(OPEN)
    await session.close()
    await peers.close()


async def test_what_is_no_address_is_refused(peers: Peers) -> None:
    """A text that is no address is refused at once instead of waited for."""
    with pytest.raises(InvalidArgument, match="address 'nowhere'"):
        await peers.worker("nowhere")
