"""A worker that another process holds: every call is refused with the holder's name, or harms nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool

from flashsplit.shard.v1 import liveness_service_pb2 as liveness_pb, liveness_service_pb2_grpc as liveness_grpc
from services.errors import FailedPrecondition
from services.messages.compression import CompressRequest
from services.messages.description import Role
from services.messages.draft_session import OpenDraft
from services.messages.holder import WORKER_HELD, Holder
from services.messages.loading import LoadDrafter
from services.messages.measure import MeasureRequest
from services.messages.snapshots import SnapshotFrame, SnapshotOwner
from services.net.server import Registration
from services.rpc.compress import RemoteCompressor
from services.rpc.draft import RemoteDraft
from services.rpc.snapshots import RemoteSnapshots
from services.rpc.stage import RemoteStage
from services.rpc.worker import RemoteWorker
from shard_worker.device.devices import parse_devices
from shard_worker.worker import Worker, WorkerConfig
from tests.services.conftest import Dial, Serve, dial, serve  # noqa: F401  (fixtures)
from tests.services.fakes import HEADER, OPEN, frames_of
from tests.shard_worker.tiny import Tiny

HOLDER = Holder("the holder", "process 7 on beta")

ANYBODY = {"Describe", "Heartbeats", "CallerHeartbeats", "WatchPeer", "ShareMemory", "RunBatches", "ForgetSession"}
"""What others may ask for: who the worker is and whether it lives, and ways to talk with it; a session has to be opened
before steps come by them."""


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(WorkerConfig(parse_devices("cpu"), tuple(Role), threads=1))
    yield worker
    await worker.close()


async def frames() -> AsyncIterator[SnapshotFrame]:
    for frame in frames_of(HEADER, 700):
        yield frame


async def test_all_calls_of_others_are_refused(
    worker: Worker,
    tiny: Tiny,
    serve: Serve,  # noqa: F811
    dial: Dial,  # noqa: F811
) -> None:
    """Each one by the holder's name. A call that is added to a worker's services must be named here."""
    names: list[str] = []

    def noted(register: Registration) -> Registration:
        """Register a service, and note its name."""

        def add(server: grpc.aio.Server) -> str:
            names.append(register(server))
            return names[-1]

        return add

    server = await serve(*map(noted, worker.registrations()))
    channel = await dial(server.address)
    part = LoadDrafter(str(tiny.path("qwen3")))
    _ = [event async for event in worker.load(part, HOLDER)]
    heartbeats = liveness_grpc.LivenessServiceStub(channel).Heartbeats(
        liveness_pb.HeartbeatsRequest(holder_id=HOLDER.holder_id)
    )
    await heartbeats.read()

    remote, snapshots = RemoteWorker(channel, "a"), RemoteSnapshots(channel, "a")
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "Load": lambda: remote.load(part),
        "Measure": lambda: remote.measure(MeasureRequest(str(tiny.path("qwen3")), "float32", 1)),
        "Echo": lambda: remote.measure_link(8),
        "RunStage": lambda: RemoteStage(channel, "a").open(OPEN),
        "RunDraft": lambda: RemoteDraft(channel, "a").open(OpenDraft("test", "f00d", 10)),
        "Compress": lambda: RemoteCompressor(channel, "a").compress(CompressRequest("test", "f00d", (1, 2), 0.5)),
        "PrefixSnapshotExport": lambda: anext(snapshots.export_snapshot(SnapshotOwner.STAGE, "one")),
        "PrefixSnapshotImport": lambda: snapshots.import_snapshot(frames()),
        "SnapshotList": snapshots.list_snapshots,
        "SnapshotFree": lambda: snapshots.free_snapshots(["one"]),
    }
    for method, call in calls.items():
        with pytest.raises(FailedPrecondition, match=f"held by {HOLDER.name} since") as raised:
            await call()
        assert raised.value.reason == WORKER_HELD, method
    heartbeats.cancel()

    services = [descriptor_pool.Default().FindServiceByName(name) for name in names]
    assert {method.name for service in services for method in service.methods} == {*calls, *ANYBODY}
