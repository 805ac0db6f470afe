"""Senseless requests, seeded, against the servicers on small fakes.

Whatever comes, the answer blames the caller, never this side; every session is freed, and a normal one works after it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsplit.shard.v1 import draft_service_pb2 as draft_pb, stage_service_pb2 as stage_pb
from services.layers import LayerRange
from services.messages.draft_session import OpenDraft, Propose
from services.messages.snapshots import SnapshotHeader
from services.messages.steps import Commit, DraftRoute, Forward, OpenSession, SnapshotSaved
from services.rpc.draft import DraftServicer, RemoteDraft
from services.rpc.snapshots import RemoteSnapshots, SnapshotServicer
from services.rpc.stage import RemoteStage, StageServicer
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.conftest import Dial, Serve
from tests.services.fakes import (
    HEADER,
    PARTS,
    WORKER,
    FakeDraft,
    FakeImport,
    FakeSnapshots,
    FakeStage,
    FakeStageSession,
    FakeWorker,
    frames_of,
    prefill,
    until,
)
from tests.services.fuzz.fuzzing import (
    RESTORES,
    RUN_DRAFT,
    RUN_STAGE,
    SAVES,
    STEPS,
    batter,
    batter_snapshots,
    batter_worker,
    draft_frames,
    restored_draft_frames,
    stage_frames,
    with_tensors,
)
from tests.services.fuzz.random_messages import RandomStreams

OPEN = OpenSession("r", "f00d", 0, LayerRange(0, 2), (), 512, 128, 16, 3, draft=DraftRoute())


@pytest.mark.parametrize("tensors", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_stage_frames_on_a_fake(tensors: bool, serve: Serve, dial: Dial) -> None:
    """Random streams to a stage are answered in kind, and each opened session is freed exactly once."""

    async def answer(session: FakeStageSession, forward: Forward) -> None:
        # A length that a caller names would be the fake's fault.
        session.out.put_nowait(Commit(forward.step, 3, (), ()))

    port = FakeStage(answer)
    server = await serve(StageServicer(port).register)
    channel = await dial(server.address)
    steps = [with_tensors(step, 16, 2) for step in STEPS] if tensors else STEPS
    streams = RandomStreams(f"stage {tensors}", stage_pb.RunStageRequest, {"address": ["127.0.0.1:1"], "kind": [1, 2]})
    await batter(channel, RUN_STAGE, streams, stage_frames(OPEN, [RESTORES[0], *steps, *SAVES]), 400)
    await until(lambda: all(session.closed for session in port.sessions))
    assert {session.closed for session in port.sessions} == {1}
    session = await RemoteStage(channel, server.address).open(OPEN)
    await session.forward(prefill())
    assert await anext(session.events()) == Commit(0, 3, (), ())
    await session.save_snapshot(SAVES[0])
    assert await anext(session.events()) == SnapshotSaved("kept", 3, PARTS)
    await session.close()


async def test_draft_frames_on_a_fake(serve: Serve, dial: Dial) -> None:
    """Random streams to a draft are answered in kind, and each opened session is freed exactly once."""
    port = FakeDraft()
    # Draft tokens of a number that a caller names would be the fake's fault.
    port.draft_tokens = (1, 2, 3)
    server = await serve(DraftServicer(port).register)
    channel = await dial(server.address)
    streams = RandomStreams("draft", draft_pb.RunDraftRequest, {})
    await batter(channel, RUN_DRAFT, streams, draft_frames("f", 16), 300)
    await batter(channel, RUN_DRAFT, streams, restored_draft_frames("f", 16), 100)
    await until(lambda: all(session.closed for session in port.sessions))
    assert {session.closed for session in port.sessions} == {1}
    session = await RemoteDraft(channel, server.address).open(OpenDraft("r", "f", 1))
    assert await session.propose(Propose(0, 0, 0, 3)) == (1, 2, 3)
    await session.close()


async def test_snapshot_requests_on_a_fake(serve: Serve, dial: Dial) -> None:
    """Random imports, exports and frees are answered in kind, and whatever did not stand is aborted."""

    class Forgetful(FakeSnapshots):
        async def import_snapshot(self, header: SnapshotHeader) -> FakeImport | None:
            self.kept = {(HEADER.owner, "one"): whole}
            return await super().import_snapshot(header)

    port, whole = Forgetful(), frames_of(HEADER, 700)
    port.kept[HEADER.owner, "one"] = whole
    server = await serve(SnapshotServicer(port).register)
    channel = await dial(server.address)
    valid = frames_of(replace(HEADER, snapshot_id="two"), 700)
    await batter_snapshots(channel, valid, {"snapshot_id": ["one", "two"], "owner": [1, 2]}, 300)
    await until(lambda: all(one.aborted for one in port.imports))
    assert {one.aborted for one in port.imports} == {1}
    assert {one.committed for one in port.imports} == {True, False}
    snapshots = RemoteSnapshots(channel, server.address)
    assert [frame async for frame in snapshots.export_snapshot(HEADER.owner, "one")] == whole


async def test_worker_requests_on_a_fake(serve: Serve, dial: Dial) -> None:
    """Random requests to a worker are answered in kind, and it describes itself afterwards."""
    server = await serve(WorkerServicer(FakeWorker()).register)
    channel = await dial(server.address)
    await batter_worker(channel, "/models/t", "/models/d", 200)
    assert await RemoteWorker(channel, server.address).describe() == WORKER
