"""Two ends that share memory, over a real connection: payloads either way, references to nothing, ends that go."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from flashsplit.shard.v1 import shared_memory_pb2 as pb, shared_memory_service_pb2_grpc as pb_grpc
from services.errors import FailedPrecondition, InvalidArgument
from services.net.channel import connect
from services.net.server import Server
from services.rpc import payload_transport
from services.rpc.payload_transport import PayloadTransport, share_memory
from services.rpc.shared_memory import ClientLink, SharedMemoryServicer, open_link
from services.same_host.link import MIN_SHARED_BYTES, NO_LINKS, PIECE_BYTES, SEGMENT_BYTES, SharedLink, SharedLinks
from tests.services.thread_watcher import ThreadWatcher

DATA = os.urandom(MIN_SHARED_BYTES)


class Ends:
    """A link as its client has it, and the server's links."""

    def __init__(self, channel: grpc.aio.Channel, client: ClientLink, links: SharedLinks) -> None:
        self.channel, self.client, self.links = channel, client, links

    @property
    def link(self) -> SharedLink:
        return self.client.link

    @property
    def there(self) -> SharedLink:
        return self.links.get(self.link.link_id)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Server, SharedLinks]]:
    links = SharedLinks()
    made = Server(f"unix:{tmp_path / 's.sock'}", [SharedMemoryServicer(links).register])
    await made.start()
    yield made, links
    await made.stop(0)


@pytest.fixture
async def ends(server: tuple[Server, SharedLinks]) -> AsyncIterator[Ends]:
    channel = await connect(server[0].address, timeout_s=5)
    client = await open_link(channel, server[0].address)
    yield Ends(channel, client, server[1])
    await client.close()
    await channel.close()


async def soon(holds: object) -> None:
    """Until a condition holds, within a second."""
    async with asyncio.timeout(1):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_there(ends: Ends) -> None:
    """What a sender puts in is what the other end takes out; small pieces stay in their frames."""
    sender = ends.link.sender()
    assert sender.put(memoryview(DATA[:-1])) is None
    message, into = sender.put(memoryview(DATA)), bytearray(b"before")
    assert message is not None
    ends.links.read_payload(message, into)
    assert into == b"before" + DATA


async def test_room_comes_back(ends: Ends) -> None:
    """Many times the segment's size goes through it while the other end reads."""
    sender, piece = ends.link.sender(), memoryview(os.urandom(PIECE_BYTES))
    for _ in range(5 * SEGMENT_BYTES // PIECE_BYTES):
        message = None
        async with asyncio.timeout(1):
            while (message := sender.put(piece)) is None:
                await asyncio.sleep(0.001)
        into = bytearray()
        ends.links.read_payload(message, into)
        assert into == piece


async def test_an_ended_stream_gives_its_room_back(ends: Ends) -> None:
    """What was announced to nobody is not waited for; other streams' payloads stay."""
    stays = ends.link.sender()
    kept = stays.put(memoryview(DATA))
    for _ in range(3):
        sender, puts = ends.link.sender(), 0
        while sender.put(memoryview(bytes(PIECE_BYTES))) is not None:
            puts += 1
        assert puts >= 2
        sender.close()
    assert kept is not None
    into = bytearray()
    ends.links.read_payload(kept, into)
    assert into == DATA


async def test_back(ends: Ends) -> None:
    """The server's payloads, for a transfer that the client asked for and ends."""
    number = ends.link.begin_transfer()
    sender = ends.there.transfer(number)
    mine, messages = SharedLinks(ends.link), []
    while (message := sender.put(memoryview(bytes(PIECE_BYTES)))) is not None:
        messages.append(message)
    into = bytearray()
    mine.read_payload(messages[0], into)
    assert into == bytes(PIECE_BYTES)
    ends.link.end_transfer(number)
    await soon(lambda: not any(ends.there.holds(message.sequence) for message in messages))
    assert ends.there.transfer(number + 1).put(memoryview(DATA)) is not None


@pytest.mark.parametrize(
    "change", [{"link_id": 1}, {"size_bytes": 0}, {"size_bytes": PIECE_BYTES + 1}, {"sequence": 9}, {"offset": 3}]
)
async def test_references_to_nothing(ends: Ends, change: dict[str, int]) -> None:
    """A payload of another link, number, place or size than was announced is refused, and so is any without a link."""
    good = ends.link.sender().put(memoryview(DATA))
    assert good is not None
    for name, value in change.items():
        setattr(good, name, value)
    with pytest.raises(InvalidArgument):
        ends.links.read_payload(good, bytearray())
    with pytest.raises(InvalidArgument):
        NO_LINKS.read_payload(good, bytearray())


async def test_a_client_that_goes(ends: Ends) -> None:
    """The server's end goes too; the client's puts nothing more anywhere, and says no more than that."""
    sender, there = ends.link.sender(), ends.there
    await ends.client.close()
    await soon(lambda: there.closed)
    with pytest.raises(InvalidArgument, match="no open link"):
        ends.links.get(ends.link.link_id)
    assert sender.put(memoryview(DATA)) is None
    sender.close()


async def test_a_server_that_goes(server: tuple[Server, SharedLinks], ends: Ends) -> None:
    """When the server stops, the client's end is closed and puts nothing more anywhere."""
    await server[0].stop(0)
    await soon(lambda: ends.client.closed)
    assert ends.link.sender().put(memoryview(DATA)) is None


async def test_who_stops_opening_leaves_nothing(tmp_path: Path) -> None:
    """Memory, call and sockets of a link that was not waited for are given back on both sides, whenever that was."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    watcher, links = ThreadWatcher(), SharedLinks()
    server = Server(f"unix:{tmp_path / 's.sock'}", [SharedMemoryServicer(links, watcher).register])
    await server.start()
    channel = await connect(server.address, timeout_s=5)
    before, stopped = descriptors(), 0
    for delay_ms in range(100):
        opening = asyncio.create_task(open_link(channel, server.address, watcher))
        await asyncio.wait([opening], timeout=delay_ms / 2000)
        stopped += opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()
        await soon(lambda: descriptors() == before)
    assert stopped
    await channel.close()
    await server.stop(0)
    watcher.end()


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (pb.ShareMemoryRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.ShareMemoryRequest(consumed=pb.SharedConsumed(sequences=[1])), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.ShareMemoryRequest(segment=pb.SharedSegment()), grpc.StatusCode.INVALID_ARGUMENT),
        (
            pb.ShareMemoryRequest(
                segment=pb.SharedSegment(process_id=2**31, descriptor=3, size_bytes=1 << 20, nonce=bytes(16))
            ),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
async def test_wrong_first_frames(ends: Ends, first: pb.ShareMemoryRequest, code: grpc.StatusCode) -> None:
    """A call that does not begin with a segment that can be mapped ends with the status that says so."""
    call = pb_grpc.SharedMemoryServiceStub(ends.channel).ShareMemory()
    await call.write(first)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is code


async def test_which_transport(server: tuple[Server, SharedLinks], ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto shares with this host and passes over who can't; stream never does; shared says why not."""
    address, channel = server[0].address, ends.channel
    for wanted, there in (
        (PayloadTransport.AUTO, True),
        (PayloadTransport.SHARED, True),
        (PayloadTransport.STREAM, False),
    ):
        found = await share_memory(channel, address, wanted)
        assert (found is not None) is there
        if found is not None:
            await found.close()
    assert await share_memory(channel, "gpu.example:7001", PayloadTransport.AUTO) is None

    async def fails(*_: object) -> ClientLink:
        raise FailedPrecondition("not here", reason="NOT_SHARED")

    monkeypatch.setattr(payload_transport, "open_link", fails)
    assert await share_memory(channel, address, PayloadTransport.AUTO) is None
    with pytest.raises(FailedPrecondition) as caught:
        await share_memory(channel, address, PayloadTransport.SHARED)
    assert caught.value.message == f"--payload-transport shared: {address}: not here"
