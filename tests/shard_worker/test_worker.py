"""A worker's parts put together: loading, describing, and what it doesn't offer."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from services.errors import (
    FailedPrecondition,
    FlashsplitError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace, Role, WorkerDescription
from services.messages.draft_session import OpenDraft
from services.messages.holder import LEASE_S, Holder
from services.messages.loading import FeatureCapture, LoadDraft, LoadProgress, LoadTarget
from services.messages.snapshots import SnapshotHeader, SnapshotOwner
from services.messages.steps import DraftRoute, OpenSession, SnapshotSave, StepKind
from services.rpc.snapshots import RemoteSnapshots
from shard_worker.device.devices import parse_devices
from shard_worker.lease import Lease
from shard_worker.roles.draft import DraftRole
from shard_worker.roles.target.role import TargetRole
from shard_worker.snapshots.store import SnapshotStore
from shard_worker.worker import ORPHAN_LOOK_S, Worker, WorkerConfig
from tests.services.conftest import Dial, Serve, dial, serve  # noqa: F401  (fixtures)
from tests.services.fakes import until
from tests.shard_worker.chain import Client
from tests.shard_worker.tiny import Tiny, ids

BOTH = (Role.TARGET, Role.DRAFT)
BUDGET = 1 << 20


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(WorkerConfig(parse_devices("cpu"), BOTH, threads=1, snapshot_budget_bytes=BUDGET))
    yield worker
    await worker.close()
    await worker.close()


async def load(worker: Worker, part: LoadTarget | LoadDraft) -> tuple[list[LoadProgress], WorkerDescription]:
    """Progress, and the description at the end."""
    *progress, last = [event async for event in worker.load(part)]
    assert isinstance(last, WorkerDescription)
    return [event for event in progress if isinstance(event, LoadProgress)], last


def draft_part(tiny: Tiny, place: HeadPlace = HeadPlace.SHARED) -> LoadDraft:
    return LoadDraft(str(tiny.draft("qwen3", "plain")), str(tiny.path("qwen3")), place, FeatureTransport.SUM)


async def test_a_worker_describes_what_it_is_and_holds(worker: Worker, tiny: Tiny) -> None:
    """Before a load there is nothing but devices and roles; afterwards target and draft are there."""
    empty = await worker.describe()
    assert (empty.target, empty.draft, empty.open_sessions, empty.roles) == (None, None, 0, BOTH)
    assert [device.name for device in empty.devices] == ["cpu"]

    progress, loaded = await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2)))
    assert loaded.target is not None
    assert loaded.target.layers == LayerRange(0, 2)
    assert all(0 < step.loaded_bytes <= step.total_bytes == loaded.target.weight_bytes for step in progress)
    _, loaded = await load(worker, draft_part(tiny))
    assert loaded.target is not None
    assert loaded.draft is not None


async def test_the_same_part_is_not_loaded_twice(worker: Worker, tiny: Tiny, tmp_path: Path) -> None:
    """Asking again for what is held answers without a look at the disk; another part replaces it."""
    copy = Path(shutil.copytree(tiny.path("qwen3"), tmp_path / "copy"))
    part = LoadTarget(str(copy), LayerRange(0, 2))
    _, first = await load(worker, part)
    shutil.rmtree(copy)

    progress, again = await load(worker, part)
    _, other = await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(2, 4)))

    assert progress == []
    assert again.target == first.target
    assert other.target is not None
    assert other.target.layers == LayerRange(2, 4)


async def test_sessions_of_a_lost_chain_end_for_another_part(worker: Worker, tiny: Tiny) -> None:
    """Where the load says so, though nobody has closed them: they learn why."""
    await load(worker, target_part(tiny, draft=False))
    client = await opened(worker, speculate=False)
    other = LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2))

    async def load_other() -> None:
        _ = [event async for event in worker.load(other, ends_sessions=True)]

    loading = asyncio.ensure_future(load_other())
    with pytest.raises(Unavailable, match="the chain of the session is lost"):
        _ = [event async for event in client.events]
    await client.session.close()
    await loading
    described = await worker.describe()
    assert described.target is not None
    assert described.target.layers == LayerRange(0, 2)


async def test_nothing_is_replaced_under_open_sessions(worker: Worker, tiny: Tiny) -> None:
    """While a session is open another part is refused; the same one is fine."""
    part = draft_part(tiny, HeadPlace.PROJECTED)
    _, described = await load(worker, part)
    assert described.draft is not None
    role = worker.roles[Role.DRAFT]
    assert isinstance(role, DraftRole)
    session = await role.open(OpenDraft("test", described.draft.fingerprint, 10))

    with pytest.raises(FailedPrecondition, match="1 sessions are open") as caught:
        await load(worker, draft_part(tiny, HeadPlace.LOADED))
    assert caught.value.reason == "SESSIONS_OPEN"
    _, described = await load(worker, part)
    assert (described.open_sessions, described.session_bytes) == (1, session.held_bytes)
    # It has loaded on its device's thread.
    assert 0 < described.busy_ns < described.counted_ns
    await session.close()
    assert (await worker.describe()).session_bytes == 0
    _, described = await load(worker, draft_part(tiny, HeadPlace.LOADED))

    assert described.draft is not None
    assert described.draft.head_place is HeadPlace.LOADED


@pytest.mark.parametrize(
    ("roles", "kind", "reason"),
    [
        ((Role.DRAFT,), Unimplemented, "ROLE_MISSING"),
        ((Role.TARGET,), Unimplemented, "ROLE_MISSING"),
        ((Role.DRAFT,), FailedPrecondition, "FAILED_PRECONDITION"),
    ],
)
async def test_a_role_that_is_not_offered_is_refused(
    tiny: Tiny, roles: tuple[Role, ...], kind: type[FlashsplitError], reason: str
) -> None:
    """A part for another role, and a draft that would share a head that isn't there, say what to do."""
    worker = Worker(WorkerConfig(parse_devices("cpu"), roles))
    part: LoadTarget | LoadDraft = draft_part(tiny)
    if roles == (Role.DRAFT,) and kind is Unimplemented:
        part = LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2))

    with pytest.raises(kind) as caught:
        await load(worker, part)

    assert caught.value.reason == reason
    await worker.close()


async def test_the_workers_own_paths_win(tiny: Tiny) -> None:
    """--model and --draft of the command line replace what a coordinator on another host names."""
    paths = {"model_path": str(tiny.path("qwen3")), "draft_path": str(tiny.draft("qwen3", "plain"))}
    worker = Worker(WorkerConfig(parse_devices("cpu"), BOTH, paths))
    capture = FeatureCapture("/elsewhere/draft", FeatureTransport.SUM)

    await load(worker, LoadDraft("/elsewhere/draft", "/elsewhere", HeadPlace.LOADED, FeatureTransport.SUM))
    _, described = await load(worker, LoadTarget("/elsewhere", LayerRange(0, 2), None, capture))

    assert described.target is not None
    assert described.target.capture_layers == (1, 2)
    await worker.close()


async def test_a_load_that_fails_names_the_reason_and_the_worker_goes_on(worker: Worker, tiny: Tiny) -> None:
    """A wrong path and layers out of range are refused; the next load works."""
    for part, kind in (
        (LoadTarget("/nowhere", LayerRange(0, 2)), NotFound),
        (LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 9)), InvalidArgument),
        (LoadTarget(str(Path(__file__).parent), LayerRange(0, 2)), NotFound),
    ):
        with pytest.raises(kind):
            await load(worker, part)
        assert (await worker.describe()).target is None

    _, described = await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2)))

    assert described.target is not None


# --- prefixes and the model they belong to


def target_part(tiny: Tiny, name: str = "qwen3", draft: bool = True) -> LoadTarget:
    capture = FeatureCapture(str(tiny.draft("qwen3", "plain")), FeatureTransport.SUM) if draft else None
    return LoadTarget(str(tiny.path(name)), LayerRange(0, 4), None, capture)


async def opened(worker: Worker, holder_id: str | None = None, *, speculate: bool = True) -> Client:
    """A session over the whole target and the draft beside it, with ten tokens.

    holder_id: of the process that asks. speculate: with the draft.
    """
    described = await worker.describe()
    assert described.target is not None
    role = worker.roles[Role.TARGET]
    assert isinstance(role, TargetRole)
    request = OpenSession(
        "test",
        described.target.fingerprint,
        0,
        LayerRange(0, 4),
        (),
        100,
        50,
        8,
        0,
        draft=DraftRoute() if speculate else None,
        holder_id=holder_id,
    )
    client = Client(await role.open(request))
    await client.step(StepKind.PREFILL, ids(10))
    return client


async def keep(worker: Worker, name: str = "a", holder_id: str | None = None) -> None:
    """Keep ten tokens, of the target and of the draft. holder_id: of the process that asks."""
    client = await opened(worker, holder_id)
    assert [part.refusal for part in (await client.save(name)).parts] == ["", ""]
    await client.session.close()


def store_of(worker: Worker) -> SnapshotStore:
    """The store that the worker lends to its roles."""
    return worker.roles[Role.TARGET].resources.store


def kept(worker: Worker) -> set[SnapshotOwner]:
    """Whose prefixes are kept."""
    return {snapshot.owner for snapshot in store_of(worker)}


async def test_a_worker_tells_how_much_it_keeps(worker: Worker, tiny: Tiny) -> None:
    """The budget stands in the description from the beginning, the bytes while there are any."""
    empty = await worker.describe()
    assert (empty.snapshot_bytes, empty.snapshot_budget_bytes) == (0, BUDGET)
    await load(worker, target_part(tiny))
    await load(worker, draft_part(tiny))
    await keep(worker)

    described = await worker.describe()

    rows = 4 * 2 * 2 * 16 * 10 * 4
    draft_rows = 2 * 2 * 2 * 16 * 10 * 4
    assert described.snapshot_bytes == rows + 256 * 4 + draft_rows
    assert described.target is not None
    assert described.draft is not None
    assert described.target.state_trimmable
    assert described.draft.state_trimmable
    assert store_of(worker).free("a") == described.snapshot_bytes
    assert (await worker.describe()).snapshot_bytes == 0


async def test_what_a_process_had_loaded_goes_some_time_after_it(tiny: Tiny) -> None:
    """Weights and prefixes, of all roles, with a session that is left; not before, and not while another process uses
    it. Then the worker is anybody's, and can load again."""
    now = 0.0
    lease = Lease(lambda: now)
    config = WorkerConfig(
        parse_devices("cpu"), BOTH, threads=1, snapshot_budget_bytes=BUDGET, orphan_timeout_s=LEASE_S + 1
    )
    worker = Worker(config, lease)
    watching = asyncio.ensure_future(worker.free_when_orphaned())
    parts = target_part(tiny), draft_part(tiny)

    async def held(name: str) -> None:
        with lease.listening(name):
            for part in parts:
                _ = [event async for event in worker.load(part, Holder(name, f"process {name}"))]

    async def describe_later() -> WorkerDescription:
        await asyncio.sleep(2.5 * ORPHAN_LOOK_S)
        return await worker.describe()

    await held("1")
    await keep(worker, holder_id="1")
    now += LEASE_S + 0.5
    described = await describe_later()
    assert described.target is not None
    await held("2")
    assert kept(worker) == set(SnapshotOwner)
    now += LEASE_S + 0.5
    assert (await describe_later()).snapshot_bytes == described.snapshot_bytes > 0
    with lease.listening("2"):
        now += 1000
        assert (await describe_later()).draft is not None
    client = await opened(worker, "2")
    now += LEASE_S + 1.5
    with pytest.raises(Unavailable, match="the process is gone"):
        _ = [event async for event in client.events]
    await client.session.close()
    await until(lambda: worker.roles[Role.DRAFT].part is None)
    described = await worker.describe()
    assert (described.target, described.draft, described.snapshot_bytes) == (None, None, 0)
    await held("3")
    await keep(worker, holder_id="3")
    assert kept(worker) == set(SnapshotOwner)
    watching.cancel()
    await worker.close()


async def test_sessions_have_the_memory_that_their_share_leaves(tiny: Tiny) -> None:
    """A session that finds none is refused with the numbers; what is loaded next finds a pool without old pages."""
    worker = Worker(WorkerConfig(parse_devices("cpu"), (Role.DRAFT,), threads=1, memory_share=1e-12))
    await load(worker, draft_part(tiny, HeadPlace.PROJECTED))
    role = worker.roles[Role.DRAFT]
    assert isinstance(role, DraftRole)
    assert role.loaded is not None
    view = role.loaded.draft.allocate(10).views()[0]
    row = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ResourceExhausted, match=r"\d+ bytes are needed, and 0 of 0 are .*utilization") as caught:
        view.write(row, 0, 1)
    assert caught.value.reason == "OUT_OF_MEMORY"
    await worker.close()


async def test_prefixes_leave_with_their_model_and_with_no_other(worker: Worker, tiny: Tiny) -> None:
    """Another part of an owner, also one that cannot be loaded, takes its prefixes away; the same part keeps them."""
    await load(worker, target_part(tiny))
    await load(worker, draft_part(tiny))
    await keep(worker)

    await load(worker, target_part(tiny))
    await load(worker, draft_part(tiny))
    assert kept(worker) == set(SnapshotOwner)
    await load(worker, draft_part(tiny, HeadPlace.LOADED))
    assert kept(worker) == {SnapshotOwner.STAGE}
    await load(worker, draft_part(tiny))
    await keep(worker, "b")
    assert kept(worker) == set(SnapshotOwner)
    await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2)))
    assert kept(worker) == {SnapshotOwner.DRAFT}

    await load(worker, target_part(tiny))
    await keep(worker, "c")
    with pytest.raises(NotFound):
        await load(worker, LoadTarget("/nowhere", LayerRange(0, 2)))
    assert kept(worker) == {SnapshotOwner.DRAFT}
    with pytest.raises(NotFound):
        await load(worker, LoadDraft("/nowhere", "", HeadPlace.PROJECTED, FeatureTransport.SUM))
    assert (await worker.describe()).snapshot_bytes == 0


async def test_a_copy_that_outlives_its_session_is_not_of_the_next_model(worker: Worker, tiny: Tiny) -> None:
    """A save still on its way when its session ends and another model comes is not kept as that model's."""
    await load(worker, target_part(tiny))
    await load(worker, draft_part(tiny))
    client = await opened(worker)
    release = threading.Event()
    worker.roles[Role.TARGET].resources.thread.submit(release.wait)
    saving = asyncio.create_task(client.session.save_snapshot(SnapshotSave("a", 10)))
    store = store_of(worker)
    generation = store.generation(SnapshotOwner.STAGE)
    await until(lambda: store.held_bytes > 0)
    await client.session.close()
    loading = asyncio.create_task(load(worker, target_part(tiny, "qwen3-sliding", draft=False)))
    await until(lambda: store.generation(SnapshotOwner.STAGE) > generation)
    release.set()

    _, described = await loading
    await asyncio.gather(saving, return_exceptions=True)

    assert described.target is not None
    assert SnapshotOwner.STAGE not in kept(worker)
    assert store.held_bytes == sum(snapshot.size_bytes for snapshot in store)


async def test_every_worker_serves_its_prefixes(
    worker: Worker,
    tiny: Tiny,
    serve: Serve,  # noqa: F811
    dial: Dial,  # noqa: F811
) -> None:
    """Exports find the models that are loaded at that moment, and none before."""
    server = await serve(*worker.registrations())
    remote = RemoteSnapshots(await dial(server.address), server.address)
    for owner in SnapshotOwner:
        with pytest.raises(FailedPrecondition, match=f"no {owner} is loaded"):
            await anext(remote.export_snapshot(owner, "a", 0, None))
    await load(worker, target_part(tiny))
    await load(worker, draft_part(tiny))
    await keep(worker)
    described = await worker.describe()
    assert described.target is not None
    assert described.draft is not None
    for owner, fingerprint in (
        (SnapshotOwner.STAGE, described.target.fingerprint),
        (SnapshotOwner.DRAFT, described.draft.fingerprint),
    ):
        header = await anext(remote.export_snapshot(owner, "a", 0, None))
        assert isinstance(header, SnapshotHeader)
        assert (header.owner, header.fingerprint) == (owner, fingerprint)
