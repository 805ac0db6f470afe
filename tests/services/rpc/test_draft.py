"""Draft sessions over real sockets: what goes through, how they end, and that they are always freed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest

from flashsplit.shard.v1 import draft_pb2, draft_service_pb2 as pb, draft_service_pb2_grpc as pb_grpc, stage_pb2
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound, Unavailable
from services.messages.draft_session import OpenDraft, Propose
from services.messages.steps import FeatureSlice, SnapshotRestore, SnapshotSave
from services.messages.tensors import CHUNK_BYTES, WireTensor
from services.rpc.draft import DraftServicer, RemoteDraft, RemoteDraftSession
from services.streams.client_stream import ClientStream
from services.telemetry.trace_context import Trace
from tests.services.conftest import Dial, Serve
from tests.services.fakes import PARTS, FakeDraft, FakeDraftSession, same_bytes, tensor, until

ROOT = Path(__file__).parents[3]
OPEN = OpenDraft("request-1", "beef", 512, Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"))


@pytest.fixture
def port() -> FakeDraft:
    return FakeDraft()


@pytest.fixture
async def draft(port: FakeDraft, serve: Serve, dial: Dial) -> RemoteDraft:
    server = await serve(DraftServicer(port).register)
    return RemoteDraft(await dial(server.address), server.address)


async def test_a_whole_session(port: FakeDraft, draft: RemoteDraft) -> None:
    """Features and proposals go through in order, draft tokens come back, and closing frees the session once."""
    session = await draft.open(OPEN)
    assert (session.host, session.device) == ("beta", "hip:0")
    assert port.session.request == OPEN
    slices = [FeatureSlice(0, tensor(3, 8, dtype="float32")), FeatureSlice(3, tensor(1, 8), 2)]
    for piece in slices:
        await session.feature_slice(piece)
    asked = Propose(7, 4, 99, 3)
    assert await session.propose(asked) == (1, 2, 3)
    assert port.session.proposes == [asked]
    assert port.session.slices == slices
    assert port.session.closed == 0
    await session.close()
    assert (port.session.closed, port.session.why) == (1, "closed")


async def test_snapshots_within_a_session(port: FakeDraft, draft: RemoteDraft) -> None:
    """Saves and restores go through between features and proposals, each answered by its part."""
    restore, save = SnapshotRestore("a", 2, (5, 6)), SnapshotSave("b", 5, "a")
    session = await draft.open(OPEN)
    assert await session.restore_snapshot(restore) == PARTS[1]
    await session.feature_slice(FeatureSlice(2, tensor(3, 8)))
    assert await session.save_snapshot(save) == PARTS[0]
    assert await session.propose(Propose(7, 5, 99, 3)) == (1, 2, 3)
    assert port.session.snapshots == [restore, save]
    assert len(port.session.slices) == 1
    await session.close()


@pytest.mark.parametrize("restoring", [False, True])
async def test_a_refused_snapshot_is_raised(restoring: bool, port: FakeDraft, draft: RemoteDraft) -> None:
    """What the draft refuses to keep or to take up is raised with its reason and the draft's place."""
    session = await draft.open(OPEN)
    port.fault = NotFound("not kept here", reason="SNAPSHOT_MISSING")
    with pytest.raises(NotFound, match="not kept here") as raised:
        await (
            session.restore_snapshot(SnapshotRestore("a", 0))
            if restoring
            else session.save_snapshot(SnapshotSave("a", 1))
        )
    assert raised.value.reason == "SNAPSHOT_MISSING"
    assert (raised.value.where["host"], raised.value.where["device"]) == ("beta", "hip:0")
    await until(lambda: port.session.closed == 1)
    await session.close()


async def test_large_tensors_both_ways(port: FakeDraft, draft: RemoteDraft) -> None:
    """Features, embedding rows and hidden rows of several MiB arrive unchanged."""
    hidden = tensor(5, CHUNK_BYTES // 2, fill=3)
    port.draft_tokens = hidden
    piece, embed = tensor(9, CHUNK_BYTES // 4, dtype="float32"), tensor(2, CHUNK_BYTES, fill=2)
    session = await draft.open(OPEN)
    await session.feature_slice(FeatureSlice(0, piece))
    answer = await session.propose(Propose(1, 9, 5, 5, embed))
    assert isinstance(answer, WireTensor)
    assert same_bytes(answer, hidden)
    assert same_bytes(port.session.slices[0].features, piece)
    assert same_bytes(port.session.proposes[0].embed, embed)
    await session.close()


async def test_no_draft_tokens_are_an_answer_too(port: FakeDraft, draft: RemoteDraft) -> None:
    """An empty list of draft tokens comes back as one."""
    port.draft_tokens = ()
    session = await draft.open(OPEN)
    assert await session.propose(Propose(0, 0, 0, 0)) == ()
    await session.close()


@pytest.mark.parametrize("draft_tokens", [(1,), tensor(1, 8)])
async def test_a_refusal_is_the_status(draft_tokens: object, port: FakeDraft, draft: RemoteDraft) -> None:
    """What the draft refuses is raised by propose() with the draft's place; so is whatever is asked afterwards."""
    session = await draft.open(OPEN)
    port.fault = FailedPrecondition("features end at 3", reason="OUT_OF_STEP", field="position")
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="features end at 3") as raised:
            await session.propose(Propose(1, 4, 5, 5))
        assert raised.value.reason == "OUT_OF_STEP"
        assert raised.value.where["host"] == "beta"
        assert raised.value.where["device"] == "hip:0"
        assert raised.value.where["address"].startswith("unix:")
    await until(lambda: port.session.closed == 1)
    await session.close()


async def test_a_refused_slice_is_told_to_the_writer(port: FakeDraft, draft: RemoteDraft) -> None:
    """Slices have no answers: the refusal of one is raised by a later call, with the draft's own status."""
    for _ in range(20):
        port.fault = None
        session = await draft.open(OPEN)
        port.fault = InvalidArgument("wrong shape", field="features")
        with pytest.raises(InvalidArgument, match="wrong shape"):
            await write_on(session)
        await session.close()


async def write_on(session: RemoteDraftSession) -> None:
    for _ in range(200):
        await session.feature_slice(FeatureSlice(0, tensor(4, 8)))
    await session.propose(Propose(1, 4, 5, 5))


async def test_a_refused_opening(port: FakeDraft, draft: RemoteDraft) -> None:
    """The refusal of a session names the address."""
    port.fault = FailedPrecondition("another draft", reason="FINGERPRINT_MISMATCH")
    with pytest.raises(FailedPrecondition, match="another draft") as raised:
        await draft.open(OPEN)
    assert raised.value.where["address"].startswith("unix:")


async def test_close_is_safe_twice(port: FakeDraft, draft: RemoteDraft) -> None:
    """Closing twice frees the session once, before the first close returns."""
    session = await draft.open(OPEN)
    await session.close()
    assert port.session.closed == 1
    await session.close()
    assert port.session.closed == 1


async def test_close_while_a_proposal_hangs(port: FakeDraft, draft: RemoteDraft) -> None:
    """Closing ends a session whose draft does not answer; whoever waits for draft tokens is told."""

    async def hang(session: FakeDraftSession, request: Propose) -> tuple[int, ...]:
        session.proposes.append(request)
        await asyncio.sleep(60)
        return ()

    session = await draft.open(OPEN)
    port.session.propose = hang.__get__(port.session)
    asking = asyncio.create_task(session.propose(Propose(0, 0, 0, 1)))
    await until(lambda: len(port.session.proposes) == 1)
    async with asyncio.timeout(1.5):
        await session.close()
        with pytest.raises(Unavailable, match="ended the session"):
            await asking
    await until(lambda: port.session.closed == 1)


async def test_a_cancelled_proposal_frees_the_session(port: FakeDraft, draft: RemoteDraft) -> None:
    """A caller that is cancelled while it waits for draft tokens leaves no session behind."""

    begun = asyncio.Event()

    async def hang(request: Propose) -> tuple[int, ...]:
        begun.set()
        await asyncio.sleep(60)
        return ()

    session = await draft.open(OPEN)
    port.session.propose = hang
    asking = asyncio.create_task(session.propose(Propose(0, 0, 0, 1)))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: port.session.closed == 1)


async def test_a_client_process_that_vanishes(port: FakeDraft, serve: Serve) -> None:
    """When a client is killed, its session is freed, once, within a second."""
    server = await serve(DraftServicer(port).register)
    code = (
        "import asyncio\n"
        "from services.net.channel import connect\n"
        "from services.messages.draft_session import OpenDraft\n"
        "from services.rpc.draft import RemoteDraft\n"
        "async def main():\n"
        f"    channel = await connect({server.address!r}, timeout_s=5)\n"
        "    session = await RemoteDraft(channel, 'a').open(OpenDraft('r', 'f', 1))\n"
        "    print('open', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, env=os.environ, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    process.send_signal(signal.SIGKILL)
    await until(lambda: port.session.closed == 1)
    await process.wait()


async def test_a_server_that_stops_mid_session(port: FakeDraft, serve: Serve, dial: Dial) -> None:
    """When the draft's server is gone, every call raises Unavailable with the address."""
    server = await serve(DraftServicer(port).register)
    session = await RemoteDraft(await dial(server.address), server.address).open(OPEN)
    await server.stop(0)
    with pytest.raises(Unavailable, match=f"{server.address} does not answer"):
        await session.propose(Propose(0, 0, 0, 1))
    with pytest.raises(Unavailable, match=f"{server.address} does not answer"):
        await session.feature_slice(FeatureSlice(0, tensor(1, 8)))
    await session.close()
    await until(lambda: port.session.closed == 1)


@pytest.mark.parametrize("answer", [pb.RunDraftResponse(opened=draft_pb2.DraftOpened()), pb.RunDraftResponse()])
async def test_an_answer_of_another_kind_is_not_taken_for_draft_tokens(
    answer: pb.RunDraftResponse, serve: Serve, dial: Dial
) -> None:
    """A frame that is no answer to a proposal is refused."""

    class Scripted(DraftServicer):
        async def RunDraft(self, _: object, context: grpc.aio.ServicerContext) -> None:
            await context.read()
            await context.write(pb.RunDraftResponse(opened=draft_pb2.DraftOpened(host="h", device="d")))
            await context.read()
            await context.write(answer)

    server = await serve(Scripted(FakeDraft()).register)
    session = await RemoteDraft(await dial(server.address), server.address).open(OPEN)
    with pytest.raises(FlashsplitError, match="is not expected here"):
        await session.propose(Propose(0, 0, 0, 1))
    await session.close()


Frame = pb.RunDraftRequest
OPENING = Frame(open=draft_pb2.DraftOpen(request_id="r"))


def features(**tensor_fields: object) -> pb.RunDraftRequest:
    message = stage_pb2.FeatureSlice()
    message.features.SetInParent()
    for name, value in tensor_fields.items():
        if name == "shape":
            message.features.shape.extend(value)
        else:
            setattr(message.features, name, value)
    return Frame(feature_slice=message)


def propose(rows: pb.RunDraftRequest) -> pb.RunDraftRequest:
    """A proposal with the tensor of a feature slice as its embedding rows."""
    frame = Frame()
    frame.propose.embed.rows.CopyFrom(rows.feature_slice.features)
    return frame


BEGUN = features(dtype=1, shape=[4])


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "the first frame of a session must be open"),
        ([Frame()], "the first frame of a session must be open"),
        ([BEGUN], "the first frame of a session must be open"),
        ([Frame(open={"traceparent": "00-0-0-0"})], "traceparent is '00-0-0-0'"),
        ([Frame(open={"request_id": "\n"})], "request_id has 1 characters"),
        ([OPENING, OPENING], "frame open is not expected here"),
        ([OPENING, Frame()], "frame None is not expected here"),
        ([OPENING, Frame(chunk={"data": b"x"})], "frame chunk is not expected here"),
        ([OPENING, features()], "features.dtype is missing"),
        ([OPENING, features(dtype=1, shape=[-4])], "features.shape is [-4]"),
        ([OPENING, features(dtype=1, shape=[1 << 30], data=b"x")], "features takes 4294967296 bytes"),
        ([OPENING, BEGUN], "the pieces of a tensor are missing"),
        ([OPENING, BEGUN, BEGUN], "the pieces of a tensor are missing"),
        ([OPENING, BEGUN, Frame(chunk={"data": bytes(17)})], "expected to go on at 0 of 16"),
        ([OPENING, BEGUN, Frame(chunk={"data": b"x", "tensor_index": 1})], "chunk.tensor_index is 1"),
        ([OPENING, propose(features(dtype=9))], "embed.rows.dtype is 9"),
        ([OPENING, propose(BEGUN), OPENING], "the pieces of a tensor are missing"),
    ],
)
async def test_frames_out_of_order(
    frames: list[pb.RunDraftRequest], text: str, port: FakeDraft, serve: Serve, dial: Dial
) -> None:
    """Frames that make no sense end the stream with INVALID_ARGUMENT in words, and the session is freed."""
    server = await serve(DraftServicer(port).register)
    channel = await dial(server.address)
    call = pb_grpc.DraftServiceStub(channel).RunDraft()
    stream = ClientStream(call)
    await stream.send(*frames)
    await call.done_writing()
    error = await stream.ended()
    assert type(error) is InvalidArgument
    assert text in error.message
    for session in port.sessions:
        assert session.slices == session.proposes == []
        await until(lambda session=session: session.closed == 1)
    session = await RemoteDraft(channel, server.address).open(OPEN)
    assert await session.propose(Propose(0, 0, 0, 2)) == (1, 2)
    await session.close()
