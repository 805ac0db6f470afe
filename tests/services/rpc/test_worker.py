"""Controlling a worker over a real socket: describing it and telling it what to load."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from flashsplit.shard.v1 import measure_pb2, model_pb2, worker_service_pb2 as pb, worker_service_pb2_grpc as pb_grpc
from services.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, rpc_failures_as_errors
from services.layers import LayerRange
from services.messages.description import PROTOCOL_MAJOR, PROTOCOL_MINOR, FeatureTransport, HeadPlace, worker_to_message
from services.messages.loading import FeatureCapture, LoadDraft, LoadProgress, LoadTarget
from services.messages.measure import ECHO_BYTES, MeasureRequest, speed_from_message
from services.model.quantization import Quantization, QuantizedTo
from services.rpc.link_speed import PIECES, ROUND_TRIPS
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.conftest import Dial, Serve
from tests.services.fakes import SPEEDS, WORKER, FakeWorker, until

TARGET = LoadTarget("/models/t", LayerRange(0, 3), "bfloat16", FeatureCapture("/models/d", FeatureTransport.SLICES))


@pytest.fixture
def port() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
async def channel(port: FakeWorker, serve: Serve, dial: Dial) -> grpc.aio.Channel:
    return await dial((await serve(WorkerServicer(port).register)).address)


@pytest.fixture
def worker(channel: grpc.aio.Channel) -> RemoteWorker:
    return RemoteWorker(channel, "here")


async def test_describe(worker: RemoteWorker) -> None:
    """A worker's description arrives as it is."""
    assert await worker.describe() == WORKER


@pytest.mark.parametrize(
    "part",
    [
        TARGET,
        LoadTarget("", LayerRange(5, 6)),
        LoadTarget("/models/t", LayerRange(0, 3), kv_dtype="float8_e4m3fn"),
        LoadTarget("/models/t", LayerRange(0, 3), host_experts=1 / 3),
        LoadTarget("/models/t", LayerRange(0, 3), batch_invariant_rows=16),
        LoadDraft("/models/d", "/models/t", HeadPlace.PROJECTED, FeatureTransport.SUM, "float32"),
        LoadTarget("/models/t", LayerRange(0, 3), quantization=Quantization(QuantizedTo.INT4, ends=True)),
        LoadDraft("/models/d", "", HeadPlace.SHARED, FeatureTransport.SLICES),
        LoadDraft(
            "/models/d",
            "/models/t",
            HeadPlace.LOADED,
            FeatureTransport.SLICES,
            quantization=Quantization(QuantizedTo.INT8),
            target_quantization=Quantization(QuantizedTo.FP8, ends=True),
        ),
    ],
)
async def test_load(part: LoadTarget | LoadDraft, port: FakeWorker, worker: RemoteWorker) -> None:
    """The part arrives field by field, progress comes back in order, then the new description."""
    progress: list[LoadProgress] = []
    assert await worker.load(part, progress.append) == WORKER
    assert port.loaded == [part]
    assert progress == [LoadProgress(1, 4), LoadProgress(4, 4)]
    await worker.load(part, ends_sessions=True)
    assert port.ends_sessions == [False, True]


async def test_a_refused_load(port: FakeWorker, worker: RemoteWorker) -> None:
    """Progress that was made before a refusal arrives, then the refusal with its place."""
    port.fault = NotFound("no checkpoint there", field="model_path")
    progress: list[LoadProgress] = []
    with pytest.raises(NotFound, match="no checkpoint there") as raised:
        await worker.load(TARGET, progress.append)
    assert progress == [LoadProgress(1, 4)]
    assert raised.value.where == {"field": "model_path", "address": "here"}


async def test_a_cancelled_load_lets_go(port: FakeWorker, worker: RemoteWorker) -> None:
    """A caller that gives up ends the worker's generator at once, so that another load may begin."""
    port.hold = asyncio.Event()
    began = asyncio.Event()
    loading = asyncio.create_task(worker.load(TARGET, lambda progress: began.set()))
    await began.wait()
    assert port.loading == 1
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await until(lambda: port.loading == 0)
    port.hold = None
    assert await worker.load(TARGET) == WORKER


async def test_another_major_version_is_refused_by_the_worker(channel: grpc.aio.Channel) -> None:
    """A caller of another major version is refused, both versions named."""
    request = pb.DescribeRequest(protocol_major=PROTOCOL_MAJOR + 1, protocol_minor=4)
    with pytest.raises(FailedPrecondition) as raised, rpc_failures_as_errors():
        await pb_grpc.WorkerServiceStub(channel).Describe(request)
    both = f"the caller speaks protocol {PROTOCOL_MAJOR + 1}.4 and this side {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    assert both in str(raised.value)
    assert raised.value.reason == "PROTOCOL_MISMATCH"


async def test_another_major_version_is_refused_by_the_caller(port: FakeWorker, worker: RemoteWorker) -> None:
    """A worker of another major version is refused by its address, whatever else it says."""
    port.description = replace(WORKER, protocol_major=PROTOCOL_MAJOR + 1, protocol_minor=2)
    with pytest.raises(FailedPrecondition, match=rf"the worker at here speaks protocol {PROTOCOL_MAJOR + 1}\.2"):
        await worker.describe()


async def test_versions_are_compared_before_anything_else(serve: Serve, dial: Dial) -> None:
    """A description that another major version would write differently is not read before the versions are compared."""

    class Scripted(WorkerServicer):
        async def Describe(self, request: object, context: object) -> pb.DescribeResponse:
            message = worker_to_message(replace(WORKER, protocol_major=PROTOCOL_MAJOR + 1))
            message.draft.head_place = 99
            return pb.DescribeResponse(worker=message)

    channel = await dial((await serve(Scripted(FakeWorker()).register)).address)
    with pytest.raises(FailedPrecondition, match="speaks protocol"):
        await RemoteWorker(channel, "a").describe()


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.LoadRequest(), "part is missing: name a target, a draft or a drafter to load"),
        (pb.LoadRequest(target=pb.LoadTarget()), "layers is [0, 0)"),
        (pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, dtype=42)), "dtype is 42"),
        (pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, host_experts=1.5)), "host_experts is 1.5"),
        (pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, host_experts=float("nan"))), "host_experts is nan"),
        (
            pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, quantization={"type": 9})),
            "quantization.type is 9, not one of 1 (int8), 2 (int4), 3 (fp8)",
        ),
        *(
            (
                pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, kv_dtype=number)),
                f"kv_dtype is {number}, not one of 0 (that of the weights), 5 (float8_e4m3fn)",
            )
            for number in (2, 4, 6, -1)
        ),
        (
            pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, capture=pb.FeatureCapture())),
            "feature_transport is missing",
        ),
        (
            pb.LoadRequest(target=pb.LoadTarget(layers={"last": 1}, capture=pb.FeatureCapture(transport=8))),
            "feature_transport is 8",
        ),
        (pb.LoadRequest(draft=pb.LoadDraft(head_place=0)), "head_place is 0"),
        (pb.LoadRequest(draft=pb.LoadDraft(head_place=1)), "feature_transport is missing"),
        (pb.LoadRequest(draft=pb.LoadDraft(head_place=1, feature_transport=1, dtype=-1)), "dtype is -1"),
    ],
)
async def test_senseless_loads_are_refused(
    request_: pb.LoadRequest, text: str, port: FakeWorker, channel: grpc.aio.Channel
) -> None:
    """A part that is missing, empty or of another version is refused by field and value before the worker sees it."""
    with pytest.raises(InvalidArgument) as raised, rpc_failures_as_errors():
        async for _ in pb_grpc.WorkerServiceStub(channel).Load(request_):
            pass
    assert text in raised.value.message
    assert port.loaded == []


async def test_a_load_without_a_description(serve: Serve, dial: Dial) -> None:
    """A worker that ends Load without saying what it holds is not taken for one that has loaded."""

    class Scripted(WorkerServicer):
        async def Load(self, request: object, context: grpc.aio.ServicerContext) -> None:
            await context.write(pb.LoadResponse(progress=pb.LoadProgress(loaded_bytes=1)))

    channel = await dial((await serve(Scripted(FakeWorker()).register)).address)
    with pytest.raises(Unavailable, match="a ended Load without a description"):
        await RemoteWorker(channel, "a").load(TARGET)


async def test_an_empty_answer_is_no_worker(serve: Serve, dial: Dial) -> None:
    """A description without a version is refused as one of another protocol."""

    class Scripted(WorkerServicer):
        async def Describe(self, request: object, context: object) -> pb.DescribeResponse:
            return pb.DescribeResponse(worker=model_pb2.WorkerDescription())

    channel = await dial((await serve(Scripted(FakeWorker()).register)).address)
    with pytest.raises(FailedPrecondition, match="the worker at a speaks protocol 0.0"):
        await RemoteWorker(channel, "a").describe()


async def test_measure(port: FakeWorker, worker: RemoteWorker) -> None:
    """The question arrives field by field, every device's figures come back."""
    request = MeasureRequest("/models/t", "bfloat16", 1 << 40)

    assert await worker.measure(request) == SPEEDS
    assert port.measured == [request]


async def test_a_refused_measure(port: FakeWorker, worker: RemoteWorker) -> None:
    """A worker that is busy says so, to both calls, with its address."""
    port.fault = FailedPrecondition("2 sessions are open", reason="SESSIONS_OPEN")
    for call in (worker.measure(MeasureRequest("", "float32", 0)), worker.measure_link(64)):
        with pytest.raises(FailedPrecondition, match="2 sessions are open") as raised:
            await call
        assert (raised.value.reason, raised.value.where["address"]) == ("SESSIONS_OPEN", "here")


async def test_measuring_the_link(port: FakeWorker, worker: RemoteWorker) -> None:
    """Rows of the size asked for come first, then the large pieces; both figures are above nothing."""
    link = await worker.measure_link(640)

    assert port.echoed == [640] * ROUND_TRIPS + [ECHO_BYTES] * PIECES
    assert link.round_trip_s > 0
    assert link.bytes_per_s > 0


async def test_a_worker_that_ends_the_echo_early(serve: Serve, dial: Dial) -> None:
    """A stream that ends without an answer is no measurement."""

    class Scripted(WorkerServicer):
        async def Echo(self, request: object, context: grpc.aio.ServicerContext) -> None:
            await context.read()

    channel = await dial((await serve(Scripted(FakeWorker()).register)).address)
    with pytest.raises(Unavailable, match="ended Echo without an answer") as raised:
        await RemoteWorker(channel, "a").measure_link(8)
    assert raised.value.where["address"] == "a"


@pytest.mark.parametrize("dtype", [0, 4, 42])
async def test_senseless_measures_are_refused(dtype: int, port: FakeWorker, channel: grpc.aio.Channel) -> None:
    """An element type that is missing, unknown or not for weights is refused by field."""
    with pytest.raises(InvalidArgument, match="dtype is") as raised, rpc_failures_as_errors():
        await pb_grpc.WorkerServiceStub(channel).Measure(measure_pb2.MeasureRequest(dtype=dtype))
    assert raised.value.where["field"] == "dtype"
    assert port.measured == []


async def test_an_echo_is_bounded(port: FakeWorker, channel: grpc.aio.Channel) -> None:
    """A payload above a piece's size is refused, one of that size is not."""
    stub = pb_grpc.WorkerServiceStub(channel)

    async def received(size: int) -> list[int]:
        with rpc_failures_as_errors():
            stream = stub.Echo(iter([measure_pb2.EchoRequest(payload=bytes(size))]))
            return [answer.received_bytes async for answer in stream]

    assert await received(ECHO_BYTES) == [ECHO_BYTES]
    with pytest.raises(InvalidArgument, match=f"payload has {ECHO_BYTES + 1} bytes"):
        await received(ECHO_BYTES + 1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    """What a plan would divide by is finite and above 0."""
    with pytest.raises(InvalidArgument, match="read_bytes_per_s of cpu"):
        speed_from_message(measure_pb2.DeviceSpeed(name="cpu", read_bytes_per_s=rate, matmul_flops_per_s=1))
