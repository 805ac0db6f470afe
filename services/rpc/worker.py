"""WorkerService: the port, the servicer and the remote client for controlling one worker process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import grpc

from flashsplit.shard.v1 import measure_pb2, worker_service_pb2 as pb, worker_service_pb2_grpc as pb_grpc
from services.errors import InvalidArgument, Unavailable, answering, rpc_failures_as_errors
from services.layers import LayerRange
from services.messages.description import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    FeatureTransport,
    HeadPlace,
    Role,
    WorkerDescription,
    check_protocol,
    head_from_number,
    head_to_number,
    range_from_message,
    range_to_message,
    transport_from_number,
    transport_to_number,
    worker_from_message,
    worker_to_message,
)
from services.messages.measure import (
    ECHO_BYTES,
    DeviceSpeed,
    LinkSpeed,
    MeasureRequest,
    request_from_message,
    request_to_message,
    speed_from_message,
    speed_to_message,
)
from services.messages.tensors import dtype_name, dtype_number, kv_dtype_name
from services.rpc.link_speed import measure_link
from services.streams.client_stream import ClientStream

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
DESCRIBE_TIMEOUT_S = 5.0
MEASURE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class FeatureCapture:
    """Capture what a draft needs. `draft_path` is a directory on the worker's host."""

    draft_path: str
    transport: FeatureTransport


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A stage to load. dtype None keeps the checkpoint's own, kv_dtype None keys and values in the weights'."""

    role: ClassVar = Role.TARGET
    model_path: str
    layers: LayerRange
    dtype: str | None = None
    capture: FeatureCapture | None = None
    kv_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class LoadDraft:
    """A draft to load. `model_path` serves HeadPlace.LOADED and, for rows of the embedding, SHARED."""

    role: ClassVar = Role.DRAFT
    draft_path: str
    model_path: str
    head_place: HeadPlace
    feature_transport: FeatureTransport
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class LoadDrafter:
    """A model to compress prompts with. dtype None keeps the checkpoint's own."""

    role: ClassVar = Role.COMPRESS
    drafter_path: str
    dtype: str | None = None


Part = LoadTarget | LoadDraft | LoadDrafter


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of weights read so far and in all."""

    loaded_bytes: int
    total_bytes: int


class WorkerPort(Protocol):
    """A worker, here or elsewhere."""

    async def describe(self) -> WorkerDescription:
        """What the worker is and holds."""

    def load(self, part: Part) -> AsyncIterator[LoadProgress | WorkerDescription]:
        """Load a part: progress, and at the end the new description.

        Raises InvalidArgument for a checkpoint that does not fit, FailedPrecondition when sessions are open on
        another one, Unimplemented for a family, format or role that the worker lacks.
        """

    async def measure(self, wanted: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        """How fast each device is. Raises FailedPrecondition while sessions are open, and what `load` raises for a
        configuration that cannot be served."""

    async def echo(self, payload: bytes) -> int:
        """How many bytes came, said from the device's thread. Raises FailedPrecondition while sessions are open."""


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Frames to port."""

    def __init__(self, port: WorkerPort) -> None:
        self._port = port

    def register(self, server: grpc.aio.Server) -> str:
        pb_grpc.add_WorkerServiceServicer_to_server(self, server)
        return SERVICE

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        async with answering(context):
            check_protocol((request.protocol_major, request.protocol_minor), "the caller")
            return pb.DescribeResponse(worker=worker_to_message(await self._port.describe()))
        raise AssertionError("answering() always ends the call")

    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            async for event in self._port.load(_part_from_message(request)):
                if isinstance(event, LoadProgress):
                    progress = pb.LoadProgress(loaded_bytes=event.loaded_bytes, total_bytes=event.total_bytes)
                    await context.write(pb.LoadResponse(progress=progress))
                else:
                    await context.write(pb.LoadResponse(worker=worker_to_message(event)))

    async def Measure(
        self, request: measure_pb2.MeasureRequest, context: grpc.aio.ServicerContext
    ) -> measure_pb2.MeasureResponse:
        async with answering(context):
            speeds = await self._port.measure(request_from_message(request))
            return measure_pb2.MeasureResponse(devices=[speed_to_message(speed) for speed in speeds])
        raise AssertionError("answering() always ends the call")

    async def Echo(self, _: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            while (request := await context.read()) is not grpc.aio.EOF:
                if len(request.payload) > ECHO_BYTES:
                    raise InvalidArgument(
                        f"payload has {len(request.payload)} bytes; it may have {ECHO_BYTES}", field="payload"
                    )
                received = await self._port.echo(request.payload)
                await context.write(measure_pb2.EchoResponse(received_bytes=received))


class RemoteWorker:
    """Port to frames: a `WorkerPort` over a channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = pb_grpc.WorkerServiceStub(channel)
        self._address = address

    async def describe(self) -> WorkerDescription:
        request = pb.DescribeRequest(protocol_major=PROTOCOL_MAJOR, protocol_minor=PROTOCOL_MINOR)
        with rpc_failures_as_errors(address=self._address):
            worker = (await self._stub.Describe(request, timeout=DESCRIBE_TIMEOUT_S)).worker
        # First of all: the rest of another major version may mean something else.
        check_protocol((worker.protocol_major, worker.protocol_minor), f"the worker at {self._address}")
        return worker_from_message(worker)

    async def load(
        self,
        part: Part,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
    ) -> WorkerDescription:
        """Load a part and return the worker's new description; errors as in `WorkerPort.load`."""
        worker = None
        with rpc_failures_as_errors(address=self._address):
            async for response in self._stub.Load(_part_to_message(part)):
                if response.WhichOneof("event") == "worker":
                    worker = worker_from_message(response.worker)
                else:
                    on_progress(LoadProgress(response.progress.loaded_bytes, response.progress.total_bytes))
        if worker is None:
            raise Unavailable(f"{self._address} ended Load without a description", address=self._address)
        return worker

    async def measure(self, wanted: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        """As `WorkerPort.measure`."""
        with rpc_failures_as_errors(address=self._address):
            response = await self._stub.Measure(request_to_message(wanted), timeout=MEASURE_TIMEOUT_S)
        return tuple(speed_from_message(device) for device in response.devices)

    async def measure_link(self, row_bytes: int) -> LinkSpeed:
        """How long a row of so many bytes takes to the worker's device thread and its answer back, and how fast large
        pieces follow each other. Errors as in `WorkerPort.echo`."""
        stream = ClientStream(self._stub.Echo(timeout=MEASURE_TIMEOUT_S), address=self._address)
        try:
            return await measure_link(stream, row_bytes)
        finally:
            stream.cancel()


def _part_to_message(part: Part) -> pb.LoadRequest:
    if isinstance(part, LoadTarget):
        target = pb.LoadTarget(
            model_path=part.model_path,
            layers=range_to_message(part.layers),
            dtype=dtype_number(part.dtype),
            kv_dtype=dtype_number(part.kv_dtype),
        )
        if part.capture is not None:
            target.capture.draft_path = part.capture.draft_path
            target.capture.transport = transport_to_number(part.capture.transport)
        return pb.LoadRequest(target=target)
    if isinstance(part, LoadDrafter):
        return pb.LoadRequest(drafter=pb.LoadDrafter(drafter_path=part.drafter_path, dtype=dtype_number(part.dtype)))
    draft = pb.LoadDraft(
        draft_path=part.draft_path,
        model_path=part.model_path,
        head_place=head_to_number(part.head_place),
        feature_transport=transport_to_number(part.feature_transport),
        dtype=dtype_number(part.dtype),
    )
    return pb.LoadRequest(draft=draft)


def _part_from_message(request: pb.LoadRequest) -> Part:
    match request.WhichOneof("part"):
        case "target":
            target = request.target
            capture = None
            if target.HasField("capture"):
                capture = FeatureCapture(target.capture.draft_path, _required_transport(target.capture.transport))
            return LoadTarget(
                model_path=target.model_path,
                layers=range_from_message(target.layers),
                dtype=dtype_name(target.dtype),
                capture=capture,
                kv_dtype=kv_dtype_name(target.kv_dtype),
            )
        case "draft":
            draft = request.draft
            return LoadDraft(
                draft_path=draft.draft_path,
                model_path=draft.model_path,
                head_place=head_from_number(draft.head_place),
                feature_transport=_required_transport(draft.feature_transport),
                dtype=dtype_name(draft.dtype),
            )
        case "drafter":
            return LoadDrafter(request.drafter.drafter_path, dtype_name(request.drafter.dtype))
        case _:
            raise InvalidArgument("part is missing: name a target, a draft or a drafter to load", field="part")


def _required_transport(number: int) -> FeatureTransport:
    transport = transport_from_number(number)
    if transport is None:
        raise InvalidArgument("feature_transport is missing", field="feature_transport")
    return transport
