"""WorkerService: the port, the servicer and the remote client for describing, loading and measuring one worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from flashsplit.shard.v1 import measure_pb2, model_pb2, worker_service_pb2 as pb, worker_service_pb2_grpc as pb_grpc
from services.errors import InvalidArgument, Unavailable, answering, rpc_failures_as_errors
from services.messages.description import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    WorkerDescription,
    check_protocol,
    worker_from_message,
    worker_to_message,
)
from services.messages.holder import CheckHolder, Holder, anybody, holder_from_message, holder_id_of, own_holder
from services.messages.loading import LoadPart, LoadProgress, part_from_message, part_to_message
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
from services.net.checksums import Damaged
from services.rpc.link_speed import measure_link
from services.streams.client_stream import ClientStream, Guard, unguarded

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
DESCRIBE_TIMEOUT_S = 5.0
MEASURE_TIMEOUT_S = 60.0


class WorkerPort(Protocol):
    """A worker, in this process or in another one."""

    async def describe(self) -> WorkerDescription:
        """Return what the worker is and what it holds."""

    def load(
        self, part: LoadPart, holder: Holder | None, *, ends_sessions: bool
    ) -> AsyncIterator[LoadProgress | WorkerDescription]:
        """Load a part; yield progress, and at the end the worker's new description.

        holder: the process whose alone the worker is from then on; None for anybody's. ends_sessions: sessions that are
        open on another part end with Unavailable.

        Raises InvalidArgument for a checkpoint that does not fit, FailedPrecondition when sessions are open on
        another one, or another process holds the worker, Unimplemented for a family, format or role that the worker
        lacks.
        """

    async def measure(self, request: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        """Return how fast each device is.

        Raises FailedPrecondition while sessions are open, and what `load` raises for a configuration that cannot be
        served.
        """

    async def echo(self, payload: bytes) -> int:
        """Return the number of bytes that came, from the device's thread, as a step's answer comes from there.

        Raises FailedPrecondition while sessions are open.
        """


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Serves a `WorkerPort` to callers in other processes."""

    def __init__(self, port: WorkerPort, check_holder: CheckHolder = anybody) -> None:
        """check_holder: refuses measurements of others than the worker's holder; loads the port refuses itself."""
        self._port, self._check_holder = port, check_holder

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_WorkerServiceServicer_to_server(self, server)
        return SERVICE

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        async with answering(context):
            check_protocol((request.protocol_major, request.protocol_minor), "the caller")
            return pb.DescribeResponse(worker=worker_to_message(await self._port.describe()))
        raise AssertionError("answering() always ends the call")

    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            part, holder = part_from_message(request), holder_from_message(request)
            async for event in self._port.load(part, holder, ends_sessions=request.ends_sessions):
                if isinstance(event, LoadProgress):
                    progress = pb.LoadProgress(loaded_bytes=event.loaded_bytes, total_bytes=event.total_bytes)
                    await context.write(pb.LoadResponse(progress=progress))
                else:
                    await context.write(pb.LoadResponse(worker=worker_to_message(event)))

    async def Measure(
        self, request: measure_pb2.MeasureRequest, context: grpc.aio.ServicerContext
    ) -> measure_pb2.MeasureResponse:
        async with answering(context):
            self._check_holder(holder_id_of(request))
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
                self._check_holder(holder_id_of(request))
                received = await self._port.echo(request.payload)
                await context.write(measure_pb2.EchoResponse(received_bytes=received))


class RemoteWorker:
    """A `WorkerPort` at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str, guard: Guard = unguarded) -> None:
        self._stub = pb_grpc.WorkerServiceStub(channel)
        self._address, self._guard = address, guard

    async def describe(self, timeout_s: float | None = DESCRIBE_TIMEOUT_S) -> WorkerDescription:
        """Return what the worker is and what it holds. Raises DeadlineExceeded where its answer takes longer."""
        request = pb.DescribeRequest(protocol_major=PROTOCOL_MAJOR, protocol_minor=PROTOCOL_MINOR)
        with rpc_failures_as_errors(address=self._address):
            response = await self._stub.Describe(request, timeout=timeout_s)
        if isinstance(response, Damaged) and response.without_checksum is not None:
            # A release of an older protocol adds none; what it says of its version decides.
            self._check_protocol(response.without_checksum.worker)
        worker = response.worker
        # This is checked first, as the rest of another major version may mean something else.
        self._check_protocol(worker)
        return worker_from_message(worker)

    def _check_protocol(self, worker: model_pb2.WorkerDescription) -> None:
        check_protocol((worker.protocol_major, worker.protocol_minor), f"the worker at {self._address}")

    async def load(
        self,
        part: LoadPart,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        *,
        ends_sessions: bool = False,
    ) -> WorkerDescription:
        """Load a part and return the worker's new description; arguments and errors as in `WorkerPort.load`."""
        worker = None
        request, holder = part_to_message(part), own_holder()
        request.ends_sessions = ends_sessions
        request.holder.holder_id, request.holder.name = holder.holder_id, holder.name
        stream = ClientStream(self._stub.Load(request), address=self._address)
        self._guard(stream)
        try:
            while (response := await stream.read()) is not grpc.aio.EOF:
                match response.WhichOneof("event"):
                    case "worker":
                        worker = worker_from_message(response.worker)
                    case "progress":
                        on_progress(LoadProgress(response.progress.loaded_bytes, response.progress.total_bytes))
                    case _:
                        raise InvalidArgument(
                            f"{self._address} answered Load with an empty message: expected progress or worker",
                            field="event",
                        )
        finally:
            stream.cancel()
        if worker is None:
            raise Unavailable(f"{self._address} ended Load without a description", address=self._address)
        return worker

    async def measure(self, request: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        """Return how fast each device is; errors as in `WorkerPort.measure`, and FailedPrecondition where another
        process holds the worker."""
        message = request_to_message(request)
        message.holder_id = own_holder().holder_id
        with rpc_failures_as_errors(address=self._address):
            response = await self._stub.Measure(message, timeout=MEASURE_TIMEOUT_S)
        return tuple(speed_from_message(device) for device in response.devices)

    async def measure_link(self, row_bytes: int) -> LinkSpeed:
        """Return how long a row of so many bytes takes to the worker's device thread, with its answer, and how fast
        large pieces follow each other. Errors as in `WorkerPort.echo`, and FailedPrecondition where another process
        holds the worker."""
        stream = ClientStream(self._stub.Echo(timeout=MEASURE_TIMEOUT_S), address=self._address)
        try:
            return await measure_link(stream, row_bytes)
        finally:
            stream.cancel()
