"""Senseless requests, seeded, against the real engine with tiny checkpoints, in this process.

Whatever comes, the answer blames the caller or the network, never this side; every session is freed, and a normal one
works afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flashsplit.shard.v1 import draft_service_pb2 as draft_pb, stage_service_pb2 as stage_pb
from services.errors import InvalidArgument, NotFound, ResourceExhausted
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace, Role
from services.messages.draft_session import OpenDraft
from services.messages.holder import LEASE_S
from services.messages.loading import FeatureCapture, LoadDraft, LoadTarget
from services.messages.sampling import SamplingParams
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import (
    Commit,
    DraftRoute,
    FeatureSlice,
    Forward,
    Hop,
    Location,
    OpenSession,
    Proposal,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StepKind,
)
from services.net.server import Server
from services.rpc.draft import DraftServicer, RemoteDraft
from services.rpc.peers import Peers
from services.rpc.snapshots import RemoteSnapshots, SnapshotServicer
from services.rpc.stage import RemoteStage, StageServicer
from services.rpc.worker import RemoteWorker
from tests.services.conftest import Dial, Serve
from tests.services.fakes import tensor, until
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

HIDDEN = 32
BUDGET = 300_000
"""Room for a handful of short prefixes."""


@dataclass(frozen=True)
class Engine:
    """Two stages in a chain with a draft beside the second, and a draft of its own, in this process."""

    first: str
    second: str
    draft: str
    roles: tuple[Any, ...]
    opening: OpenSession
    draft_fingerprint: str
    stores: tuple[Any, ...]

    @property
    def to_second(self) -> OpenSession:
        [hop] = self.opening.route
        return replace(self.opening, stage=1, layers=hop.layers, route=())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target of four layers and its draft."""
    from tests.reference.checkpoints import write_draft, write_qwen3

    folder = tmp_path_factory.mktemp("checkpoints")
    target = write_qwen3(folder / "t", hidden=HIDDEN, heads=2, kv_heads=1, mlp=64, vocab=64, max_positions=512)
    draft = write_draft(folder / "d", target, layers=1, heads=2, kv_heads=1, mlp=64, block_size=8, max_positions=512)
    return str(target), str(draft)


@pytest.fixture
async def engine(checkpoints: tuple[str, str], tmp_path: Path) -> AsyncIterator[Engine]:
    """The roles of three workers behind real servers. Addresses that nobody listens on are given up quickly."""
    from shard_worker.device.devices import parse_devices
    from shard_worker.device.executor import DeviceThread
    from shard_worker.roles import RoleResources
    from shard_worker.roles.draft import DraftRole
    from shard_worker.roles.target.role import TargetRole
    from shard_worker.snapshots.store import SnapshotStore
    from shard_worker.snapshots.transfer import SnapshotTransfer

    target_path, draft_path = checkpoints
    devices, peers = parse_devices("cpu"), Peers(timeout_s=0.1)
    threads = [DeviceThread(1) for _ in range(3)]
    addresses = [f"unix:{tmp_path}/{name}.sock" for name in ("first", "second", "draft")]

    def location(stage: int | None) -> Location:
        return Location(stage, "here", "cpu", "")

    stores = tuple(SnapshotStore(BUDGET) for _ in threads)
    resources = [
        RoleResources(thread, devices, peers, location, store, roles={})
        for thread, store in zip(threads, stores, strict=True)
    ]
    beside = DraftRole(resources[1])
    first = TargetRole(resources[0])
    second = TargetRole(replace(resources[1], roles={Role.DRAFT: beside}))
    apart = DraftRole(resources[2])
    capture = FeatureCapture(draft_path, FeatureTransport.SLICES)
    load_draft = LoadDraft(draft_path, target_path, HeadPlace.SHARED, FeatureTransport.SLICES)
    for thread, role, part in [
        (threads[0], first, LoadTarget(target_path, LayerRange(0, 2), None, capture)),
        (threads[1], second, LoadTarget(target_path, LayerRange(2, 4), None, capture)),
        (threads[1], beside, load_draft),
        (threads[2], apart, replace(load_draft, head_place=HeadPlace.PROJECTED)),
    ]:
        await thread.submit(role.load, part, lambda loaded, total: None)
    transfer = SnapshotTransfer(
        stores[1],
        lambda: {SnapshotOwner.STAGE: second.loaded.keeper, SnapshotOwner.DRAFT: beside.loaded.keeper},
    )
    servers = [
        Server(addresses[0], [StageServicer(first).register]),
        Server(addresses[1], [StageServicer(second).register, SnapshotServicer(transfer).register]),
        Server(addresses[2], [DraftServicer(apart).register]),
    ]
    for server in servers:
        await server.start()
    route = (Hop(addresses[1], LayerRange(2, 4)),)
    fingerprint = first.describe().fingerprint
    opening = OpenSession("r", fingerprint, 0, LayerRange(0, 2), route, 256, 32, 8, 3, draft=DraftRoute())
    yield Engine(*addresses, (first, second, apart), opening, apart.describe().fingerprint, stores)
    await peers.close()
    for server in servers:
        await server.stop(0)
    for thread in threads:
        thread.shutdown()


async def no_sessions(engine: Engine) -> None:
    await until(lambda: not any(role.open_sessions for role in engine.roles))


async def no_reservations(engine: Engine) -> None:
    """What the stores count is what they keep: nothing that did not stand holds room."""
    for store in engine.stores:
        assert store.held_bytes <= BUDGET
        await until(lambda store=store: store.held_bytes == sum(kept.size_bytes for kept in store), 3.0)
        while sum(store.free(kept.snapshot_id) for kept in list(store)):
            pass
        assert (store.held_bytes, len(store)) == (0, 0)


async def a_normal_session(engine: Engine, dial: Dial) -> None:
    """A chain with a draft answers a prefill, a decode step and a verify as it always does."""
    session = await RemoteStage(await dial(engine.first), engine.first).open(engine.opening)
    events, position = session.events(), 0
    for number, (tokens, kind) in enumerate([((1, 2, 3), StepKind.PREFILL), ((4,), StepKind.DECODE)]):
        await session.forward(Forward(number, position, tokens, kind, 3 if kind is StepKind.DECODE else 0))
        answer = await anext(events)
        assert isinstance(answer, Commit)
        position += len(tokens)
        assert answer.length == position
    proposal = await anext(events)
    assert isinstance(proposal, Proposal)
    block = (answer.token_ids[-1], *proposal.token_ids)
    await session.forward(Forward(2, position, block, StepKind.VERIFY))
    verified = await anext(events)
    assert isinstance(verified, Commit)
    assert position < verified.length <= position + len(block)
    saved = []
    for save in (SnapshotSave("normal", verified.length), SnapshotSave("again", verified.length)):
        await session.save_snapshot(save)
        saved.append(await anext(events))
        assert isinstance(saved[-1], SnapshotSaved)
        assert [part.refusal for part in saved[-1].parts] == [""] * 3
    await session.close()
    tokens = (1, 2, 3, 4, *block)[: verified.length]
    session = await RemoteStage(await dial(engine.first), engine.first).open(engine.opening)
    events = session.events()
    await session.restore_snapshot(SnapshotRestore("normal", len(tokens), tokens))
    assert isinstance(await anext(events), SnapshotRestored)
    await session.forward(Forward(0, len(tokens), (), StepKind.RESUME))
    answer = await anext(events)
    assert isinstance(answer, Commit)
    assert answer.token_ids == verified.token_ids[-1:]
    await session.close()
    await no_sessions(engine)


def hints(engine: Engine) -> dict[str, Sequence[Any]]:
    return {
        "fingerprint": [engine.opening.fingerprint, engine.draft_fingerprint],
        "address": ["127.0.0.1:1", engine.second, engine.draft, engine.first],
        "token_ids": range(64),
        "token_id": range(64),
        "allowed_token_ids": range(64),
        "ids": range(64),
        "min_tokens": range(4),
        "prompt_logprobs": [0, 1, 20],
        "stop_token_ids": range(64),
        "key": range(64),
        "kind": [1, 2, 3, 4],
        "snapshot_id": ["kept", "longer", "new"],
        "parent_id": ["kept", "longer"],
        "owner": [1, 2],
        "length": range(8),
        "first_token": range(4),
        "token_count": [3, 4, 512, 513],
        "step": range(4),
        "more": [0, 1, 2, 65],
        "base_position": range(8),
        "position": range(8),
        "temperature": [0.0, 1e-45, 1e-9, 0.7, 3e38],
        "top_p": [1e-45, 0.5, 1.0],
        "min_p": [0.0, 1e-45, 1.0],
        "top_k": [1, 63, 64, 65],
        "repetition_penalty": [1e-45, 1.0, 3e38],
        "dtype": [1, 2],
        "shape": [1, 2, 3, HIDDEN],
        "max_length": [1, 4, 256],
        "max_rows": [1, 32],
        "block_rows": [1, 8],
    }


SAMPLINGS = [
    SamplingParams(),
    SamplingParams({3: 5.0}, 1.2, 0.5, -0.5, 0.8, 20, 0.9, 0.05, 7),
    SamplingParams({3: 1e6, 4: -1e6}, 1e-3, 1e6, -1e6, 1e-40, 64, 1e-30, 1.0, 2**64 - 1),
]


@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2]
)
async def test_stage_frames_on_a_chain(number: int, engine: Engine, dial: Dial) -> None:
    """Random streams to the first of two real stages blame the caller, and leave both and the draft in order."""
    streams = RandomStreams(f"random chain {number}", stage_pb.RunStageRequest, hints(engine))
    opening = replace(engine.opening, sampling=SAMPLINGS[number])
    channel = await dial(engine.first)
    await batter(channel, RUN_STAGE, streams, stage_frames(opening, STEPS), 200)
    await no_sessions(engine)
    resumed = Forward(0, 3, (), StepKind.RESUME, 3)
    saving, restoring = [STEPS[0], SAVES[0], STEPS[1], SAVES[1], STEPS[2]], [RESTORES[0], resumed, STEPS[1]]
    for steps in (saving, restoring):
        await batter(channel, RUN_STAGE, streams, stage_frames(opening, steps), 100)
        await no_sessions(engine)
        # Nothing that senseless streams left under a name may be taken up by the good ones of the next round.
        if steps is saving:
            await no_reservations(engine)
            await keep(engine, dial)
    await no_reservations(engine)
    await a_normal_session(engine, dial)


async def test_activations_on_the_last_stage(engine: Engine, dial: Dial) -> None:
    """Random activations and features to the last of two real stages blame the caller."""
    streams = RandomStreams("activations", stage_pb.RunStageRequest, hints(engine))
    valid = stage_frames(engine.to_second, [with_tensors(step, HIDDEN, 1) for step in STEPS])
    await batter(await dial(engine.second), RUN_STAGE, streams, valid, 300)
    await no_sessions(engine)
    await no_reservations(engine)
    await a_normal_session(engine, dial)


async def test_draft_frames_on_a_draft(engine: Engine, dial: Dial) -> None:
    """Random streams to a real draft blame the caller."""
    streams = RandomStreams("real draft", draft_pb.RunDraftRequest, hints(engine))
    valid = draft_frames(engine.draft_fingerprint, HIDDEN)
    channel = await dial(engine.draft)
    await batter(channel, RUN_DRAFT, streams, valid, 200)
    await keep_draft(engine, dial)
    await batter(channel, RUN_DRAFT, streams, restored_draft_frames(engine.draft_fingerprint, HIDDEN), 100)
    await no_sessions(engine)
    await no_reservations(engine)
    session = await RemoteDraft(channel, engine.draft).open(OpenDraft("r", engine.draft_fingerprint, 64))
    for index in range(2):
        await session.feature_slice(FeatureSlice(0, tensor(3, HIDDEN, dtype="int32"), index))
    await session.close()


async def keep(engine: Engine, dial: Dial) -> None:
    """Keep the prefixes of SAVES under their names."""
    session = await RemoteStage(await dial(engine.first), engine.first).open(engine.opening)
    events = session.events()
    for step, save in zip(STEPS, SAVES, strict=False):
        await session.forward(step)
        await session.save_snapshot(save)
        while not isinstance(saved := await anext(events), SnapshotSaved):
            pass
        assert not any(part.refusal for part in saved.parts)
    await session.close()
    await no_sessions(engine)


async def keep_draft(engine: Engine, dial: Dial) -> None:
    """Keep the draft's part of the first of them, in the worker of its own."""
    session = await RemoteDraft(await dial(engine.draft), engine.draft).open(
        OpenDraft("r", engine.draft_fingerprint, 64)
    )
    for index in range(2):
        await session.feature_slice(FeatureSlice(0, tensor(3, HIDDEN, dtype="float32"), index))
    assert not (await session.save_snapshot(SAVES[0])).refusal
    await session.close()


@pytest.mark.parametrize("owner", [SnapshotOwner.STAGE, SnapshotOwner.DRAFT])
async def test_snapshots_of_a_worker(owner: SnapshotOwner, engine: Engine, dial: Dial) -> None:
    """Random imports, exports and frees on a real stage and a real draft blame the caller and leave nothing behind."""
    await keep(engine, dial)
    channel = await dial(engine.second)
    snapshots = RemoteSnapshots(channel, engine.second)
    whole = [frame async for frame in snapshots.export_snapshot(owner, "longer")]
    rest = [frame async for frame in snapshots.export_snapshot(owner, "longer", 3, "kept")]
    assert whole[0].size_bytes > rest[0].size_bytes
    for [header, *others] in (whole, rest):
        await batter_snapshots(channel, [replace(header, snapshot_id="new"), *others], hints(engine), 120)
        await snapshots.free_snapshots(["new"])
    await no_reservations(engine)
    await a_normal_session(engine, dial)


async def test_worker_requests_on_a_worker(checkpoints: tuple[str, str], serve: Serve, dial: Dial) -> None:
    """Random requests to a real worker blame the caller, and it loads what it is asked to afterwards."""
    from shard_worker.device.devices import parse_devices
    from shard_worker.worker import Worker, WorkerConfig

    target, draft = checkpoints
    worker = Worker(WorkerConfig(parse_devices("cpu"), (Role.TARGET, Role.DRAFT), threads=1))
    server = await serve(*worker.registrations())
    channel = await dial(server.address)
    await batter_worker(channel, target, draft, 60)
    # A random holder may have it now, and never listens.
    await asyncio.sleep(LEASE_S)
    loaded = await RemoteWorker(channel, server.address).load(LoadTarget(target, LayerRange(1, 3)))
    assert loaded.target is not None
    assert loaded.target.layers == LayerRange(1, 3)
    await worker.close()


# --- what random streams meet only now and then


async def test_a_draft_session_of_any_length(engine: Engine, dial: Dial) -> None:
    """A draft session of no tokens, or of more than memory holds, is refused."""
    draft = RemoteDraft(await dial(engine.draft), engine.draft)
    for length in (0, 2**31 - 1, 2**32 - 1):
        with pytest.raises((InvalidArgument, ResourceExhausted)):
            await draft.open(OpenDraft("r", engine.draft_fingerprint, length))
    assert not engine.roles[-1].open_sessions


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "", "/dev/null", "/no/such/folder", "."])
async def test_paths_that_hold_no_checkpoint(path: str, serve: Serve, dial: Dial) -> None:
    """Whatever a caller names as a checkpoint: what is none is refused by name."""
    from shard_worker.device.devices import parse_devices
    from shard_worker.worker import Worker, WorkerConfig

    worker = Worker(WorkerConfig(parse_devices("cpu"), (Role.TARGET, Role.DRAFT), threads=1))
    server = await serve(*worker.registrations())
    remote = RemoteWorker(await dial(server.address), server.address)
    for part in (
        LoadTarget(path, LayerRange(0, 1)),
        LoadDraft(path, path, HeadPlace.LOADED, FeatureTransport.SUM),
    ):
        with pytest.raises((InvalidArgument, NotFound)):
            await remote.load(part)
    await worker.close()


NAN, HUGE, ZERO = b"\xff", b"\x7f", b"\x00"


@pytest.mark.parametrize(("fill", "temperature"), [(NAN, 0.0), (HUGE, 0.0), (HUGE, 0.8), (ZERO, 0.0), (ZERO, 0.8)])
async def test_activations_that_are_no_numbers(fill: bytes, temperature: float, engine: Engine, dial: Dial) -> None:
    """Whatever comes as an activation, tokens stay within the vocabulary, and neither stage nor draft fails on them."""
    opening = replace(engine.to_second, sampling=SamplingParams(temperature=temperature, seed=5))
    session = await RemoteStage(await dial(engine.second), engine.second).open(opening)
    events = session.events()
    for step in STEPS[:2]:
        spoiled = with_tensors(step, HIDDEN, 1)
        activation = replace(spoiled.activation, data=fill * spoiled.activation.size_bytes)
        features = tuple(replace(piece, features=activation) for piece in spoiled.features)
        await session.forward(replace(spoiled, activation=activation, features=features))
        answer = await anext(events)
        assert isinstance(answer, Commit)
        assert all(token < 64 for token in answer.token_ids)
    assert isinstance(await anext(events), Proposal)
    await session.close()


async def test_nothing_is_drawn_from_what_is_no_distribution(engine: Engine, dial: Dial) -> None:
    """An activation of NaNs gives no distribution to draw from: it is refused by name, and no token is made up."""
    opening = replace(engine.to_second, sampling=SamplingParams(temperature=0.8, seed=5))
    session = await RemoteStage(await dial(engine.second), engine.second).open(opening)
    for step in STEPS[:2]:
        spoiled = with_tensors(step, HIDDEN, 1)
        activation = replace(spoiled.activation, data=NAN * spoiled.activation.size_bytes)
        features = tuple(replace(piece, features=activation) for piece in spoiled.features)
        await session.forward(replace(spoiled, activation=activation, features=features))
    with pytest.raises(InvalidArgument, match="not finite"):
        async for _ in session.events():
            pass
    await session.close()
