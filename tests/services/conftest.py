"""Real servers on Unix sockets, and channels to them, that end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from services.net.channel import connect
from services.net.server import Registration, Server
from services.rpc.shared_memory import SharedMemoryServicer, open_link
from services.same_host.link import SharedLinks
from tests.services.fakes import until
from tests.services.streams.lane_chain import LaneChain, two_watchers

Serve = Callable[..., Awaitable[Server]]
Dial = Callable[[str], Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Start a server for some servicers, by default on a new socket of this test."""
    servers: list[Server] = []

    async def start(*registrations: Registration, address: str | None = None) -> Server:
        server = Server(address or f"unix:{tmp_path}/{len(servers)}.sock", registrations)
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop(0)


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """Open a channel to an address."""
    channels: list[grpc.aio.Channel] = []

    async def to(address: str) -> grpc.aio.Channel:
        channels.append(await connect(address, timeout_s=2.0))
        return channels[-1]

    yield to
    for channel in channels:
        await channel.close()


@pytest.fixture
async def chain(serve: Serve, dial: Dial) -> AsyncIterator[LaneChain]:
    """A link between two threads of this process, over a real socket."""
    with two_watchers() as watchers:
        links = SharedLinks()
        server = await serve(SharedMemoryServicer(links, watchers[1]).register)
        client = await open_link(await dial(server.address), server.address, watchers[0])
        chain = LaneChain(client, links, watchers)
        await chain.join()
        yield chain
        await client.close()
        await until(lambda: chain.below.link.closed)
