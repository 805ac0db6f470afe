"""Stage sessions over real sockets: what goes through, how they end, and that they are always freed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import structlog

from flashsplit.shard.v1 import stage_pb2, stage_service_pb2 as pb, stage_service_pb2_grpc as pb_grpc, tensor_pb2
from services.errors import (
    CANCELLED,
    CLOSED,
    LEFT,
    FailedPrecondition,
    FlashsplitError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from services.messages.session_frames import open_to_message
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    FeatureSlice,
    Forward,
    Location,
    Proposal,
    SessionRest,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StepKind,
    StepLimit,
)
from services.messages.tensors import CHUNK_BYTES
from services.net.channel import MAX_MESSAGE_BYTES
from services.rpc.shared_memory import SharedMemoryServicer, open_link
from services.rpc.stage import MAX_STEPS_AHEAD, RemoteStage, RemoteStageSession, StageServicer
from services.same_host.link import SharedLinks
from services.streams.client_stream import ClientStream
from tests.services.conftest import Dial, Serve
from tests.services.fakes import (
    IDENTITY,
    OPEN,
    PARTS,
    FakeStage,
    FakeStageSession,
    commit,
    prefill,
    same_bytes,
    settled,
    stays,
    tensor,
    until,
)

ROOT = Path(__file__).parents[3]
BELOW = Location(2, "beta", "hip:0", "beta:7001")


@pytest.fixture
def port() -> FakeStage:
    return FakeStage()


@pytest.fixture(params=["grpc", "lane"])
async def stage(
    request: pytest.FixtureRequest, port: FakeStage, serve: Serve, dial: Dial
) -> AsyncIterator[RemoteStage]:
    """With all frames in gRPC's stream, and with those of sessions past it."""
    links = SharedLinks()
    server = await serve(StageServicer(port, links).register, SharedMemoryServicer(links).register)
    channel = await dial(server.address)
    if request.param == "grpc":
        yield RemoteStage(channel, server.address)
        return
    shared = await open_link(channel, server.address)
    yield RemoteStage(channel, server.address, shared.link)
    await shared.close()


async def take(session: RemoteStageSession, count: int) -> list[Event]:
    events = session.events()
    async with asyncio.timeout(5.0):
        return [await anext(events) for _ in range(count)]


class Reader:
    """Reads a session's events in a task of its own."""

    def __init__(self, session: RemoteStageSession) -> None:
        self.events: list[Event] = []
        self.task = asyncio.create_task(self._read(session))

    async def _read(self, session: RemoteStageSession) -> None:
        async for event in session.events():
            self.events.append(event)

    async def cancel(self) -> None:
        """Cancel the task, and check that this is how it ends."""
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def waiting_reader(session: RemoteStageSession) -> Reader:
    """A reader that has had the answer to one step, and waits for more."""
    reader = Reader(session)
    await session.forward(prefill())
    await until(lambda: bool(reader.events))
    return reader


@pytest.mark.parametrize(
    ("stage_number", "why", "forgotten"),
    [(1, CLOSED, True), (1, CANCELLED, True), (1, LEFT, False), (0, CLOSED, False)],
)
async def test_a_later_stage_hears_that_none_was_lost(
    port: FakeStage, stage: RemoteStage, stage_number: int, why: str, forgotten: bool
) -> None:
    """Whoever ends a session that may rest says so, unless a stage was lost; a first stage knows by itself."""
    rest = SessionRest("a-name-nobody-guesses", 1000)
    session = await stage.open(replace(OPEN, stage=stage_number, rest=rest))
    await session.close(why)
    await session.close(why)
    if forgotten:
        await until(lambda: bool(port.forgotten))
    await until(lambda: bool(port.session.closed))
    assert port.forgotten == ([rest.session_id] if forgotten else [])


async def test_a_whole_session(port: FakeStage, stage: RemoteStage) -> None:
    """Opening, steps of every kind and answers of every kind go through, in order; closing frees the session once."""

    async def answer(session: FakeStageSession, forward: Forward) -> None:
        session.out.put_nowait(replace(commit(forward), token_ids=(9,) if forward.kind is not StepKind.PREFILL else ()))
        if forward.propose_tokens:
            session.out.put_nowait(Proposal(forward.step, (4, 5, 6), 77))

    port.answer = answer
    session = await stage.open(OPEN)
    assert port.session.request == OPEN
    assert session.stages == (IDENTITY,)
    forwards = [
        prefill(),
        Forward(1, 3, (4,), StepKind.DECODE, 3),
        Forward(2, 4, (5, 6, 7), StepKind.VERIFY, 0),
    ]
    for forward in forwards:
        await session.forward(forward)
    events = await take(session, 4)
    assert port.session.forwards == forwards
    assert [type(event) for event in events] == [Commit, Commit, Proposal, Commit]
    assert events[1] == replace(commit(forwards[1]), token_ids=(9,))
    assert events[2] == Proposal(1, (4, 5, 6), 77)
    assert port.session.closed == 0
    await session.close()
    assert port.session.closed == 1


async def test_snapshots_within_a_session(port: FakeStage, stage: RemoteStage) -> None:
    """Restoring, stepping and saving go through in order, with every field, and so do their answers."""
    restore = SnapshotRestore("a", 3, (1, 2, 3))
    saves = [SnapshotSave("b", 6), SnapshotSave("c", 6, "a")]
    session = await stage.open(OPEN)
    await session.restore_snapshot(restore)
    await session.forward(prefill(0, 3))
    for save in saves:
        await session.save_snapshot(save)
    assert await take(session, 4) == [
        SnapshotRestored("a", 3, PARTS),
        commit(prefill(0, 3)),
        SnapshotSaved("b", 6, PARTS),
        SnapshotSaved("c", 6, PARTS),
    ]
    assert (port.session.restores, port.session.saves) == ([restore], saves)
    await session.close()


async def test_a_restore_of_a_long_prompt(port: FakeStage, stage: RemoteStage) -> None:
    """The tokens of a whole context fit into one frame."""
    restore = SnapshotRestore("a", 1 << 20, tuple(range(200_000, 200_000 + (1 << 20))))
    session = await stage.open(OPEN)
    await session.restore_snapshot(restore)
    await take(session, 1)
    assert port.session.restores == [restore]
    await session.close()


@pytest.mark.parametrize(
    "fault", [NotFound("not kept here", reason="SNAPSHOT_MISSING"), FailedPrecondition("length is 3", field="length")]
)
async def test_a_refused_snapshot_is_the_status(fault: FlashsplitError, port: FakeStage, stage: RemoteStage) -> None:
    """What saving or restoring raises ends the events with its own status, reason and place."""
    for method in ("save_snapshot", "restore_snapshot"):
        session = await stage.open(OPEN)
        theirs = port.session

        async def refuse(_: object) -> None:
            raise fault

        setattr(theirs, method, refuse)
        await getattr(session, method)(SnapshotSave("a", 3) if method == "save_snapshot" else SnapshotRestore("a", 0))
        with pytest.raises(type(fault), match=fault.message) as raised:
            await anext(session.events())
        assert raised.value.reason == fault.reason
        assert raised.value.where.get("field") == fault.where.get("field")
        assert (raised.value.where["stage"], raised.value.where["device"]) == ("1", "cuda:0")
        await until(lambda closed=theirs: closed.closed == 1)
        await session.close()


@pytest.mark.parametrize("kind", ["save", "restore"])
async def test_unanswered_snapshots_are_bounded(kind: str, port: FakeStage, stage: RemoteStage) -> None:
    """Snapshots that a stage has not answered count as steps ahead; when they are answered, everything goes on."""
    session = await stage.open(OPEN)
    theirs, taken = port.session, 0

    async def silent(_: object) -> None:
        nonlocal taken
        taken += 1

    theirs.save_snapshot = theirs.restore_snapshot = silent
    for number in range(100):
        if kind == "save":
            await session.save_snapshot(SnapshotSave(str(number), 1))
        else:
            await session.restore_snapshot(SnapshotRestore(str(number), 0))
    await until(lambda: taken == MAX_STEPS_AHEAD)
    assert await stays(lambda: taken == MAX_STEPS_AHEAD)
    answer = SnapshotSaved("", 1, ()) if kind == "save" else SnapshotRestored("", 1, ())
    for _ in range(100):
        theirs.out.put_nowait(answer)
    assert await take(session, 100) == [answer] * 100
    assert taken == 100
    await session.close()


async def test_what_follows_may_be_changed_any_number_of_times(port: FakeStage, stage: RemoteStage) -> None:
    """It has no answer, and so is no step ahead; it comes in its order."""
    session = await stage.open(OPEN)
    limits = [StepLimit(number, number % 8) for number in range(2 * MAX_STEPS_AHEAD)]
    for limit in limits:
        await session.limit_steps(limit)
    await session.forward(prefill())
    assert await take(session, 1) == [commit(prefill())]
    assert port.session.limits == limits
    await session.close()


async def test_a_large_frame_with_many_captures(port: FakeStage, stage: RemoteStage) -> None:
    """An activation and 16 feature slices of several MiB each arrive unchanged, far above one message's limit."""
    features = tuple(FeatureSlice(0, tensor(3, CHUNK_BYTES // 2 + index, fill=index), index) for index in range(16))
    sent = Forward(0, 0, (1, 2, 3), StepKind.PREFILL, 0, tensor(3, CHUNK_BYTES), features)
    session = await stage.open(OPEN)
    await session.forward(sent)
    await take(session, 1)
    [got] = port.session.forwards
    assert got.activation is not None
    assert same_bytes(got.activation, sent.activation)
    assert len(got.features) == 16
    for theirs, ours in zip(got.features, features, strict=True):
        assert (theirs.start_position, theirs.capture_index) == (0, ours.capture_index)
        assert same_bytes(theirs.features, ours.features)
    await session.close()


async def test_steps_overlap(port: FakeStage, stage: RemoteStage) -> None:
    """A step may be sent before the one before is answered."""

    async def hold(session: FakeStageSession, forward: Forward) -> None:
        if forward.step == 2:
            for held in session.forwards:
                session.out.put_nowait(commit(held))

    port.answer = hold
    session = await stage.open(OPEN)
    for step in range(3):
        await session.forward(prefill(step))
    assert [event.step for event in await take(session, 3)] == [0, 1, 2]
    await session.close()


async def test_a_lost_draft_leaves_the_session_usable(port: FakeStage, stage: RemoteStage) -> None:
    """After DRAFT_LOST steps go on and are answered."""
    lost = Failure(FailureReason.DRAFT_LOST, "the draft is gone", replace(BELOW, stage=None), "UNAVAILABLE")
    session = await stage.open(OPEN)
    port.session.out.put_nowait(lost)
    assert await take(session, 1) == [lost]
    await session.forward(prefill())
    assert await take(session, 1) == [commit(prefill())]
    assert port.session.closed == 0
    await session.close()


@pytest.mark.parametrize("reason", [FailureReason.LINK_BROKEN, FailureReason.STAGE_FAILED])
async def test_any_other_failure_ends_the_stream_with_ok(
    reason: FailureReason, port: FakeStage, stage: RemoteStage
) -> None:
    """After any other failure the events end without an error, and the session is freed."""
    failure = Failure(reason, "stage 2 is gone", BELOW, "UNAVAILABLE")
    session = await stage.open(OPEN)
    port.session.out.put_nowait(failure)
    assert [event async for event in session.events()] == [failure]
    await until(lambda: port.session.closed == 1)
    await session.forward(prefill())
    assert [event async for event in session.events()] == []


async def test_a_failure_is_not_lost_to_a_writer(port: FakeStage, stage: RemoteStage) -> None:
    """A caller that writes on while the stream ends still gets all answers, the failure last, and no error."""
    failure = Failure(FailureReason.LINK_BROKEN, "stage 2 is gone", BELOW, "UNAVAILABLE")

    async def fail(session: FakeStageSession, forward: Forward) -> None:
        if forward.step == 2:
            session.out.put_nowait(commit(forward))
            session.out.put_nowait(failure)

    port.answer = fail
    for _ in range(20):
        session = await stage.open(OPEN)
        for step in range(60):
            await session.forward(prefill(step))
        assert [event async for event in session.events()] == [commit(prefill(2)), failure]
        await session.close()


@pytest.mark.parametrize("fault", [FailedPrecondition("out of step"), ResourceExhausted("no memory", device="cuda:9")])
async def test_a_status_is_not_lost_to_a_writer(fault: FlashsplitError, port: FakeStage, stage: RemoteStage) -> None:
    """A caller that writes on while its step is refused gets the stage's own status, every time."""

    async def refuse(session: FakeStageSession, forward: Forward) -> None:
        if forward.step == 2:
            raise fault

    port.answer = refuse
    for _ in range(50):
        session = await stage.open(OPEN)
        for step in range(60):
            await session.forward(prefill(step))
        with pytest.raises(type(fault), match=fault.message) as raised:
            await anext(session.events())
        assert raised.value.where["device"] == fault.where.get("device", "cuda:0")
        await until(lambda: port.session.closed == 1)
        await session.close()


async def test_an_error_among_the_events_is_the_status(port: FakeStage, stage: RemoteStage) -> None:
    """Answers before an error arrive first; the error then ends the events, once and for all."""
    session = await stage.open(OPEN)
    port.session.out.put_nowait(commit(prefill()))
    port.session.out.put_nowait(FailedPrecondition("the answer does not fit"))
    events = session.events()
    assert await anext(events) == commit(prefill())
    for reader in (events, session.events()):
        with pytest.raises(FailedPrecondition, match="does not fit"):
            await anext(reader)
    await session.close()


async def test_unread_answers_do_not_pile_up(port: FakeStage, stage: RemoteStage) -> None:
    """A caller that never reads is held back; when it reads, everything goes on and nothing is missing."""
    big = tuple(range(1 << 14))

    async def answer(session: FakeStageSession, forward: Forward) -> None:
        session.out.put_nowait(replace(commit(forward), token_ids=big))

    port.answer = answer
    session = await stage.open(OPEN)

    async def write() -> None:
        for step in range(400):
            await session.forward(prefill(step))

    writer = asyncio.create_task(write())
    assert await settled(lambda: len(port.session.forwards)) < 300
    assert port.session.out.qsize() <= MAX_STEPS_AHEAD
    events = await take(session, 400)
    assert [event.step for event in events if isinstance(event, Commit)] == list(range(400))
    await writer
    await session.close()


async def test_a_writer_is_held_back(port: FakeStage, stage: RemoteStage) -> None:
    """While a stage computes, a caller can put only a bounded amount on the way."""
    compute = asyncio.Event()

    async def slow(session: FakeStageSession, forward: Forward) -> None:
        await compute.wait()
        session.out.put_nowait(commit(forward))

    port.answer = slow
    session = await stage.open(OPEN)
    sent = 0

    async def write() -> None:
        nonlocal sent
        for step in range(40):
            await session.forward(Forward(step, 0, (1,), StepKind.PREFILL, 0, tensor(CHUNK_BYTES)))
            sent += 1

    writer = asyncio.create_task(write())
    assert await settled(lambda: sent) < 40
    compute.set()
    await take(session, 40)
    await writer
    await session.close()


# --- the end of a session


async def test_close_is_safe_twice_and_at_once(port: FakeStage, stage: RemoteStage) -> None:
    """Closing twice, one after the other or together, frees the session once."""
    session = await stage.open(OPEN)
    await asyncio.gather(session.close(), session.close())
    await session.close()
    assert port.session.closed == 1
    assert [event async for event in session.events()] == []


async def test_close_frees_before_it_returns(port: FakeStage, stage: RemoteStage) -> None:
    """After close() the session is gone on the stage, also where answers were not read."""
    for unread in (0, 1, 50):
        session = await stage.open(OPEN)
        for step in range(unread):
            await session.forward(prefill(step))
        await session.close()
        assert port.session.closed == 1


async def test_close_ends_a_reader(port: FakeStage, stage: RemoteStage) -> None:
    """Another task's events() end when the session is closed, without an error or a cancellation."""
    session = await stage.open(OPEN)

    async def read() -> list[Event]:
        return [event async for event in session.events()]

    reader = asyncio.create_task(read())
    await session.forward(prefill())
    await until(lambda: port.session.out.empty() and len(port.session.forwards) == 1)
    await session.close()
    async with asyncio.timeout(1.0):
        assert await reader == [commit(prefill())]


async def test_close_does_not_wait_for_a_hanging_stage(port: FakeStage, stage: RemoteStage) -> None:
    """A stage that hangs while it closes is waited for a moment only; a reader ends then as well."""

    async def hang(session: FakeStageSession, why: str) -> None:
        session.closed += 1
        await asyncio.sleep(2.0)

    session = await stage.open(OPEN)
    port.session.close = hang.__get__(port.session)

    async def read() -> list[Event]:
        return [event async for event in session.events()]

    reader = asyncio.create_task(read())
    async with asyncio.timeout(1.5):
        await session.close()
        assert await reader == []
    assert port.session.closed == 1


async def test_close_while_a_write_is_held_back(port: FakeStage, stage: RemoteStage) -> None:
    """Closing ends a session whose stage has stopped reading, and lets the held writer go."""

    async def never(session: FakeStageSession, forward: Forward) -> None:
        await asyncio.sleep(60)

    port.answer = never
    session = await stage.open(OPEN)
    sent = 0

    async def write() -> None:
        nonlocal sent
        for step in range(100):
            await session.forward(Forward(step, 0, (1,), StepKind.PREFILL, 0, tensor(CHUNK_BYTES)))
            sent += 1

    writer = asyncio.create_task(write())
    assert await settled(lambda: sent) < 100
    async with asyncio.timeout(1.5):
        await session.close()
        await asyncio.wait([writer])
    await until(lambda: port.session.closed == 1)


async def test_a_caller_that_goes_is_no_fault(port: FakeStage, stage: RemoteStage) -> None:
    """A caller that cancels while answers are on their way frees the session and leaves nothing in the log."""
    big = tuple(range(1 << 14))

    async def answer(session: FakeStageSession, forward: Forward) -> None:
        session.out.put_nowait(replace(commit(forward), token_ids=big))

    port.answer = answer
    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            session = await stage.open(OPEN)
            for number in range(60):
                await session.forward(prefill(number))
            reader = Reader(session)
            await until(lambda reader=reader: bool(reader.events))
            await reader.cancel()
            await until(lambda: port.session.closed == 1)
    assert lines == []


async def test_a_close_right_behind_a_cancelled_reader(port: FakeStage, stage: RemoteStage) -> None:
    """Who closes is not cancelled by it."""
    session = await stage.open(OPEN)
    reader = await waiting_reader(session)
    reader.task.cancel()
    await session.close()
    with pytest.raises(asyncio.CancelledError):
        await reader.task
    await until(lambda: port.session.closed == 1)


async def test_a_broken_lane_ends_the_session(port: FakeStage, serve: Serve, dial: Dial) -> None:
    """Where only the socket beside the shared memory goes, both sides notice."""
    links = SharedLinks()
    server = await serve(StageServicer(port, links).register, SharedMemoryServicer(links).register)
    channel = await dial(server.address)
    shared = await open_link(channel, server.address)
    session = await RemoteStage(channel, server.address, shared.link).open(OPEN)
    await session.forward(prefill(0))
    await take(session, 1)
    assert shared.link.frame_socket is not None
    shared.link.frame_socket.close()
    with pytest.raises(Unavailable, match="broke"):
        await take(session, 1)
    await until(lambda: port.session.closed == 1)
    await session.close()
    # Later ones do without it.
    session = await RemoteStage(channel, server.address, shared.link).open(OPEN)
    await session.forward(prefill(0))
    await take(session, 1)
    await session.close()
    await shared.close()


async def test_a_cancelled_reader_stays_cancelled(port: FakeStage, stage: RemoteStage) -> None:
    """Cancelling the task that reads cancels it, and frees the session."""
    session = await stage.open(OPEN)
    reader = await waiting_reader(session)
    await reader.cancel()
    await until(lambda: port.session.closed == 1)


async def test_a_cancelled_open_frees_the_session(port: FakeStage, stage: RemoteStage) -> None:
    """A caller that gives up while the stage still opens leaves nothing behind."""
    began, freed = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> FakeStageSession:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            freed.set()
        raise AssertionError

    port.open = slow
    opening = asyncio.create_task(stage.open(OPEN))
    await began.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with asyncio.timeout(1.0):
        await freed.wait()


async def test_freeing_goes_on_when_the_caller_cancels_meanwhile(port: FakeStage, stage: RemoteStage) -> None:
    """A caller that closes and then cancels doesn't interrupt the stage's own closing."""
    freed = asyncio.Event()

    async def slow(session: FakeStageSession, why: str) -> None:
        session.closed += 1
        await asyncio.sleep(0.3)
        freed.set()

    session = await stage.open(OPEN)
    port.session.close = slow.__get__(port.session)
    closing = asyncio.create_task(session.close())
    await until(lambda: port.session.closed == 1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(1.0):
        await freed.wait()
    assert port.session.closed == 1


async def test_a_client_process_that_vanishes(port: FakeStage, serve: Serve) -> None:
    """When a client is killed, its session is freed, once, within a second."""
    server = await serve(StageServicer(port).register)
    code = (
        "import asyncio\n"
        "from services.net.channel import connect\n"
        "from services.rpc.stage import RemoteStage\n"
        "from tests.services.fakes import OPEN, prefill\n"
        "async def main():\n"
        f"    channel = await connect({server.address!r}, timeout_s=5)\n"
        f"    session = await RemoteStage(channel, 'a').open(OPEN)\n"
        "    await session.forward(prefill())\n"
        "    print('open', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, env=os.environ, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    assert port.session.closed == 0
    process.send_signal(signal.SIGKILL)
    await until(lambda: port.session.closed == 1)
    await process.wait()
    assert await stays(lambda: port.session.closed == 1)


async def test_a_server_that_stops_mid_session(port: FakeStage, serve: Serve, dial: Dial) -> None:
    """When the stage's server is gone, events() and whoever opens next get Unavailable with the address."""
    server = await serve(StageServicer(port).register)
    stage = RemoteStage(await dial(server.address), server.address)
    session = await stage.open(OPEN)
    reader = await waiting_reader(session)
    await server.stop(0)
    with pytest.raises(Unavailable, match=f"{server.address} does not answer") as raised:
        await reader.task
    where = {"stage": "1", "host": "alpha", "device": "cuda:0", "address": server.address}
    assert raised.value.where == where
    await session.forward(prefill())
    await session.close()
    await until(lambda: port.session.closed == 1)
    with pytest.raises(Unavailable, match=f"{server.address} does not answer"):
        await stage.open(OPEN)


# --- callers that break the rules

Frame = pb.RunStageRequest
OPENING = Frame(open=open_to_message(OPEN))


def step(**fields: object) -> pb.RunStageRequest:
    message = stage_pb2.ForwardFromActivation(kind=1, token_ids=[1])
    for name, value in fields.items():
        getattr(message, name).MergeFrom(value)
    return Frame(forward_from_activation=message)


def chunk(offset: int, data: bytes = b"x", index: int = 0) -> pb.RunStageRequest:
    return Frame(chunk=tensor_pb2.TensorChunk(tensor_index=index, offset=offset, data=data))


F32_16 = tensor_pb2.Tensor(dtype=1, shape=[4])
HUGE = tensor_pb2.Tensor(dtype=1, shape=[1 << 40], data=b"x")


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "the first frame of a session must be open"),
        ([Frame()], "the first frame of a session must be open"),
        ([chunk(0)], "the first frame of a session must be open"),
        ([Frame(forward_from_tokens=stage_pb2.ForwardFromTokens(kind=1))], "the first frame of a session must be open"),
        ([Frame(open=stage_pb2.Open())], "layers is [0, 0)"),
        ([OPENING, OPENING], "frame open is not expected here"),
        ([OPENING, Frame()], "frame None is not expected here"),
        ([OPENING, chunk(0)], "frame chunk is not expected here"),
        ([OPENING, Frame(forward_from_tokens=stage_pb2.ForwardFromTokens())], "kind is 0"),
        ([OPENING, step()], "activation.dtype is missing"),
        ([OPENING, step(activation=HUGE)], "activation takes 4398046511104 bytes, more than"),
        ([OPENING, step(activation=F32_16, features=[stage_pb2.FeatureSlice(features=HUGE)])], "features takes"),
        ([OPENING, step(activation=F32_16, features=17 * [stage_pb2.FeatureSlice()])], "17 feature slices"),
        ([OPENING, step(activation=F32_16), chunk(1)], "expected to go on at 0 of 16"),
        ([OPENING, step(activation=F32_16), chunk(0, bytes(17))], "expected to go on at 0 of 16"),
        ([OPENING, step(activation=F32_16), chunk(0, b"")], "expected to go on at 0 of 16"),
        ([OPENING, step(activation=F32_16), chunk(0, index=1)], "chunk.tensor_index is 1"),
        ([OPENING, step(activation=F32_16), OPENING], "the pieces of a tensor are missing"),
        ([OPENING, step(activation=F32_16), chunk(0)], "the pieces of a tensor are missing"),
    ],
)
async def test_frames_out_of_order(
    frames: list[pb.RunStageRequest], text: str, port: FakeStage, serve: Serve, dial: Dial
) -> None:
    """Frames that make no sense end the stream with INVALID_ARGUMENT in words, and the session is freed."""
    server = await serve(StageServicer(port).register)
    channel = await dial(server.address)
    call = pb_grpc.StageServiceStub(channel).RunStage()
    stream = ClientStream(call)
    await stream.send(*frames)
    await call.done_writing()
    error = await stream.ended()
    assert type(error) is InvalidArgument
    assert text in error.message
    assert error.where["field"]
    for session in port.sessions:
        assert session.forwards == []
        await until(lambda session=session: session.closed == 1)
    # The server is none the worse for it.
    session = await RemoteStage(channel, server.address).open(OPEN)
    await session.forward(prefill())
    assert await take(session, 1) == [commit(prefill())]
    await session.close()


async def test_a_frame_above_the_limit(port: FakeStage, serve: Serve, dial: Dial) -> None:
    """A frame larger than any that our clients send is refused unread, and the session is freed."""
    server = await serve(StageServicer(port).register)
    raw = grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)])
    stream = ClientStream(pb_grpc.StageServiceStub(raw).RunStage())
    await stream.send(OPENING, step(activation=F32_16), chunk(0, bytes(MAX_MESSAGE_BYTES)))
    assert type(await stream.ended()) is ResourceExhausted
    await until(lambda: port.session.closed == 1)
    assert port.session.forwards == []
    await raw.close()


@pytest.mark.parametrize("answer", [None, pb.RunStageResponse(), pb.RunStageResponse(opened=stage_pb2.Opened())])
async def test_an_answer_that_opens_nothing(answer: pb.RunStageResponse | None, serve: Serve, dial: Dial) -> None:
    """A stage that ends at once, or names no stage, is refused instead of taken for an open session."""

    class Scripted(StageServicer):
        async def RunStage(self, _: object, context: grpc.aio.ServicerContext) -> None:
            if answer is not None:
                await context.write(answer)

    server = await serve(Scripted(FakeStage()).register)
    expected: Callable[..., FlashsplitError] = Unavailable if answer is None else InvalidArgument
    with pytest.raises(expected):
        await RemoteStage(await dial(server.address), server.address).open(OPEN)
