"""Steps of several sessions over one gRPC call: what arrives, and whom the call's end ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from flashsplit.shard.v1 import stage_service_pb2 as pb, stage_service_pb2_grpc as pb_grpc
from services.errors import FlashsplitError
from services.messages.batch_frames import BatchAnswer, BatchStep, StepBatch
from services.messages.frames import TensorLimits
from services.messages.steps import Commit, FeatureSlice, Forward, Proposal, StepKind
from services.messages.tensors import CHUNK_BYTES, WireTensor
from services.rpc.stage import RemoteBatches, RemoteStage, RemoteStageSession, StageServicer
from services.streams.batch_members import BatchMembers
from services.streams.step_lane import StepLane
from tests.services.conftest import Dial, Serve
from tests.services.fakes import OPEN, FakeStage, until

WIDE = CHUNK_BYTES // 4


@dataclass
class End:
    """Who listens at one end: what came for its sessions, and who was ended."""

    steps: list[Sequence[tuple[str, Forward]]] = field(default_factory=list)
    answers: list[Sequence[tuple[str, BatchAnswer]]] = field(default_factory=list)
    failed: list[tuple[Sequence[str], FlashsplitError]] = field(default_factory=list)

    def before_reading(self) -> None:
        raise AssertionError("nothing is to be done before a call's frames are read")

    def memory_for(self, _: int) -> bytearray:
        raise AssertionError("a call shares no memory")

    def take_steps(self, steps: Iterable[tuple[str, Forward]], *_: object) -> None:
        self.steps.append([*steps])

    def take_answers(self, answers: Sequence[tuple[str, BatchAnswer]]) -> None:
        self.answers.append(answers)

    def fail(self, members: Sequence[str], error: FlashsplitError) -> None:
        self.failed.append((members, error))

    def join(self, lane: StepLane | None, name: str) -> BatchMembers[Any]:
        """Take part as a session of that name; return its way of batches."""
        assert lane is not None
        assert lane.batches is not None
        lane.batches.join(lane.stream_id, name, self, TensorLimits(64 << 20, 2))
        return lane.batches


@dataclass
class Edge:
    """Two sessions over one call. ways: the call's end above and that below."""

    port: FakeStage
    servicer: StageServicer
    stage: RemoteStage
    sessions: list[RemoteStageSession]
    above: End
    below: End
    ways: tuple[BatchMembers[Any], BatchMembers[Any]]

    def batch(self, columns: int) -> StepBatch:
        lanes = [session.step_lane for session in self.sessions]
        forwards = [Forward(7, 19, (3,), StepKind.DECODE, more=9), Forward(2, 30, (5, 6), StepKind.VERIFY, 4)]
        steps = tuple(BatchStep(lane.stream_id, one) for lane, one in zip(lanes, forwards, strict=True) if lane)
        tensor = WireTensor("float32", (3, columns), bytes(range(12)) * columns)
        return StepBatch(steps, tensor, (FeatureSlice(0, tensor),))


@pytest.fixture
async def edge(serve: Serve, dial: Dial) -> AsyncIterator[Edge]:
    port = FakeStage()
    servicer = StageServicer(port)
    server = await serve(servicer.register)
    channel = await dial(server.address)
    batches = RemoteBatches(channel, server.address)
    stage = RemoteStage(channel, server.address, batches=batches)
    sessions = [await stage.open(OPEN, steps=True) for _ in range(2)]
    above, below = End(), End()
    ways = [above.join(session.step_lane, name) for session, name in zip(sessions, "ab", strict=True)]
    theirs = [below.join(session.above, name) for session, name in zip(port.sessions, "ab", strict=True)]
    assert ways[0] is ways[1]
    assert theirs[0] is theirs[1]
    yield Edge(port, servicer, stage, sessions, above, below, (ways[0], theirs[0]))
    await batches.close()


@pytest.mark.parametrize("columns", [2, WIDE])
async def test_a_batch_and_its_answers(edge: Edge, columns: int) -> None:
    """From other threads, with all rows, also where they take several messages; none goes by a lane of its own."""
    sent = edge.batch(columns)
    assert await asyncio.to_thread(edge.ways[0].send_steps, sent)
    await until(lambda: bool(edge.below.steps))
    [steps] = edge.below.steps
    row = bytes(range(12)) * columns
    whole = [(name, forward.step, len(forward.token_ids), bytes(forward.activation.data)) for name, forward in steps]
    assert whole == [("a", 7, 1, row[: 4 * columns]), ("b", 2, 2, row[4 * columns :])]
    assert [bytes(forward.features[0].features.data) for _, forward in steps] == [data for *_, data in whole]
    answers = [
        BatchAnswer(one.stream_id, Commit(one.forward.step, 20, (4,), ()), Proposal(one.forward.step, (1,), 5))
        for one in sent.steps
    ]
    assert await asyncio.to_thread(edge.ways[1].send_answers, answers)
    await until(lambda: bool(edge.above.answers))
    assert [*edge.above.answers[0]] == [*zip("ab", answers, strict=True)]
    lane = edge.sessions[0].step_lane
    assert lane is not None
    assert not lane.send(sent.steps[0].forward)


async def test_the_end_of_the_call_ends_its_sessions(edge: Edge) -> None:
    """But not one that is over; the next session has another call."""
    lane = edge.sessions[1].step_lane
    assert lane is not None
    lane.close()
    bad = edge.batch(2)
    # Fewer rows than its steps have.
    short = StepBatch(bad.steps, WireTensor("float32", (1, 2), bytes(8)))
    assert edge.ways[0].send_steps(short)
    await until(lambda: bool(edge.above.failed), 5)
    [(members, error)] = edge.above.failed
    assert (members, error.code_name) == (["a"], "INVALID_ARGUMENT")
    assert not edge.ways[0].send_steps(bad)
    session = await edge.stage.open(OPEN, steps=True)
    assert session.step_lane is not None
    assert session.step_lane.batches not in edge.ways


async def test_a_worker_that_stops_ends_its_calls(edge: Edge) -> None:
    """It would wait for its callers otherwise, who do not know."""
    edge.servicer.end_batches()
    await until(lambda: not edge.ways[0].send_steps(edge.batch(2)))
    session = await edge.stage.open(OPEN, steps=True)
    assert session.step_lane is None


async def test_a_worker_without_such_calls(serve: Serve, dial: Dial) -> None:
    """Sessions are opened all the same, and all their steps go by their own streams."""

    class Before(StageServicer):
        async def RunBatches(self, _: object, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    server = await serve(Before(FakeStage()).register)
    channel = await dial(server.address)
    stage = RemoteStage(channel, server.address, batches=RemoteBatches(channel, server.address))
    session = await stage.open(OPEN, steps=True)
    assert session.step_lane is None
    await session.close()


@pytest.mark.parametrize("first", [None, pb.RunBatchesRequest(step_batch={})])
async def test_the_first_frame_must_open_the_call(serve: Serve, dial: Dial, first: Any) -> None:
    """Whatever else comes is refused."""
    server = await serve(StageServicer(FakeStage()).register)
    call = pb_grpc.StageServiceStub(await dial(server.address)).RunBatches()
    if first is not None:
        await call.write(first)
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
