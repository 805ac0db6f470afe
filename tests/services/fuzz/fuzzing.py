"""Sends streams of senseless requests and tells what came back; and valid streams to begin with."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from flashsplit.shard.v1 import (
    draft_pb2,
    draft_service_pb2 as draft_pb,
    snapshot_pb2,
    stage_pb2,
    stage_service_pb2 as stage_pb,
    worker_service_pb2 as worker_pb,
)
from services.errors import FlashsplitError
from services.messages.session_frames import open_to_message, request_to_messages, restore_to_message, save_to_message
from services.messages.snapshots import SnapshotFrame, frame_to_message
from services.messages.steps import FeatureSlice, Forward, OpenSession, SnapshotRestore, SnapshotSave, StepKind
from services.rpc import (
    draft as draft_module,
    snapshots as snapshot_module,
    stage as stage_module,
    worker as worker_module,
)
from services.streams.client_stream import ClientStream
from tests.services.fakes import tensor
from tests.services.fuzz.random_messages import RandomStreams

ALLOWED = {
    "OK",
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "UNIMPLEMENTED",
    "NOT_FOUND",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DATA_LOSS",
    "CANCELLED",
}
RUN_STAGE = f"/{stage_module.SERVICE}/RunStage"
RUN_DRAFT = f"/{draft_module.SERVICE}/RunDraft"
EXPORT = f"/{snapshot_module.SERVICE}/PrefixSnapshotExport"
IMPORT = f"/{snapshot_module.SERVICE}/PrefixSnapshotImport"
LIST = f"/{snapshot_module.SERVICE}/SnapshotList"
FREE = f"/{snapshot_module.SERVICE}/SnapshotFree"
LOAD = f"/{worker_module.SERVICE}/Load"
DESCRIBE = f"/{worker_module.SERVICE}/Describe"


async def status_of(channel: grpc.aio.Channel, method: str, frames: Sequence[bytes]) -> str:
    """Send frames as they are, half-close, read to the end.

    The status, or the code of an in-band failure; with the text where it is not allowed.
    """
    call = channel.stream_stream(method)()
    stream = ClientStream(call)
    try:
        async with asyncio.timeout(10.0):
            await stream.send_all(frames)
            with contextlib.suppress(grpc.aio.BaseError):
                await call.done_writing()
            while (raw := await stream.read()) is not grpc.aio.EOF:
                failure = stage_pb.RunStageResponse.FromString(raw).failure if method == RUN_STAGE else None
                if failure and failure.code and failure.code not in ALLOWED:
                    return f"in-band {failure.code}: {failure.message}"
    except FlashsplitError as error:
        return error.code_name if error.code_name in ALLOWED else f"{error.code_name}: {error.message}"
    except TimeoutError:
        stream.cancel()
        return "no answer within 10 s"
    return "OK"


async def batter(
    channel: grpc.aio.Channel,
    method: str,
    streams: RandomStreams,
    valid: Sequence[Message],
    rounds: int,
) -> None:
    """Send many random streams; fails with those whose status blames this side."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        frames = streams.one(valid)
        status = await status_of(channel, method, frames)
        assert status in ALLOWED, (status, [frame[:300] for frame in frames])
        seen[status] += 1
    # Both sides of the checks were reached.
    assert min(seen["INVALID_ARGUMENT"], seen["OK"]) > rounds / 100, seen


STEPS = [
    Forward(0, 0, (1, 2, 3), StepKind.PREFILL),
    Forward(1, 3, (4,), StepKind.DECODE, 3),
    Forward(2, 4, (5, 6, 7), StepKind.VERIFY, 3),
]


SAVES = [SnapshotSave("kept", 3), SnapshotSave("longer", 4, "kept")]
RESTORES = [SnapshotRestore("kept", 3, (1, 2, 3)), SnapshotRestore("longer", 4, (1, 2, 3, 4))]


def stage_frames(
    opening: OpenSession, steps: Sequence[Forward | SnapshotSave | SnapshotRestore]
) -> list[stage_pb.RunStageRequest]:
    frames = [stage_pb.RunStageRequest(open=open_to_message(opening))]
    for step in steps:
        frames.extend(request_to_messages(step))
    return frames


def import_frames(frames: Sequence[SnapshotFrame]) -> list[snapshot_pb2.PrefixSnapshotImportRequest]:
    requests = []
    for frame in frames:
        requests.append(snapshot_pb2.PrefixSnapshotImportRequest())
        frame_to_message(frame, requests[-1])
    return requests


def with_tensors(step: Forward, hidden: int, slices: int) -> Forward:
    rows = len(step.token_ids)
    pieces = tuple(
        FeatureSlice(step.base_position, tensor(rows, hidden, dtype="float32"), index) for index in range(slices)
    )
    return replace(step, activation=tensor(rows, hidden, dtype="float32"), features=pieces)


def draft_frames(fingerprint: str, hidden: int) -> list[draft_pb.RunDraftRequest]:
    """Features, a save and a proposal."""
    frames = [draft_pb.RunDraftRequest(open={"request_id": "r", "fingerprint": fingerprint, "max_length": 64})]
    for index in range(2):
        message = stage_pb2.FeatureSlice(capture_index=index)
        message.features.dtype, message.features.data = 1, bytes(3 * hidden * 4)
        message.features.shape.extend([3, hidden])
        frames.append(draft_pb.RunDraftRequest(feature_slice=message))
    rows = {"rows": {"dtype": 1, "shape": [2, hidden], "data": bytes(2 * hidden * 4)}}
    propose = draft_pb2.Propose(step=1, position=3, token_id=5, tokens=3, embed=rows)
    save = draft_pb.RunDraftRequest(snapshot_save=save_to_message(SAVES[0]))
    return [*frames, save, draft_pb.RunDraftRequest(propose=propose)]


def restored_draft_frames(fingerprint: str, hidden: int) -> list[draft_pb.RunDraftRequest]:
    """The same behind what was saved."""
    [opening, *_, propose] = draft_frames(fingerprint, hidden)
    restore = draft_pb.RunDraftRequest(snapshot_restore=restore_to_message(RESTORES[0]))
    return [opening, restore, propose]


def load_frames(model: str, draft: str) -> list[worker_pb.LoadRequest]:
    capture = {"draft_path": draft, "transport": 2}
    target = worker_pb.LoadTarget(model_path=model, layers={"first": 0, "last": 2}, dtype=1, capture=capture)
    load_draft = worker_pb.LoadDraft(draft_path=draft, model_path=model, head_place=3, feature_transport=2, dtype=1)
    return [worker_pb.LoadRequest(target=target), worker_pb.LoadRequest(draft=load_draft)]


async def batter_snapshots(
    channel: grpc.aio.Channel,
    valid: Sequence[SnapshotFrame],
    hints: Mapping[str, Sequence[Any]],
    rounds: int,
) -> None:
    """Random imports, exports, lists and frees."""
    imports = RandomStreams("import", snapshot_pb2.PrefixSnapshotImportRequest, hints)
    await batter(channel, IMPORT, imports, import_frames(valid), rounds)
    header = valid[0]
    export = snapshot_pb2.PrefixSnapshotExportRequest(snapshot_id=header.snapshot_id, owner=1)
    free = snapshot_pb2.SnapshotFreeRequest(snapshot_ids=["other", "another"])
    for method, request in ((EXPORT, export), (LIST, snapshot_pb2.SnapshotListRequest(holder_id="one")), (FREE, free)):
        streams = RandomStreams(method, type(request), hints)
        # One request each: a second message to a unary method never reaches it.
        seen: Counter[str] = Counter()
        for _ in range(rounds):
            for raw in streams.one([request])[:1]:
                status = await status_of(channel, method, [raw])
                assert status in ALLOWED, (status, raw[:200])
                seen[status] += 1
    assert min(seen["INVALID_ARGUMENT"], seen["OK"]) > rounds / 100, seen


async def batter_worker(channel: grpc.aio.Channel, model: str, draft: str, rounds: int) -> None:
    loads = RandomStreams("load", worker_pb.LoadRequest, {"model_path": [model], "draft_path": [draft]})
    describes = RandomStreams("describe", worker_pb.DescribeRequest, {"protocol_major": [1]})
    for frame in load_frames(model, draft):
        # One request each: a second message to a unary method never reaches it.
        seen: Counter[str] = Counter()
        for _ in range(rounds):
            for raw in loads.one([frame])[:1]:
                status = await status_of(channel, LOAD, [raw])
                assert status in ALLOWED, (status, raw[:200])
                seen[status] += 1
    assert min(seen["INVALID_ARGUMENT"], seen["OK"]) > rounds / 100, seen
    for _ in range(rounds):
        for raw in describes.one([worker_pb.DescribeRequest(protocol_major=1)])[:1]:
            status = await status_of(channel, DESCRIBE, [raw])
            assert status in ALLOWED, (status, raw[:200])
