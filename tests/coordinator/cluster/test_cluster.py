"""A cluster of workers without weights: started, called, lost, brought back and closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import coordinator.cluster.cluster
import coordinator.cluster.losses
from coordinator.cluster.cluster import (
    EXACT_ROWS,
    LEAVING_LOOK_S,
    NO_STANDBYS,
    ChooseSplit,
    Cluster,
    SnapshotPlace,
    StandbyPlan,
)
from coordinator.cluster.loading import Checkpoints, LoadReporter
from coordinator.cluster.placement import Plan, StagePlan, WorkerPlace, make_plan
from services.errors import (
    FailedPrecondition,
    FlashsplitError,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from services.layers import LayerRange
from services.messages.description import HeadPlace, Role, WorkerDescription
from services.messages.loading import LoadDraft, LoadTarget
from services.messages.sampling import SamplingParams
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import DraftRoute, Failure, FailureReason, Hop, Location, OpenSession
from services.processes.launch import Launch
from services.processes.worker_process import WorkerFailed
from services.rpc.peers import Peers
from services.rpc.stage import StageSession
from services.streams.step_lane import StepLane
from tests.coordinator.cluster.toy_worker import DRAFT, DYING, EXCEPTION_LINE, LAUNCH, LAYERS, MODEL, ToyHost
from tests.coordinator.conftest import Hosts
from tests.services.fakes import WORKER, until


def cluster_of(
    devices: str,
    *,
    draft: bool = False,
    draft_device: str | None = None,
    split: str | None = None,
    dtype: str | None = None,
    launch: Launch = LAUNCH,
    wait_s: float = 0.0,
    reporter: LoadReporter | None = None,
    choose_split: ChooseSplit | None = None,
    exact: bool = False,
    standbys: StandbyPlan = NO_STANDBYS,
) -> Cluster:
    plan = make_plan(
        target_devices=devices, layer_split=split, draft_device=draft_device, num_layers=LAYERS, has_draft=draft
    )
    checkpoints = Checkpoints(MODEL, DRAFT if draft else None, dtype)
    return Cluster(
        plan,
        checkpoints,
        launch=launch,
        wait_s=wait_s,
        reporter=reporter,
        choose_split=choose_split,
        exact=exact,
        standbys=standbys,
    )


def at(hosts: Sequence[ToyHost]) -> str:
    return ",".join(host.address for host in hosts)


async def open_session(cluster: Cluster, *, speculate: bool, block_rows: int = 1) -> StageSession:
    return await cluster.open(
        request_id="r1",
        max_length=100,
        max_rows=64,
        block_rows=block_rows,
        prompt_length=10,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        speculate=speculate,
    )


async def watching(cluster: Cluster) -> asyncio.Task[FlashsplitError]:
    """Wait for a loss in a task that has begun to watch the connections."""
    lost = asyncio.ensure_future(cluster.lost())
    done, _ = await asyncio.wait([lost], timeout=0.05)
    assert not done
    return lost


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


# --- starting


async def test_every_worker_loads_its_part(hosts: Hosts) -> None:
    """Each stage loads its own layers, and the draft's own worker the draft; the cluster tells what they hold."""
    first, second, drafter = await hosts(3)
    async with cluster_of(at([first, second]), draft=True, draft_device=drafter.address) as cluster:
        [stage] = first.worker.loaded
        assert isinstance(stage, LoadTarget)
        assert (stage.model_path, stage.layers) == (str(MODEL), LayerRange(0, 6))
        assert stage.capture is not None
        [stage] = second.worker.loaded
        assert isinstance(stage, LoadTarget)
        assert stage.layers == LayerRange(6, 12)
        [draft] = drafter.worker.loaded
        assert isinstance(draft, LoadDraft)
        assert (draft.draft_path, draft.head_place) == (str(DRAFT), HeadPlace.LOADED)
        assert cluster.addresses == (first.address, second.address)
        assert cluster.draft_address == drafter.address
        assert [worker.target and worker.target.layers for worker in cluster.workers] == [
            LayerRange(0, 6), LayerRange(6, 12),
        ]  # fmt: skip
        assert cluster.draft == WORKER.draft
        assert cluster.alive
        assert not cluster.starts_workers


async def test_a_draft_beside_the_last_stage_shares_its_head(hosts: Hosts) -> None:
    """Without a device of its own the draft is loaded by the worker of the last stage, behind the stage."""
    first, last = await hosts(2)
    async with cluster_of(at([first, last]), draft=True) as cluster:
        assert [type(part) for part in first.worker.loaded] == [LoadTarget]
        _, draft = last.worker.loaded
        assert isinstance(draft, LoadDraft)
        assert draft.head_place is HeadPlace.SHARED
        assert cluster.draft_address is None
        assert cluster.draft is not None


async def test_progress_is_told_by_worker(hosts: Hosts) -> None:
    """Whoever reports loading hears of every worker's bytes under the worker's name."""
    heard: set[tuple[str, int, int]] = set()

    class Reporter(LoadReporter):
        def progress(self, worker: str, loaded_bytes: int, total_bytes: int) -> None:
            heard.add((worker, loaded_bytes, total_bytes))

    async with cluster_of(at(await hosts(2)), draft=True, reporter=Reporter()):
        device = WORKER.device
        names = [f"stage 0 ({device})", f"stage 1 ({device})", f"draft ({device})"]
        assert heard == {(name, size, 4) for name in names for size in (1, 4)}


async def test_a_worker_that_cannot_load_is_named(hosts: Hosts) -> None:
    """The worker's own error comes up with the stage, its host, device and address before it."""
    first, second = await hosts(2)
    second.worker.fault = InvalidArgument("layers.7.k has another shape", field="layers.7.k")
    with pytest.raises(InvalidArgument) as caught:
        await cluster_of(at([first, second])).__aenter__()
    for word in ("stage 1", WORKER.host, second.address, "layers.7.k has another shape"):
        assert word in caught.value.message
    assert caught.value.where["field"] == "layers.7.k"


async def test_a_draft_that_cannot_be_loaded_is_named(hosts: Hosts) -> None:
    """As with stages, the part stands before the worker's own error."""
    [stage] = await hosts(1)
    [drafter] = await hosts(1, Role.DRAFT)
    drafter.worker.fault = InvalidArgument("no such file")
    with pytest.raises(InvalidArgument, match=rf"^draft \(.*{drafter.address}\): no such file"):
        await cluster_of(stage.address, draft=True, draft_device=drafter.address).__aenter__()


async def test_a_worker_without_the_role_is_refused(hosts: Hosts) -> None:
    """A worker that only drafts cannot hold a stage, and the sentence says how to start it."""
    [drafter] = await hosts(1, Role.DRAFT)
    with pytest.raises(FailedPrecondition, match=r"stage 0 .* start that worker with --roles target"):
        await cluster_of(drafter.address).__aenter__()
    assert drafter.worker.loaded == []


async def test_workers_of_two_models_are_refused(hosts: Hosts) -> None:
    """Stages of different checkpoints are never joined: both are named."""
    first, second = await hosts(2)
    second.worker.fingerprint = "c0de"
    with pytest.raises(FailedPrecondition, match=r"stage 1 .*c0de, stage 0 .*f00d") as caught:
        await cluster_of(at([first, second])).__aenter__()
    assert caught.value.reason == "FINGERPRINT_MISMATCH"


async def test_a_worker_that_is_not_up_yet_is_waited_for(hosts: Hosts) -> None:
    """One that runs elsewhere is called again until it answers, for as long as the cluster may wait."""
    [host] = await hosts(1)
    await host.stop()
    starting = asyncio.ensure_future(cluster_of(host.address, wait_s=30.0).__aenter__())
    done, _ = await asyncio.wait([starting], timeout=0.1)
    assert not done
    await host.start()
    cluster = await asyncio.wait_for(starting, 30)
    assert cluster.alive
    await cluster.close()


async def test_the_split_is_chosen_once_the_workers_run(hosts: Hosts) -> None:
    """With `auto` the layers are asked for with all addresses, and loaded as answered; a restore asks no more."""
    first, second = await hosts(2)
    calls: list[tuple[str, ...]] = []

    async def choose(plan: Plan, addresses: Sequence[str], peers: Peers) -> Plan:
        calls.append(tuple(addresses))
        ranges = LayerRange(0, 2), LayerRange(2, 12)
        stages = tuple(StagePlan(stage.place, layers) for stage, layers in zip(plan.stages, ranges, strict=True))
        return replace(plan, stages=stages, auto=False)

    async with cluster_of(at([first, second]), split="auto", choose_split=choose) as cluster:
        assert [worker.target and worker.target.layers for worker in cluster.workers] == [
            LayerRange(0, 2), LayerRange(2, 12),
        ]  # fmt: skip
        await cluster.restore()
    assert calls == [(first.address, second.address)]


# --- sessions and snapshots


async def test_a_session_runs_over_the_whole_chain(hosts: Hosts) -> None:
    """The first stage hears of its own layers, of the rest of the route and of the draft's worker."""
    first, second, drafter = await hosts(3)
    async with cluster_of(at([first, second]), draft=True, draft_device=drafter.address) as cluster:
        session = await open_session(cluster, speculate=True)
        request = first.stage.session.request
        assert (request.stage, request.layers) == (0, LayerRange(0, 6))
        assert request.route == (Hop(second.address, LayerRange(6, 12)),)
        assert request.draft == DraftRoute(drafter.address)
        assert request.fingerprint == first.worker.fingerprint
        assert request.batch_invariant_rows is None
        await session.close()
        session = await open_session(cluster, speculate=False)
        assert first.stage.session.request.draft is None
        await session.close()


@pytest.mark.parametrize(("draft", "block_rows", "rows"), [(False, 1, EXACT_ROWS), (True, 1, EXACT_ROWS),
                                                           (False, EXACT_ROWS + 8, EXACT_ROWS + 8)])  # fmt: skip
async def test_exact_sessions_compute_as_many_rows_with_a_draft_as_without(
    hosts: Hosts, draft: bool, block_rows: int, rows: int
) -> None:
    """So a row's bits are the same whether a draft is there or not; only larger blocks take more."""
    assert WORKER.draft is not None
    assert WORKER.draft.block_size <= EXACT_ROWS
    [host] = await hosts(1)
    async with cluster_of(host.address, draft=draft, exact=True) as cluster:
        session = await open_session(cluster, speculate=draft, block_rows=block_rows)
        assert host.stage.session.request.batch_invariant_rows == rows
        await session.close()


async def test_who_keeps_which_part_of_a_prefix(hosts: Hosts) -> None:
    """The stages in order, then the draft wherever it is; without it where only the target's state counts."""
    first, second, drafter = await hosts(3)
    stages = (
        SnapshotPlace(first.address, SnapshotOwner.STAGE, LayerRange(0, 6), "f00d"),
        SnapshotPlace(second.address, SnapshotOwner.STAGE, LayerRange(6, 12), "f00d"),
    )
    assert WORKER.draft is not None
    for draft_device, address in ((drafter.address, drafter.address), (None, second.address)):
        async with cluster_of(at([first, second]), draft=True, draft_device=draft_device) as cluster:
            assert cluster.snapshot_places(with_draft=False) == stages
            draft = SnapshotPlace(address, SnapshotOwner.DRAFT, None, WORKER.draft.fingerprint)
            assert cluster.snapshot_places(with_draft=True) == (*stages, draft)
    async with cluster_of(at([first, second])) as cluster:
        assert cluster.snapshot_places(with_draft=True) == stages


# --- lost workers that run elsewhere


async def test_a_lost_stage_and_its_return(hosts: Hosts) -> None:
    """The cluster is not alive until the worker is there again and has loaded its part anew; the others keep theirs."""
    first, second = await hosts(2)
    async with cluster_of(at([first, second])) as cluster:
        lost = await watching(cluster)
        await second.stop()
        error = await asyncio.wait_for(lost, 10)
        assert second.address in error.message
        assert not cluster.alive
        assert cluster.trouble is error
        second.worker.fault = ResourceExhausted("no room")
        await second.start()
        with pytest.raises(ResourceExhausted, match="stage 1 .*no room"):
            await cluster.restore()
        assert not cluster.alive
        second.worker.fault = None
        await cluster.restore()
        assert cluster.alive
        assert cluster.trouble is None
        [stage] = second.worker.loaded
        assert isinstance(stage, LoadTarget)
        assert stage.layers == LayerRange(6, 12)


async def test_a_session_is_not_opened_where_a_stage_is_lost(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for one hears of the loss at once, though the stage before is still calling the lost one."""
    first, second = await hosts(2)
    called = asyncio.Event()

    async def call_for_ever(request: OpenSession, above: StepLane | None = None) -> StageSession:
        called.set()
        return await asyncio.Future()

    monkeypatch.setattr(first.stage, "open", call_for_ever)
    async with cluster_of(at([first, second])) as cluster:
        lost = await watching(cluster)
        opening = asyncio.create_task(open_session(cluster, speculate=False))
        await called.wait()
        await second.stop()
        with pytest.raises(Unavailable, match="stage 1: .* broke"):
            await asyncio.wait_for(opening, 10)
        await lost


async def test_a_lost_draft_worker_and_its_return(hosts: Hosts) -> None:
    """Without the draft the cluster goes on: new sessions don't speculate until the draft's worker is back."""
    stage, drafter = await hosts(2)
    async with cluster_of(stage.address, draft=True, draft_device=drafter.address, exact=True) as cluster:
        lost = await watching(cluster)
        await drafter.stop()
        assert drafter.address in (await asyncio.wait_for(lost, 10)).message
        assert cluster.alive
        assert cluster.draft is None
        assert cluster.snapshot_places(with_draft=True) == cluster.snapshot_places(with_draft=False)
        # A request that was about to begin with the draft hears from the stage that it is lost.
        session = await open_session(cluster, speculate=True)
        assert stage.stage.session.request.draft == DraftRoute(drafter.address)
        await session.close()
        await drafter.start()
        await cluster.restore()
        assert cluster.draft == WORKER.draft


@pytest.mark.parametrize(("code", "known"), [("UNAVAILABLE", True), ("RESOURCE_EXHAUSTED", False)])
async def test_a_session_that_lost_its_draft_tells_the_cluster(hosts: Hosts, code: str, known: bool) -> None:
    """A worker that does not answer is lost for all at once, also while its connection stands; one that had no room
    for a session is not, nor one that was at another address."""
    stage, drafter = await hosts(2)

    def failure(address: str) -> Failure:
        return Failure(FailureReason.DRAFT_LOST, "gone", Location(None, "h", "cpu", address), code)

    async with cluster_of(stage.address, draft=True, draft_device=drafter.address) as cluster:
        lost = await watching(cluster)
        cluster.report_lost_draft(failure("unix:/before.sock"))
        assert cluster.draft is not None
        cluster.report_lost_draft(failure(drafter.address))
        assert (cluster.draft is None) == known
        if known:
            assert drafter.address in (await asyncio.wait_for(lost, 10)).message
            assert cluster.alive
            await cluster.restore()
            assert cluster.draft == WORKER.draft
            lost = await watching(cluster)
        assert not lost.done()
        lost.cancel()


async def test_waiting_for_a_loss_can_be_given_up(hosts: Hosts) -> None:
    """Who stops waiting leaves the cluster as it is."""
    async with cluster_of(at(await hosts(2))) as cluster:
        lost = await watching(cluster)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        assert cluster.alive


# --- local workers


async def test_local_workers_live_as_long_as_the_cluster() -> None:
    """They are started with their roles, and ended by closing, which may be called twice."""
    cluster = cluster_of("cpu,cpu", draft=True, draft_device="cpu")
    async with cluster:
        assert cluster.starts_workers
        assert [worker.roles for worker in cluster.workers] == [(Role.TARGET,), (Role.TARGET,)]
        assert cluster.draft_worker is not None
        assert cluster.draft_worker.roles == (Role.DRAFT,)
        process_ids = [worker.process_id for worker in (*cluster.workers, cluster.draft_worker)]
        assert len(set(process_ids)) == 3
        assert all(map(alive, process_ids))
    await cluster.close()
    assert not any(map(alive, process_ids))


async def test_a_killed_local_worker_and_its_return() -> None:
    """Its death is the error, and stays known until another process has its part."""
    async with cluster_of("cpu,cpu") as cluster:
        first, second = (worker.process_id for worker in cluster.workers)
        assert cluster.loss(1) is None
        lost = await watching(cluster)
        os.kill(second, signal.SIGKILL)
        error = await asyncio.wait_for(lost, 10)
        assert isinstance(error, WorkerFailed)
        assert error.reason == "WORKER_DIED"
        assert all(word in error.message for word in ("stage 1", str(second), "SIGKILL")), error.message
        assert not cluster.alive
        death = cluster.loss(1)
        assert death is not None
        assert "SIGKILL" in death
        assert cluster.loss(0) is None
        restoring = asyncio.ensure_future(cluster.restore())
        await asyncio.sleep(0.1)
        # Who hears of a broken connection only now is told the same.
        late = await cluster.explain(Unavailable("the stream broke", stage=0))
        assert "SIGKILL" in late.message, late.message
        assert not restoring.done()
        await restoring
        assert cluster.alive
        late = Unavailable("the stream broke", stage=0)
        assert await cluster.explain(late) is late
        assert cluster.loss(1) is None
        assert cluster.workers[0].process_id == first
        assert cluster.workers[1].process_id not in (first, second)


async def test_a_broken_link_is_explained_by_the_death_behind_it() -> None:
    """What a request sees as a broken connection is told as the death of the worker, the place of the error kept."""
    async with cluster_of("cpu") as cluster:
        os.kill(cluster.workers[0].process_id, signal.SIGKILL)
        error = await cluster.explain(Unavailable("the stream broke", stage=0))
        assert isinstance(error, WorkerFailed)
        assert "SIGKILL" in error.message
        assert error.where["stage"] == "0"


async def test_nobody_waits_for_a_death_that_cannot_come(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker elsewhere has no process here: its loss is told at once, also to those who look for the cause of a
    broken connection, beside a local worker that lives."""
    for module in (coordinator.cluster.cluster, coordinator.cluster.losses):
        monkeypatch.setattr(module, "CAUSE_S", 60.0)
    [remote] = await hosts(1)
    async with cluster_of(f"cpu,{remote.address}") as cluster:
        lost = await watching(cluster)
        explaining = asyncio.ensure_future(cluster.explain(Unavailable("the stream broke", stage=1)))
        await remote.stop()
        assert "stage 1" in (await asyncio.wait_for(lost, 20)).message
        assert (await asyncio.wait_for(explaining, 20)).message == "the stream broke"
        later = Unavailable("another stream broke", stage=1)
        assert await asyncio.wait_for(cluster.explain(later), 20) is later


@pytest.mark.parametrize(
    "error", [InvalidArgument("too long"), Unavailable("draining"), InternalError("internal error")]
)
async def test_other_errors_stay_what_they_are(error: FlashsplitError) -> None:
    """While all workers live, there is nothing to explain."""
    async with cluster_of("cpu") as cluster:
        before = error.message
        assert await cluster.explain(error) is error
        assert error.message == before


async def test_a_worker_that_dies_while_it_loads() -> None:
    """The start fails at once with its death, its last log lines beside it, and leaves no process behind."""
    cluster = cluster_of("cpu,cpu", dtype=DYING)
    with pytest.raises(WorkerFailed, match=r"stage [01]: .*exited with code 3") as caught:
        await asyncio.wait_for(cluster.__aenter__(), 20)
    assert EXCEPTION_LINE in caught.value.log_lines
    assert EXCEPTION_LINE not in caught.value.message


async def test_a_worker_that_does_not_start() -> None:
    """The error names the stage, and the workers that did start are ended."""
    launch = replace(LAUNCH, commands={**LAUNCH.commands, "cuda": ("sh", "-c", "echo no such GPU; exit 4")})
    with pytest.raises(WorkerFailed, match=r"^stage 1: the worker for cuda:0 .*exited with code 4$") as caught:
        await cluster_of("cpu,cuda:0", launch=launch).__aenter__()
    assert caught.value.log_lines == ("no such GPU",)


async def test_an_unexpected_exception_of_a_worker_is_told(tmp_path: Path) -> None:
    """An internal error says nothing of its cause; the worker's log does."""
    words = " ".join(f"'{word}'" for word in LAUNCH.commands["cpu"])
    launch = replace(LAUNCH, commands={"cpu": ("sh", "-c", f"echo '{EXCEPTION_LINE}'; exec {words} \"$@\"", "sh")})
    async with cluster_of("cpu", launch=launch) as cluster:
        error = await cluster.explain(InternalError("internal error"))
        assert error.message == "internal error (worker for cpu: RuntimeError: no room)"


async def test_leaving_while_workers_start(tmp_path: Path) -> None:
    """A start that is cancelled ends the processes that it began."""
    started = tmp_path / "started"
    script = f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600"
    starting = asyncio.ensure_future(
        cluster_of("cpu", launch=Launch(commands={"cpu": ("sh", "-c", script)})).__aenter__()
    )
    await until(started.exists, 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(int(started.read_text()))


async def test_a_link_between_two_stages_that_breaks(hosts: Hosts) -> None:
    """The cluster hears of it though both stages answer it, and is restored once they reach each other again."""
    first, second = await hosts(2)
    async with cluster_of(at([first, second])) as cluster:
        lost = await watching(cluster)
        first.peers.fail(Unavailable("the link is cut"))
        error = await lost
        assert error.message == "stage 1: the link is cut"
        assert not cluster.alive
        assert cluster.loss(0) is None
        assert cluster.loss(1) == error.message
        with pytest.raises(Unavailable, match="stage 1: the link is cut"):
            await cluster.restore()
        assert not cluster.alive
        first.peers.fault = None
        await cluster.restore()
        assert cluster.alive
        assert cluster.loss(1) is None


async def test_a_device_that_hangs(hosts: Hosts) -> None:
    """A worker that says that its device hangs is lost until it says that it is back."""
    [only] = await hosts(1)
    async with cluster_of(only.address) as cluster:
        lost = await watching(cluster)
        only.life.trouble = only.worker.fault = Unavailable("cpu has not done with a step", reason="DEVICE_HUNG")
        assert (await lost).message == "stage 0: cpu has not done with a step"
        assert not cluster.alive
        with pytest.raises(Unavailable, match="has not done with a step"):
            await cluster.restore()
        assert not cluster.alive
        only.life.trouble = only.worker.fault = None
        # It says so with its next heartbeat.
        async with asyncio.timeout(30):
            while not cluster.alive:
                with contextlib.suppress(Unavailable):
                    await cluster.restore()


async def test_a_local_worker_that_is_stopped_is_started_anew() -> None:
    """A process that was stopped is lost though it has not ended; another one takes its place."""
    async with cluster_of("cpu,cpu") as cluster:
        before = cluster.workers[1].process_id
        lost = await watching(cluster)
        os.kill(before, signal.SIGSTOP)
        assert "stage 1: " in (await lost).message
        assert not cluster.alive
        await cluster.restore()
        assert cluster.alive
        assert not alive(before)
        assert cluster.workers[1].process_id not in (before, cluster.workers[0].process_id)


# --- workers that stand by


def standing_by(hosts: Sequence[ToyHost], *, hot: bool = True, most_layers: int = LAYERS) -> StandbyPlan:
    """These workers, which have memory for so many layers."""
    places = tuple(WorkerPlace(None, host.address) for host in hosts)
    free = sum(device.free_bytes for device in WORKER.devices)
    return StandbyPlan(places, hot, lambda layers: 0 if len(layers) <= most_layers else 2 * free + 1)


async def ready(cluster: Cluster) -> None:
    await until(lambda: all(one.why is None for one in cluster.standbys), 30)


@pytest.mark.parametrize(("exact", "rows"), [(False, None), (True, EXACT_ROWS)])
async def test_workers_are_told_at_loading_what_exact_sessions_will_ask_for(
    hosts: Hosts, exact: bool, rows: int | None
) -> None:
    """Those that stand by too, so that no session waits for it."""
    first, second, other = await hosts(3)
    async with cluster_of(at([first, second]), exact=exact, standbys=standing_by([other])) as cluster:
        await ready(cluster)
        for host in (first, second, other):
            assert [part.batch_invariant_rows for part in host.worker.loaded if isinstance(part, LoadTarget)] == [rows]


@pytest.fixture
def soon_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost workers are started again at once."""
    monkeypatch.setattr(coordinator.cluster.cluster, "LOST_PAUSE_S", 0.0)


def held(host: ToyHost) -> list[LayerRange]:
    """What a worker was told to load, in order."""
    return [part.layers for part in host.worker.loaded if isinstance(part, LoadTarget)]


@pytest.mark.usefixtures("soon_back")
@pytest.mark.parametrize(
    ("hot", "most_layers", "ahead", "stages"),
    [
        (True, LAYERS, [LayerRange(0, 12)], (0, 1)),
        (True, 6, [LayerRange(0, 6)], (0,)),
        (True, 5, [], ()),
        (False, LAYERS, [], ()),
    ],
)
async def test_a_worker_that_stands_by_takes_the_place_of_a_lost_one(
    hosts: Hosts, hot: bool, most_layers: int, ahead: list[LayerRange], stages: tuple[int, ...]
) -> None:
    """It holds ahead what fits, all layers before one stage, and is told to load the lost stage when that is lost; who
    was lost stands by once it is back, with the draft beside what ends with the last layer."""
    first, second, third = await hosts(3)
    standbys = standing_by([third], hot=hot, most_layers=most_layers)
    async with cluster_of(at([first, second]), draft=True, standbys=standbys) as cluster:
        await ready(cluster)
        assert held(third) == ahead
        [state] = cluster.standbys
        assert (state.place, state.layers, state.stages) == (third.address, ahead[0] if ahead else None, stages)
        lost = await watching(cluster)
        await second.stop()
        await asyncio.wait_for(lost, 10)
        assert not cluster.alive
        assert await cluster.replace_lost()
        assert cluster.alive
        assert cluster.addresses == (first.address, third.address)
        # Whoever still knows the lost one's address does not wait for it.
        with pytest.raises(Unavailable, match="has no part any more"):
            await cluster.snapshots(second.address)
        assert cluster.snapshot_places(with_draft=False)[1].address == third.address
        assert held(third) == [*ahead, LayerRange(6, 12)]
        assert isinstance(third.worker.loaded[-1], LoadDraft)
        await second.start()
        await ready(cluster)
        [state] = cluster.standbys
        assert (state.place, state.stages) == (second.address, stages)


async def test_without_enough_that_stand_by_the_lost_are_waited_for(hosts: Hosts) -> None:
    """One that cannot hold the draft is no last stage, one that is lost itself is nothing, and none stands by twice."""
    first, second = await hosts(2)
    [targets] = await hosts(1, Role.TARGET)
    async with cluster_of(at([first, second]), draft=True, standbys=standing_by([targets])) as cluster:
        assert not await cluster.replace_lost()
        await ready(cluster)
        assert [one.stages for one in cluster.standbys] == [(0,)]
        lost = await watching(cluster)
        await second.stop()
        await asyncio.wait_for(lost, 10)
        assert not await cluster.replace_lost()
        await second.start()
        await cluster.restore()
        assert cluster.addresses == (first.address, second.address)
        await targets.stop()
        await until(lambda: cluster.standbys[0].why is not None, 30)
        lost = await watching(cluster)
        await first.stop()
        await asyncio.wait_for(lost, 10)
        assert not await cluster.replace_lost()


@pytest.mark.usefixtures("soon_back")
async def test_a_killed_local_worker_is_replaced_and_stands_by() -> None:
    """Its place is taken by another process, and a new one is started that stands by; all end with the cluster."""
    async with cluster_of("cpu,cpu", standbys=StandbyPlan((WorkerPlace("cpu", None),))) as cluster:
        await ready(cluster)
        second = cluster.workers[1].process_id
        lost = await watching(cluster)
        os.kill(second, signal.SIGKILL)
        await asyncio.wait_for(lost, 10)
        assert await cluster.replace_lost()
        replaced = cluster.workers[1].process_id
        assert alive(replaced)
        # Its sockets are closed before it has ended.
        await until(lambda: not alive(second), 10)
        assert cluster.loss(1) is None
        await ready(cluster)
    assert not alive(replaced)


@pytest.mark.usefixtures("soon_back")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_is_lost_as_it_takes_a_place(
    fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one that stands by takes it: one that is stopped as soon as it is known to be silent."""
    places = (WorkerPlace("cpu", None), WorkerPlace("cpu", None))
    async with cluster_of("cpu,cpu", standbys=StandbyPlan(places)) as cluster:
        await ready(cluster)
        waiting = {process.process_id for name, process in cluster.processes.items() if name.startswith("stand-by")}
        load, killed = cluster._loader.load_stage, set[int | None]()

        async def load_or_die(
            name: str, plan: StagePlan, address: str, *, ends_sessions: bool = False
        ) -> WorkerDescription:
            process = next(one for one in cluster.processes.values() if one.address == address)
            if process.process_id in waiting and not killed:
                killed.add(process.process_id)
                assert process.process_id is not None
                os.kill(process.process_id, fault)
                if fault is signal.SIGKILL:
                    await process.died()
            return await load(name, plan, address, ends_sessions=ends_sessions)

        monkeypatch.setattr(cluster._loader, "load_stage", load_or_die)
        lost = await watching(cluster)
        os.kill(cluster.workers[1].process_id, signal.SIGKILL)
        await asyncio.wait_for(lost, 10)
        assert await cluster.replace_lost()
        assert cluster.alive
        assert {cluster.workers[1].process_id} == waiting - killed
    # Also one that was being ended when the cluster was closed.
    assert not any(alive(process_id) for process_id in waiting)


# --- workers that are exchanged while they live


async def test_a_worker_takes_the_place_of_one_that_lives(hosts: Hosts) -> None:
    """Once it holds the same; who goes is watched over no more, who comes is."""
    first, second, third = await hosts(3)
    async with cluster_of(at([first, second]), draft=True) as cluster:
        lost = await watching(cluster)
        successor = await cluster.prepare("stage 1", third.address)
        assert (successor.index, successor.member.address) == (1, third.address)
        assert held(third) == [LayerRange(6, 12)]
        assert isinstance(third.worker.loaded[-1], LoadDraft)
        assert cluster.addresses == (first.address, second.address)
        await cluster.snapshots(third.address)
        await cluster.exchange(successor)
        await cluster.retire(successor)
        assert cluster.alive
        assert cluster.addresses == (first.address, third.address)
        await second.stop()
        done, _ = await asyncio.wait([lost], timeout=0.2)
        assert not done
        await third.stop()
        assert "stage 1: " in (await asyncio.wait_for(lost, 10)).message


async def test_a_worker_that_cannot_take_a_place_changes_nothing(hosts: Hosts) -> None:
    """It does not load, or is lost before its turn: the other one goes on, and one that stood by stands by again."""
    first, second, third, fourth = await hosts(4)
    async with cluster_of(at([first, second]), standbys=standing_by([fourth])) as cluster:
        await ready(cluster)
        lost = await watching(cluster)
        third.worker.fault = Unavailable("no room")
        with pytest.raises(Unavailable, match="no room"):
            await cluster.prepare("0", third.address)
        third.worker.fault = None
        successor = await cluster.prepare("0", third.address)
        await third.stop()
        with pytest.raises(Unavailable, match=third.address):
            await cluster.exchange(successor)
        await cluster.dismiss(successor)
        fourth.worker.fault = Unavailable("no room")
        with pytest.raises(Unavailable, match="no room"):
            await cluster.prepare("0", fourth.address)
        assert [one.place for one in cluster.standbys] == [fourth.address]
        assert cluster.alive
        assert cluster.addresses == (first.address, second.address)
        assert not lost.done()
        lost.cancel()


@pytest.mark.usefixtures("soon_back")
async def test_who_is_told_to_stop_has_an_heir(hosts: Hosts) -> None:
    """A worker that stands by and is ready for its place; without one it is left to its end."""
    first, second, third = await hosts(3)
    async with cluster_of(at([first, second]), standbys=standing_by([third])) as cluster:
        await ready(cluster)
        waiting = asyncio.create_task(cluster.leaving())
        second_leaves = asyncio.create_task(second.life.leave(lambda: True))
        leaving = await asyncio.wait_for(waiting, 10)
        assert (leaving.name, leaving.to) == ("stage 1", third.address)
        successor = await cluster.prepare(leaving.name, leaving.to)
        await cluster.exchange(successor)
        third_leaves = asyncio.create_task(third.life.leave(lambda: True))
        waiting = asyncio.create_task(cluster.leaving())
        # That one is told to stop as well, and nobody stands by for it.
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done
        # Who was told to stop first is started again, and stands by in its turn.
        await cluster.retire(successor, comes_back=True)
        await second.stop()
        await second.start()
        leaving = await asyncio.wait_for(waiting, 10)
        assert (leaving.name, leaving.to) == ("stage 1", second.address)
        await asyncio.gather(second_leaves, third_leaves)


async def test_who_is_told_to_stop_takes_no_place(hosts: Hosts) -> None:
    """A worker that stands by, and is told to stop at the same time as a stage's."""
    first, second, third = await hosts(3)
    async with cluster_of(at([first, second]), standbys=standing_by([third])) as cluster:
        await ready(cluster)
        third_leaves = asyncio.create_task(third.life.leave(lambda: True))
        await until(lambda: cluster._peers.leaving(third.address) is not None, 10)
        second_leaves = asyncio.create_task(second.life.leave(lambda: True))
        await until(lambda: cluster._peers.leaving(second.address) is not None, 10)
        waiting = asyncio.create_task(cluster.leaving())
        done, _ = await asyncio.wait([waiting], timeout=2 * LEAVING_LOOK_S)
        assert not done
        waiting.cancel()
        await asyncio.gather(second_leaves, third_leaves)


async def test_a_new_worker_takes_the_drafts_place_where_who_stands_by_cannot() -> None:
    """One that was started to stand by for stages, on the device that is named, goes on doing so."""
    standbys = StandbyPlan((WorkerPlace("cpu", None),))
    async with cluster_of("cpu", draft=True, draft_device="cpu", standbys=standbys) as cluster:
        await ready(cluster)
        successor = await cluster.prepare("draft", "cpu")
        await cluster.exchange(successor)
        await cluster.retire(successor)
        assert cluster.draft is not None
        assert cluster.draft_address == successor.member.address
        assert [state.why for state in cluster.standbys] == [None]


@pytest.mark.usefixtures("soon_back")
async def test_a_worker_that_is_started_again_while_another_one_is_to_take_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it runs it is known by where it was: who asks for a hand-over is told what is wrong, and those that are to
    leave are looked for all the while."""
    async with cluster_of("cpu,cpu") as cluster:
        successor = await cluster.prepare("stage 1", "cpu")
        gone, before = successor.gone, successor.gone.address
        leaving, lost = asyncio.create_task(cluster.leaving()), await watching(cluster)
        os.kill(cluster.workers[1].process_id, signal.SIGKILL)
        await asyncio.wait_for(lost, 10)
        start, is_stopped, may_start = gone.start, asyncio.Event(), asyncio.Event()

        async def start_later(launch: Launch, peers: Peers, wait_s: float = 0.0) -> None:
            is_stopped.set()
            await may_start.wait()
            await start(launch, peers, wait_s)

        monkeypatch.setattr(gone, "start", start_later)
        restoring = asyncio.create_task(cluster.restore())
        await asyncio.wait_for(is_stopped.wait(), 10)
        assert gone.process is None
        assert gone.address == before
        with pytest.raises(FailedPrecondition, match="while not all of them are there: stage 1: "):
            await cluster.prepare("stage 1", "cpu")
        await asyncio.wait([leaving], timeout=2 * LEAVING_LOOK_S)
        may_start.set()
        await restoring
        assert gone.address != before
        assert cluster.alive
        assert not leaving.done()
        leaving.cancel()
        await cluster.dismiss(successor)


async def test_whose_place_cannot_be_taken(hosts: Hosts) -> None:
    """Unknown workers, one that has a part already, one that is not ready, and any while another one is lost."""
    first, second, third = await hosts(3)
    async with cluster_of(at([first, second]), standbys=standing_by([third])) as cluster:
        await ready(cluster)
        with pytest.raises(
            InvalidArgument, match=f"'stage 2' is no worker of .* stage 0 \\({first.address}\\), stage 1"
        ):
            await cluster.prepare("stage 2", third.address)
        with pytest.raises(InvalidArgument, match="has a part of this server already"):
            await cluster.prepare("stage 0", second.address)
        with pytest.raises(InvalidArgument, match="to 'gpu'"):
            await cluster.prepare("stage 0", "gpu")
        await third.stop()
        await until(lambda: cluster.standbys[0].why is not None, 30)
        with pytest.raises(FailedPrecondition, match=f"the stand-by worker {third.address} is not ready"):
            await cluster.prepare("stage 0", third.address)
        lost = await watching(cluster)
        await second.stop()
        await asyncio.wait_for(lost, 10)
        with pytest.raises(FailedPrecondition, match="while not all of them are there"):
            await cluster.prepare("stage 0", third.address)


# --- layers split anew


async def lose(cluster: Cluster, host: ToyHost) -> None:
    """Have a worker elsewhere be gone, for which nobody stands by."""
    lost = await watching(cluster)
    await host.stop()
    await asyncio.wait_for(lost, 10)
    assert not await cluster.replace_lost()


@pytest.mark.usefixtures("soon_back")
@pytest.mark.parametrize(
    ("gone", "anew"),
    [
        (0, [LayerRange(0, 6), LayerRange(6, 12)]),
        (1, [LayerRange(0, 6), LayerRange(6, 12)]),
        (2, [LayerRange(0, 6), LayerRange(6, 12)]),
    ],
)
async def test_others_take_over_the_layers_of_a_lost_worker(hosts: Hosts, gone: int, anew: list[LayerRange]) -> None:
    """The draft goes beside the new last layer; when the worker is back, each has its own layers again."""
    workers = await hosts(3)
    left = [host for index, host in enumerate(workers) if index != gone]
    whole = [LayerRange(0, 4), LayerRange(4, 8), LayerRange(8, 12)]
    async with cluster_of(at(workers), draft=True) as cluster:
        assert not await cluster.resplit()
        assert cluster.degraded is None
        await lose(cluster, workers[gone])
        assert not any(True in host.worker.ends_sessions for host in left)
        assert await cluster.resplit()
        # Those of a worker before them that is frozen are open still.
        assert all(True in host.worker.ends_sessions for host in left)
        assert cluster.alive
        assert cluster.degraded == (
            f"the layers are split anew over 2 of 3 workers: {workers[gone].address} did not come back"
        )
        assert cluster.addresses == tuple(host.address for host in left)
        assert [held(host)[-1] for host in left] == anew
        assert isinstance(left[1].worker.loaded[-1], LoadDraft)
        assert [place.layers for place in cluster.snapshot_places(with_draft=True)] == [*anew, None]
        assert not cluster.can_rejoin
        # Others are watched meanwhile.
        lost = await watching(cluster)
        await workers[gone].start()
        await until(lambda: cluster.can_rejoin, 30)
        assert not lost.done()
        lost.cancel()
        assert await cluster.rejoin()
        assert cluster.degraded is None
        assert cluster.standbys == ()
        assert cluster.addresses == tuple(host.address for host in workers)
        assert [held(host)[-1] for host in workers] == whole
        lost = await watching(cluster)
        await workers[0].stop()
        assert "stage 0" in (await asyncio.wait_for(lost, 10)).message


async def test_only_the_start_waits_for_workers(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt to bring back one that is gone ends soon, so that others can take over."""
    first, second = await hosts(2)
    async with cluster_of(at([first, second]), wait_s=600) as cluster:
        monkeypatch.setattr(cluster._peers, "_timeout_s", 0.2)
        await lose(cluster, second)
        with pytest.raises(Unavailable, match="no worker answers"):
            await asyncio.wait_for(cluster.restore(), 30)
        assert await cluster.resplit()


@pytest.mark.usefixtures("soon_back")
async def test_layers_are_split_anew_again_and_again(hosts: Hosts) -> None:
    """Down to one worker; all come back at once then, also where one has taken another one's place meanwhile."""
    first, second, third = await hosts(3)
    async with cluster_of(at([first, second, third])) as cluster:
        await lose(cluster, second)
        assert await cluster.resplit()
        await lose(cluster, third)
        assert await cluster.resplit()
        assert cluster.addresses == (first.address,)
        assert held(first)[-1] == LayerRange(0, 12)
        await second.start()
        await until(lambda: any(one.why is None for one in cluster.standbys), 30)
        assert not cluster.can_rejoin
        lost = await watching(cluster)
        await first.stop()
        await asyncio.wait_for(lost, 10)
        assert await cluster.replace_lost()
        assert cluster.addresses == (second.address,)
        assert cluster.degraded == (
            f"the layers are split anew over 1 of 3 workers: {first.address}, {third.address} did not come back"
        )
        await asyncio.gather(first.start(), third.start())
        await until(lambda: cluster.can_rejoin, 30)
        assert await cluster.rejoin()
        assert sorted(cluster.addresses) == sorted(at([first, second, third]).split(","))
        assert cluster.addresses[0] == second.address


@pytest.mark.usefixtures("soon_back")
async def test_without_room_the_lost_worker_is_awaited(hosts: Hosts) -> None:
    """And where what is left cannot hold the draft; then all is as it was, and it can come back."""
    for roles, most_layers in (((Role.TARGET, Role.DRAFT), 11), ((Role.TARGET,), LAYERS)):
        [first] = await hosts(1, *roles)
        [second] = await hosts(1)
        standbys = StandbyPlan((), weigh=lambda layers: 0 if len(layers) <= most_layers else 1 << 60)  # noqa: B023
        async with cluster_of(at([first, second]), draft=True, standbys=standbys) as cluster:
            await lose(cluster, second)
            assert not await cluster.resplit()
            assert not cluster.alive
            assert cluster.degraded is None
            await second.start()
            await cluster.restore()
            assert cluster.alive
            assert cluster.addresses == (first.address, second.address)


@pytest.mark.slow
@pytest.mark.usefixtures("soon_back")
async def test_a_worker_that_is_lost_while_layers_go_back(hosts: Hosts) -> None:
    """The cluster is not alive then, and what is left of it takes over all layers again."""
    first, second = await hosts(2)
    async with cluster_of(at([first, second])) as cluster:
        await lose(cluster, second)
        assert await cluster.resplit()
        await second.start()
        await until(lambda: cluster.can_rejoin, 30)
        await first.stop()
        assert not await cluster.rejoin()
        assert not cluster.alive
        assert await cluster.resplit()
        assert cluster.alive
        assert cluster.addresses == (second.address,)
        await first.start()
        await until(lambda: cluster.can_rejoin, 30)
        assert await cluster.rejoin()
        assert cluster.addresses == (first.address, second.address)
