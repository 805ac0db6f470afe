"""Snapshots in and out over real sockets: what goes through, what is refused when, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from flashsplit.shard.v1 import snapshot_pb2, snapshot_service_pb2_grpc as pb_grpc
from services.errors import (
    DataLoss,
    FailedPrecondition,
    FlashsplitError,
    InternalError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from services.messages.snapshots import (
    KeptSnapshot,
    SnapshotChunk,
    SnapshotFrame,
    SnapshotHeader,
    SnapshotImported,
    SnapshotOwner,
    SnapshotTensor,
    SnapshotTrailer,
    frame_to_message,
    kept_from_message,
)
from services.messages.tensors import CHUNK_BYTES
from services.rpc.snapshots import SERVICE, RemoteSnapshots, SnapshotServicer
from services.streams.client_stream import ClientStream
from tests.services.conftest import Dial, Serve
from tests.services.fakes import HEADER, FakeSnapshots, frames_of, settled, stays, until

STAGE, DRAFT = SnapshotOwner.STAGE, SnapshotOwner.DRAFT
SMALL = frames_of(HEADER, 700)
LARGE = frames_of(
    replace(HEADER, tensors=(SnapshotTensor("k", "float32", (3, CHUNK_BYTES)), SnapshotTensor("v", "bfloat16", (5,))))
)


@pytest.fixture
def port() -> FakeSnapshots:
    return FakeSnapshots()


@pytest.fixture
async def channel(port: FakeSnapshots, serve: Serve, dial: Dial) -> grpc.aio.Channel:
    return await dial((await serve(SnapshotServicer(port).register)).address)


@pytest.fixture
def snapshots(channel: grpc.aio.Channel) -> RemoteSnapshots:
    return RemoteSnapshots(channel, "unix:/run/a.sock")


class Source:
    """Frames for an import; `taken`: how many were asked for. An exception among them is raised in its turn."""

    def __init__(self, frames: Sequence[SnapshotFrame | BaseException]) -> None:
        self._frames, self.taken = frames, 0

    async def __aiter__(self) -> AsyncIterator[SnapshotFrame]:
        for frame in self._frames:
            self.taken += 1
            if isinstance(frame, BaseException):
                raise frame
            yield frame

    @property
    def frames(self) -> AsyncIterator[SnapshotFrame]:
        return aiter(self)


async def all_of(frames: AsyncIterator[SnapshotFrame]) -> list[SnapshotFrame]:
    return [frame async for frame in frames]


# --- export and import


@pytest.mark.parametrize("frames", [SMALL, LARGE])
async def test_a_snapshot_goes_in_and_out(
    port: FakeSnapshots, snapshots: RemoteSnapshots, frames: list[SnapshotFrame]
) -> None:
    """Header, many chunks and trailer arrive as they were sent, in both directions, and the answer comes back."""
    source = Source(frames)
    async with asyncio.timeout(10):
        imported = await snapshots.import_snapshot(source.frames)
        assert imported == SnapshotImported(frames[0].size_bytes, ("old", "older"))
        assert port.kept == {(STAGE, "one"): frames}
        assert await all_of(snapshots.export_snapshot(STAGE, "one")) == frames
    assert len(frames) > 5
    assert (port.imports[0].committed, port.exporting) == (True, 0)


async def test_what_is_asked_for_arrives(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """Owner, name, first token and parent of an export reach the port; what isn't kept is NOT_FOUND by name."""
    for owner, first, parent in ((STAGE, 0, None), (DRAFT, 2**32 - 1, "p"), (STAGE, 7, "q")):
        with pytest.raises(NotFound, match="no prefix two is kept") as raised:
            await all_of(snapshots.export_snapshot(owner, "two", first, parent))
        assert raised.value.reason == "SNAPSHOT_MISSING"
        assert raised.value.where["address"] == "unix:/run/a.sock"
        assert port.asked[-1] == (owner, "two", first, parent)


async def test_a_name_that_is_kept_takes_no_bytes(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """An import of a kept name is answered after its header: no further frame is even asked for."""
    port.kept[STAGE, "one"] = SMALL
    source = Source(LARGE)
    assert await snapshots.import_snapshot(source.frames) == SnapshotImported(0)
    assert source.taken == 1
    assert port.kept == {(STAGE, "one"): SMALL}


@pytest.mark.parametrize(
    "fault",
    [
        InvalidArgument("tensor x is missing", field="tensors"),
        FailedPrecondition("another model", reason="FINGERPRINT_MISMATCH", field="fingerprint"),
        FailedPrecondition("builds on p", reason="SNAPSHOT_MISSING", field="parent_id"),
        ResourceExhausted("no room", reason="SNAPSHOT_BUDGET"),
    ],
)
async def test_what_the_header_says_is_refused_before_any_bytes(
    fault: FlashsplitError, port: FakeSnapshots, snapshots: RemoteSnapshots
) -> None:
    """Status, reason and message of the worker reach the client, which has not been asked for bytes."""
    port.import_fault = fault
    source = Source(LARGE)
    with pytest.raises(type(fault), match=fault.message) as raised:
        await snapshots.import_snapshot(source.frames)
    assert (raised.value.reason, raised.value.where.get("field")) == (fault.reason, fault.where.get("field"))
    assert raised.value.where["address"] == "unix:/run/a.sock"
    assert source.taken == 1


async def test_a_refusal_in_the_middle(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """A chunk that is refused ends the import with its status, every time, and the rest is not sent."""
    many = [SMALL[0], *(SnapshotChunk(at, b"x") for at in range(20_000))]
    for _ in range(10):
        port.write_fault = ResourceExhausted("no memory left", reason="OUT_OF_MEMORY")
        source = Source(many)
        with pytest.raises(ResourceExhausted, match="no memory left") as raised:
            await snapshots.import_snapshot(source.frames)
        assert raised.value.reason == "OUT_OF_MEMORY"
        assert source.taken < 20_000
        await until(lambda: port.imports[-1].aborted == 1)
    assert port.kept == {}


async def test_bytes_that_do_not_match_are_told(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """What the port says of the trailer is the status, and nothing is kept."""
    with pytest.raises(DataLoss, match="bytes are missing"):
        await snapshots.import_snapshot(Source([*SMALL[:-2], SMALL[-1]]).frames)
    assert port.kept == {}
    assert port.imports[0].aborted == 1


async def test_an_unexpected_error_keeps_its_details(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """What nobody foresaw ends the call as INTERNAL without its text, and the import is aborted."""
    port.write_fault = ValueError("secret")
    with pytest.raises(InternalError, match="internal error") as raised:
        await snapshots.import_snapshot(Source(SMALL).frames)
    assert "secret" not in str(raised.value)
    await until(lambda: port.imports[-1].aborted == 1)


async def test_a_source_that_fails(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """When the bytes cannot be read on the client's side, that error is raised and the worker forgets what came."""
    for error in (DataLoss("the file is damaged"), OSError("gone")):
        with pytest.raises(type(error), match=str(error)):
            await snapshots.import_snapshot(Source([*SMALL[:3], error]).frames)
        await until(lambda: port.imports[-1].aborted == 1)
    with pytest.raises(OSError, match="at once"):
        await snapshots.import_snapshot(Source([OSError("at once")]).frames)
    assert port.kept == {}


async def test_a_source_without_a_trailer(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """Frames that end too early are the client's error, at once, instead of a wait without end."""
    for count in (1, 3, len(SMALL) - 1):
        async with asyncio.timeout(2):
            with pytest.raises(DataLoss, match="ended without its trailer"):
                await snapshots.import_snapshot(Source(SMALL[:count]).frames)
        await until(lambda: port.imports[-1].aborted == 1)
    assert port.kept == {}


async def test_nothing_behind_the_trailer_is_sent(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """What a source yields behind its trailer is left aside."""
    await snapshots.import_snapshot(Source([*SMALL, SMALL[0]]).frames)
    assert port.kept == {(STAGE, "one"): SMALL}


# --- calls that end on one side


@pytest.mark.parametrize("sent", [1, 2, 4])
async def test_a_client_that_vanishes(sent: int, port: FakeSnapshots, channel: grpc.aio.Channel) -> None:
    """When the client is gone behind the header or some chunks, the import is aborted, and exactly once."""
    stream = raw_import(channel)
    await stream.send(*map(message, SMALL[:sent]))
    await stream.read()
    await until(lambda: len(port.imports) == 1 and len(port.imports[0].frames) == sent)
    assert port.imports[0].aborted == 0
    stream.cancel()
    await until(lambda: port.imports[0].aborted == 1)
    assert await stays(lambda: (port.imports[0].aborted, port.kept) == (1, {}))


async def test_a_cancelled_caller_lets_go(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """A task that is cancelled in the middle of an import leaves nothing on the worker."""
    stuck = asyncio.Event()

    async def frames() -> AsyncIterator[SnapshotFrame]:
        for frame in SMALL[:3]:
            yield frame
        stuck.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(snapshots.import_snapshot(frames()))
    await stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: port.imports[0].aborted == 1)


async def test_a_server_that_stops_in_the_middle(port: FakeSnapshots, serve: Serve, dial: Dial) -> None:
    """A worker that goes away during an export or an import is Unavailable, and not an end like any other."""
    port.kept[STAGE, "two"], port.hold = LARGE, asyncio.Event()
    server = await serve(SnapshotServicer(port).register)
    snapshots = RemoteSnapshots(await dial(server.address), server.address)
    got: list[SnapshotFrame] = []
    waiting, still = asyncio.Event(), asyncio.Event()

    async def export() -> None:
        async for frame in snapshots.export_snapshot(STAGE, "two"):
            got.append(frame)

    async def half() -> AsyncIterator[SnapshotFrame]:
        for frame in SMALL[:3]:
            yield frame
        waiting.set()
        await still.wait()
        for frame in SMALL[3:]:
            yield frame

    tasks = [asyncio.create_task(export()), asyncio.create_task(snapshots.import_snapshot(half()))]
    await waiting.wait()
    await until(lambda: len(got) == len(LARGE) - 1)
    await server.stop(0)
    still.set()
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]
    await until(lambda: port.imports[0].aborted == 1 and port.exporting == 0)


@pytest.mark.parametrize("fault", [DataLoss("memory is bad", field="layers.3.k"), FailedPrecondition("unloaded")])
async def test_an_export_that_fails(fault: FlashsplitError, port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """What came before an error arrives first; the error then ends the export with its own status."""
    port.kept[STAGE, "one"], port.export_fault = SMALL, fault
    got: list[SnapshotFrame] = []

    async def export() -> None:
        async for frame in snapshots.export_snapshot(STAGE, "one"):
            got.append(frame)

    with pytest.raises(type(fault), match=fault.message):
        await export()
    assert got == SMALL[:-1]


async def test_a_reader_that_turns_away(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """An export that is closed or abandoned in the middle ends on the worker too."""
    port.kept[STAGE, "one"], port.hold = LARGE, asyncio.Event()
    frames = snapshots.export_snapshot(STAGE, "one")
    assert isinstance(await anext(frames), SnapshotHeader)
    await until(lambda: port.exporting == 1)
    await frames.aclose()
    await until(lambda: port.exporting == 0)
    task = asyncio.create_task(all_of(snapshots.export_snapshot(STAGE, "one")))
    await until(lambda: port.exporting == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: port.exporting == 0)


async def test_a_slow_reader_holds_an_export_back(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """A worker doesn't read a whole snapshot into the connection before anyone takes it."""
    taken = 0

    async def export(*_: object) -> AsyncIterator[SnapshotFrame]:
        nonlocal taken
        for frame in [*LARGE[:-1], *[LARGE[1]] * 60, LARGE[-1]]:
            taken += 1
            yield frame

    port.export_snapshot = export
    frames = snapshots.export_snapshot(STAGE, "one")
    await anext(frames)
    assert await settled(lambda: taken) < 60
    assert len(await all_of(frames)) == len(LARGE) + 59


class Wordless(pb_grpc.SnapshotServiceServicer):
    """Ends every import without an answer."""

    def register(self, server: grpc.aio.Server) -> str:
        pb_grpc.add_SnapshotServiceServicer_to_server(self, server)
        return SERVICE

    async def PrefixSnapshotImport(self, _: object, context: grpc.aio.ServicerContext) -> None:
        await context.read()


async def test_an_import_without_an_answer_has_failed(serve: Serve, dial: Dial) -> None:
    """A worker that ends the call with OK and says nothing has not kept anything."""
    server = await serve(Wordless().register)
    snapshots = RemoteSnapshots(await dial(server.address), server.address)
    with pytest.raises(Unavailable, match="ended an import without a word"):
        await snapshots.import_snapshot(Source(SMALL).frames)


# --- streams that are no import


def raw_import(channel: grpc.aio.Channel) -> ClientStream:
    return ClientStream(pb_grpc.SnapshotServiceStub(channel).PrefixSnapshotImport())


def message(frame: SnapshotFrame) -> snapshot_pb2.PrefixSnapshotImportRequest:
    request = snapshot_pb2.PrefixSnapshotImportRequest()
    frame_to_message(frame, request)
    return request


EMPTY = snapshot_pb2.PrefixSnapshotImportRequest()


@pytest.mark.parametrize(
    ("frames", "text", "begun"),
    [
        ([], "ended without its trailer", False),
        ([SMALL[1]], "the first frame of an import must be the header", False),
        ([SMALL[-1]], "the first frame of an import must be the header", False),
        ([EMPTY], "frame is missing", False),
        ([replace(HEADER, parent_id="p"), *SMALL[1:]], "first_token is 0 and parent_id 'p'", False),
        ([HEADER], "ended without its trailer", True),
        (SMALL[:-1], "ended without its trailer", True),
        ([HEADER, HEADER, *SMALL[1:]], "a second header came", True),
        ([*SMALL[:2], HEADER, *SMALL[2:]], "a second header came", True),
        ([HEADER, EMPTY], "frame is missing", True),
        ([HEADER, *SMALL[2:]], "chunk at 700, expected 0", True),
        ([*SMALL[:2], *SMALL[1:]], "chunk at 0, expected 700", True),
        ([*SMALL[:2], SnapshotChunk(699, b"x"), *SMALL[2:]], "chunk at 699, expected 700", True),
        ([HEADER, SnapshotChunk(0, b"")], "chunk.data holds 0 bytes", True),
        ([HEADER, SnapshotChunk(0, bytes(CHUNK_BYTES + 1))], f"chunk.data holds {CHUNK_BYTES + 1} bytes", True),
        ([*SMALL[:-1], SnapshotTrailer(2570, (bytes(31),) * 4)], "must hold digests of 32 bytes", True),
    ],
)
async def test_streams_that_are_no_import_are_refused(
    port: FakeSnapshots, channel: grpc.aio.Channel, frames: list[Any], text: str, begun: bool
) -> None:
    """Frames out of order, doubled, missing or of a wrong size blame the caller; what had begun is aborted once."""
    call = pb_grpc.SnapshotServiceStub(channel).PrefixSnapshotImport()
    stream = ClientStream(call)
    if await stream.send(*(frame if frame is EMPTY else message(frame) for frame in frames)):
        await call.done_writing()
    refusal = await stream.ended()
    assert isinstance(refusal, InvalidArgument)
    assert text in refusal.message
    assert len(port.imports) == begun
    assert port.kept == {}
    await until(lambda: all(one.aborted == 1 for one in port.imports))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"owner": 1}, "snapshot_id"),
        ({"owner": 1, "snapshot_id": "a\n"}, "snapshot_id"),
        ({"owner": 1, "snapshot_id": "a", "parent_id": ""}, "parent_id"),
        ({"snapshot_id": "a"}, "owner"),
        ({"owner": 3, "snapshot_id": "a"}, "owner"),
    ],
)
async def test_exports_of_nothing_are_refused(
    port: FakeSnapshots, channel: grpc.aio.Channel, fields: dict[str, Any], field: str
) -> None:
    """Unknown owners and names that are none are refused by field before the port is asked."""
    call = channel.unary_stream(
        f"/{SERVICE}/PrefixSnapshotExport", snapshot_pb2.PrefixSnapshotExportRequest.SerializeToString
    )(snapshot_pb2.PrefixSnapshotExportRequest(**fields))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in raised.value.details()
    assert port.asked == []


# --- list


async def test_listing(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """All that is kept comes with its name, owner, tokens and what it builds on; nothing where nothing is."""
    assert await snapshots.list_snapshots() == []
    longer = replace(HEADER, snapshot_id="two", first_token=40, token_count=41, parent_id="one", owner=DRAFT)
    for header in (HEADER, longer):
        port.kept[header.owner, header.snapshot_id] = [header]
    assert await snapshots.list_snapshots() == [
        KeptSnapshot("one", STAGE, 40, None),
        KeptSnapshot("two", DRAFT, 41, "one"),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"snapshot_id": "", "owner": 1, "token_count": 1}, "snapshot_id"),
        ({"snapshot_id": "a", "owner": 0, "token_count": 1}, "owner"),
        ({"snapshot_id": "a", "owner": 2, "token_count": 0}, "token_count"),
        ({"snapshot_id": "a", "owner": 2, "token_count": 1, "parent_id": "x" * 129}, "parent_id"),
    ],
)
def test_what_cannot_be_kept_is_not_believed(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        kept_from_message(snapshot_pb2.SnapshotListResponse(**fields))


# --- free


async def test_freeing(port: FakeSnapshots, snapshots: RemoteSnapshots) -> None:
    """All names go through in order, none too, and the freed bytes come back."""
    assert await snapshots.free_snapshots(["a", "b", "a"]) == 3 << 40
    assert await snapshots.free_snapshots([]) == 0
    assert port.freed == [["a", "b", "a"], []]


async def test_a_worker_that_is_gone(serve: Serve, dial: Dial, port: FakeSnapshots) -> None:
    """Every call to a worker that is gone is Unavailable, naming it."""
    server = await serve(SnapshotServicer(port).register)
    snapshots = RemoteSnapshots(await dial(server.address), server.address)
    await server.stop(0)
    for call in (
        snapshots.free_snapshots(["a"]),
        snapshots.list_snapshots(),
        snapshots.import_snapshot(Source(SMALL).frames),
        all_of(snapshots.export_snapshot(STAGE, "one")),
    ):
        with pytest.raises(Unavailable) as raised:
            await call
        assert raised.value.where["address"] == server.address
