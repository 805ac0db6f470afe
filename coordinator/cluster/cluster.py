"""The workers of one model: starts the local ones, connects to the others, has each load its part, checks the whole.

It owns the child processes and the connections; `close` ends and closes all of them, at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import structlog

from coordinator.cluster.agreement import check_fit, check_same_model
from coordinator.cluster.loading import Checkpoints, Loader, LoadReporter, with_name
from coordinator.cluster.losses import CAUSE_S, STILL_THERE, Losses
from coordinator.cluster.member import Member
from coordinator.cluster.placement import Plan, StagePlan, WorkerPlace, parse_place, threads_each
from coordinator.cluster.resplit import WeighLayers, split_anew, weight_room
from coordinator.cluster.standby import LOST_PAUSE_S, Standbys, StandbyState
from coordinator.cluster.successor import Leaving, Successor, find_worker
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, Unavailable
from services.layers import LayerRange
from services.messages.description import DraftDescription, Role, TargetDescription, WorkerDescription
from services.messages.holder import WORKER_HELD, own_holder
from services.messages.sampling import SamplingParams
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import DraftRoute, Failure, Grammar, Hop, OpenSession, SessionRest
from services.processes.launch import DEFAULT_LAUNCH, Launch
from services.processes.worker_process import WorkerFailed, WorkerProcess, failure_fields
from services.rpc.liveness import DEVICE_HUNG, LOST_AFTER_S
from services.rpc.peers import Peers
from services.rpc.snapshots import RemoteSnapshots
from services.rpc.stage import StageSession
from services.rpc.worker import RemoteWorker
from services.same_host.loop_watcher import LoopWatcher
from services.telemetry.trace_context import Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where one part of a prefix's state is kept.

    address: the worker's. layers: the stage's; None for the draft's part. fingerprint: that of the model there.
    """

    address: str
    owner: SnapshotOwner
    layers: LayerRange | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """The workers that stand by. hot: they hold layers, as many as fit by `weigh`; otherwise they load when needed."""

    places: tuple[WorkerPlace, ...] = ()
    hot: bool = True
    weigh: WeighLayers | None = None


NO_STANDBYS = StandbyPlan()


@dataclass(frozen=True, slots=True)
class StartTimes:
    """How long it took to have all workers run and hold their parts, in seconds.

    processes_s: until those that had to be started listened; load_s: from then on until everybody held its part, and
    was connected with the next one.
    """

    processes_s: float = 0.0
    load_s: float = 0.0


log = structlog.get_logger()

EXACT_ROWS = 16
"""The rows that batch-invariant products are made of, where no block has more.

So answers with a draft and without one agree.
"""

LEAVING_LOOK_S = 0.25
"""Between two looks at whether a worker was told to stop."""

LOADED_OTHERWISE = ("NOT_LOADED", "FINGERPRINT_MISMATCH", "LAYER_MISMATCH", WORKER_HELD)
"""The reasons with which a worker refuses a session because it does not hold what it was told to load."""

ChooseSplit = Callable[[Plan, Sequence[str], Peers], Awaitable[Plan]]
"""Returns the plan with its layers chosen; takes the plan and the addresses of its workers, the draft's last."""


class Cluster:
    """Workers that hold one model, and its draft if there is one. Use as `async with`."""

    def __init__(
        self,
        plan: Plan,
        checkpoints: Checkpoints,
        *,
        launch: Launch = DEFAULT_LAUNCH,
        wait_s: float = 0.0,
        reporter: LoadReporter | None = None,
        choose_split: ChooseSplit | None = None,
        exact: bool = False,
        standbys: StandbyPlan = NO_STANDBYS,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        """
        launch: how local workers are started; where it names no threads, this host's cores are shared out.
        wait_s: how many seconds a worker that runs elsewhere is called again when it doesn't answer at the start.
        reporter: hears how far loading is. choose_split: chooses the layers once the workers run, where the plan leaves
        them open. exact: the steps of sessions give a row the same bits whatever other rows they have. standbys: the
        workers that stand by once the cluster has started. lost_after_s: how long nothing need be heard of a worker
        until it is lost.
        """
        self._plan, self.launch, self._wait_s = plan, launch, wait_s
        self.lost_after_s = lost_after_s
        self._choose_split, self.exact = choose_split, exact
        self._peers = Peers(
            lost_after_s=lost_after_s,
            security=launch.security,
            transport=launch.transport,
            watcher=LoopWatcher(),
        )
        rows = EXACT_ROWS if exact else None
        self._loader = Loader(self._peers, checkpoints, reporter or LoadReporter(), rows)
        self._losses = Losses(self._peers, len(plan.stages))
        places = [*(stage.place for stage in plan.stages), *([] if plan.draft is None else [plan.draft])]
        self._members = [Member(place, plan.roles(index)) for index, place in enumerate(places)]
        """The workers in the order of the stages; the draft's own is the last."""
        self._prepared = set[str]()
        """The addresses of workers that are about to take a place."""
        self._still = asyncio.Event()
        """Set while no worker is exchanged, when `lost` watches over them."""
        self._still.set()
        self._watch: asyncio.Task[FlashsplitError] | None = None
        self._whole: tuple[Plan, list[Member]] | None = None
        """The plan and the workers from before the layers were split anew; None while they are not."""
        self._standby_plan = standbys
        self._standbys = Standbys(
            self._peers,
            Loader(self._peers, checkpoints, LoadReporter(), rows),
            replace(launch, threads=launch.threads or threads_each(places, plan.host_computing)),
            hot=standbys.hot,
            weigh=standbys.weigh,
        )
        self.start_times = StartTimes()
        """Of the last time that this was done, at the start or behind a loss."""
        self.addresses: tuple[str, ...] = ()
        self.workers: tuple[WorkerDescription, ...] = ()
        self.draft_worker: WorkerDescription | None = None
        self.draft_address: str | None = None
        """The address of the draft's own worker; None where the draft is beside the last stage or there is none."""

    @property
    def target(self) -> TargetDescription:
        """The model as its first stage describes it."""
        target = self.workers[0].target
        assert target is not None
        return target

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        # Later whoever is lost is called again and again, and others may take over meanwhile.
        self._wait_s = 0.0
        for place in self._standby_plan.places:
            self._standbys.add(Member(place, self._plan.stage_roles), self._plan)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(
        self,
        *,
        request_id: str,
        max_length: int,
        max_rows: int,
        block_rows: int,
        prompt_length: int,
        sampling: SamplingParams,
        stop_token_ids: frozenset[int],
        speculate: bool,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        trace: Trace | None = None,
        rest: SessionRest | None = None,
    ) -> StageSession:
        """Open a session over the whole chain; `stage.proto` describes the arguments.

        Raises what a stage says against it, and Unavailable as soon as one is lost: whoever is to reach that one would
        call it for seconds.
        """
        stages = self._plan.stages
        return await self._unless_lost(
            OpenSession(
                request_id=request_id,
                fingerprint=self.target.fingerprint,
                stage=0,
                layers=stages[0].layers,
                route=tuple(
                    Hop(address, stage.layers) for address, stage in zip(self.addresses[1:], stages[1:], strict=True)
                ),
                max_length=max_length,
                max_rows=max_rows,
                block_rows=block_rows,
                prompt_length=prompt_length,
                sampling=sampling,
                stop_token_ids=stop_token_ids,
                # Also where it was lost just now: who asks for it counts on an answer about it.
                draft=DraftRoute(self.draft_address) if speculate and self.draft_worker is not None else None,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                holder_id=own_holder().holder_id,
                grammar=grammar,
                trace=trace,
                rest=rest if len(stages) > 1 else None,
                batch_invariant_rows=max(EXACT_ROWS, block_rows, self._draft_rows) if self.exact else None,
            )
        )

    async def _unless_lost(self, request: OpenSession) -> StageSession:
        """Open a session. Raises Unavailable as soon as a stage is lost."""

        async def ask() -> StageSession:
            return await (await self._peers.stage(self.addresses[0])).open(request, answers=True)

        opening, lost = asyncio.ensure_future(ask()), asyncio.ensure_future(self._losses.in_trouble())
        is_taken = False
        try:
            await asyncio.wait([opening, lost], return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                is_taken = True
                return opening.result()
            trouble = lost.result()
            raise Unavailable(trouble.message, reason=trouble.reason, **trouble.where)
        finally:
            lost.cancel()
            if not is_taken:
                opening.cancel()
                with contextlib.suppress(asyncio.CancelledError, FlashsplitError):
                    # One that was opened in the same moment is nobody's.
                    await (await opening).close()

    @property
    def _draft_rows(self) -> int:
        """The rows of a block of the draft, also while its worker is lost; 0 without a draft."""
        draft = None if self.draft_worker is None else self.draft_worker.draft
        return 0 if draft is None else draft.block_size

    @property
    def processes(self) -> dict[str, WorkerProcess]:
        """The workers that are children of this process and run, by what they are now: "stage 0", "draft worker",
        "stand-by 0"."""
        found = {name: member.process for name, member in self._named.items() if member.process is not None}
        return {name: process for name, process in found.items() if process.process_id is not None}

    @property
    def places(self) -> dict[str, WorkerPlace]:
        """Where the workers are, by what they are now, as in `processes`."""
        return {name: member.place for name, member in self._named.items()}

    @property
    def _named(self) -> dict[str, Member]:
        named = {self._losses.name(index): member for index, member in enumerate(self._members)}
        return named | {f"stand-by {number}": member for number, member in enumerate(self._standbys.members)}

    @property
    def starts_workers(self) -> bool:
        """Whether any of the workers is a child of this process."""
        places = [*(stage.place for stage in self._plan.stages), self._plan.draft]
        return any(place is not None and place.devices is not None for place in places)

    @property
    def first_place(self) -> WorkerPlace:
        """Where the first stage is."""
        return self._plan.stages[0].place

    @property
    def draft(self) -> DraftDescription | None:
        """The draft; None without one and while its own worker is lost, when answers go on one token a step."""
        lost = self.draft_address is not None and self._losses.reason(len(self._plan.stages)) is not None
        return None if self.draft_worker is None or lost else self.draft_worker.draft

    @property
    def trouble(self) -> FlashsplitError | None:
        """What is wrong with the stages, as far as `lost` has found out; None while nothing is."""
        return self._losses.trouble

    @property
    def alive(self) -> bool:
        """Whether all local stages run and, as far as `lost` has found out, the others too."""
        return self._losses.stages_run

    @property
    def doubts(self) -> int:
        """How often a worker was silent for so long that it was asked whether it lives, since it was last connected."""
        return self._peers.doubts

    def loss(self, index: int) -> str | None:
        """Return how a worker was lost that is not back yet, as a sentence; None for all others.

        index: the stage's; that of the draft's own worker follows the last stage's.
        """
        reason = self._losses.reason(index)
        return None if reason is None else reason.message

    def report_lost_draft(self, failure: Failure) -> None:
        """Hear from a session that it has lost its draft.

        Where that was because the draft's own worker does not answer, later sessions go without it until `restore`.
        """
        if failure.location.address == self.draft_address and failure.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            why = f"the worker at {self.draft_address} does not answer its sessions: {failure.message}"
            self._losses.report(len(self._plan.stages), Unavailable(why))

    def _report_unloaded(self, error: FlashsplitError) -> Unavailable:
        """Note that a stage's worker does not hold the stage, so that `lost` tells it and `restore` has it loaded
        again. error: how the worker refused a session. Returns the error for those who ask meanwhile."""
        unavailable = Unavailable(error.message, reason=error.reason, **error.where)
        stage = error.where.get("stage", "0")
        self._losses.report(int(stage) if stage.isdigit() else 0, unavailable)
        return unavailable

    async def lost(self) -> FlashsplitError:
        """Wait until one more worker is lost, and return the error that says which one and how.

        A worker is lost when it ends, falls silent, says that its device hangs, or cannot be reached: by this process,
        the worker before it or a session. From then on the cluster is not alive or, where it was the draft's own
        worker, has no draft.
        """
        while True:
            await self._still.wait()
            addresses = [*self.addresses, *([] if self.draft_address is None else [self.draft_address])]
            watch = self._watch = asyncio.ensure_future(self._losses.next_loss(addresses, self.explain))
            try:
                await asyncio.wait([watch])
                if not watch.cancelled():
                    await self._leave_ended()
                    return watch.result()
            finally:
                watch.cancel()

    async def _leave_ended(self) -> None:
        """Have nobody wait for a connection to a local worker whose process has ended."""
        for index, member in enumerate(self._members):
            if self._losses.death(index) is not None:
                await self._peers.leave(member.address)

    async def restore(self, within_s: float | None = None) -> None:
        """Start the local workers that are lost again, and have every worker load what it does not hold.

        within_s: how long a lost worker is called that runs elsewhere; None for as long as any worker. Raises what
        starting a cluster raises; then it can be tried again.
        """
        for index, member in enumerate(self._members):
            process = member.process
            if process is not None and (
                self._losses.must_restart(index) or self._peers.trouble(process.address) is not None
            ):
                self._losses.leave_process(index)
                await self._peers.leave(process.address)
                await member.stop()
        if within_s is not None:
            lost = [index for index in range(len(self._members)) if self._losses.reason(index) is not None]
            await _all(self._call(index, within_s) for index in lost)
        await self._start()
        self._losses.restored()

    async def _call(self, index: int, within_s: float) -> None:
        """Call a worker if it runs elsewhere. Raises Unavailable, named after it, where it is not reached in time."""
        member = self._members[index]
        if member.place.devices is None:
            try:
                await self._peers.reach(member.address, within_s=within_s)
            except FlashsplitError as error:
                raise with_name(error, self._losses.name(index)) from error

    async def replace_lost(self) -> bool:
        """Put workers that stand by in the places of the stages that are lost, and return whether all are there again.

        Who was lost stands by from then on, once it is back. False leaves the rest to `restore`, where too few stand
        by.
        """
        plan, lost = self._plan, self._lost_stages
        if not lost or not self._standbys.states(plan):
            return False
        for index in lost:
            found = await self._standbys.take([index], plan)
            if found is None:
                return False
            [member] = found
            gone = self._members[index]
            self._put(index, member)
            self._exchange(gone, member)
            await self._peers.leave(gone.address)
            self._await_to_stand_by(gone)
            log.warning("cluster.replaced", stage=index, lost=str(gone.place), by=str(member.place))
        try:
            await self._start()
        except FlashsplitError as error:
            log.warning("cluster.replace_failed", **failure_fields(error))
            # Where one of those that took a place is lost in its turn, another one may stand by.
            return await self._is_any_gone(lost) and await self.replace_lost()
        self._losses.restored()
        return True

    def _await_to_stand_by(self, gone: Member) -> None:
        """Have a worker stand by for the stages once it is back."""
        gone.roles = self._plan.stage_roles
        self._standbys.add(gone, self._plan, LOST_PAUSE_S)

    async def _is_any_gone(self, indices: Sequence[int]) -> bool:
        """Return whether one of the workers that have these stages' places now is of no use."""
        if any(self._peers.trouble(self._members[index].address) is not None for index in indices):
            return True
        return await self._losses.any_ended(indices, CAUSE_S)

    # --- workers that are exchanged while they live

    async def prepare(self, worker: str, to: str) -> Successor:
        """Have a worker hold what another one holds, so that `exchange` puts it in that one's place. Until then all
        goes on.

        worker: as in `find_worker`. to: a worker that stands by, or runs at an address without a part, or a device on
        which one is started. Raises InvalidArgument and FailedPrecondition for what cannot be, and what starting and
        loading raise; then the other one is as it was.
        """
        plan, names = self._plan, [self._losses.name(index) for index in range(len(self._members))]
        index = find_worker(worker, names, self._members)
        self._check_exchange()
        gone, to = self._members[index], to.strip()
        stands_by = await self._standbys.take_named(to, plan.roles(index))
        member = stands_by or Member(parse_place(to, "to"), plan.roles(index))
        if member.place.address is not None and member.place.address in (one.address for one in self._members):
            raise InvalidArgument(f"{to} has a part of this server already: name another worker", field="to")
        try:
            await member.start(self._shared_launch(), self._peers)
            described = await self._load_part(index, member)
            before = await self._describe(gone)
        except BaseException:
            await self._leave(member, stands_by=stands_by is not None)
            raise
        self._prepared.add(member.address)
        return Successor(index, names[index], member, gone, described.process_id, before.process_id)

    async def exchange(self, successor: Successor) -> None:
        """Put a worker in the place of the one whose part it holds. No session goes on over that one's end.

        Raises FailedPrecondition where that one was lost meanwhile, Unavailable where this one was, and what starting a
        cluster raises; then all is as it was.
        """
        index, member, gone = successor.index, successor.member, successor.gone
        self._check_exchange()
        if self._members[index] is not gone:
            raise FailedPrecondition(f"{successor.name} is another worker by now: try again", reason="WORKER_EXCHANGED")
        self.check_prepared(successor)
        self._still.clear()
        if self._watch is not None:
            self._watch.cancel()
        try:
            self._put(index, member)
            try:
                await self._start()
            except FlashsplitError:
                self._put(index, gone)
                self._losses.trouble = None
                try:
                    await self._start()
                except FlashsplitError as error:
                    # Then `restore` has to bring it back.
                    self._losses.report(index, error)
                raise
        finally:
            self._still.set()
        self._prepared.discard(member.address)
        log.warning("cluster.exchanged", worker=successor.name, gone=str(gone.place), by=str(member.place))

    def check_prepared(self, successor: Successor) -> None:
        """Raise Unavailable where a worker that was prepared is lost by now. Answers wait: no time to call it again."""
        address = successor.member.address
        if not self._peers.is_connected(address):
            raise Unavailable(f"{successor.name}: the worker at {address} was lost before it took the place")

    async def retire(self, successor: Successor, *, comes_back: bool = False) -> None:
        """Let the worker go whose place was taken: a child process ends. comes_back: it stands by once it is there
        again, as one does that was lost."""
        await self._peers.leave(successor.gone.address)
        await successor.gone.stop()
        if comes_back:
            self._await_to_stand_by(successor.gone)

    async def dismiss(self, successor: Successor) -> None:
        """Let a worker go that was prepared and takes no place."""
        self._prepared.discard(successor.member.address)
        await self._leave(successor.member, stands_by=False)

    async def leaving(self) -> Leaving:
        """Wait until a stage's worker says that it was told to stop, for which one stands by that is ready."""
        while True:
            for index in range(len(self._plan.stages)):
                heartbeats = self._peers.leaving(self._members[index].address)
                heir = None if heartbeats is None else self._standbys.ready_for(index, self._plan)
                if heartbeats is not None and heir is not None:
                    return Leaving(self._losses.name(index), heir, heartbeats)
            await asyncio.sleep(LEAVING_LOOK_S)

    def _check_exchange(self) -> None:
        """Raise FailedPrecondition where workers are not all there, or not in their own places."""
        trouble = self.trouble or next(filter(None, map(self._losses.reason, range(len(self._members)))), None)
        why = self.degraded or (None if trouble is None else trouble.message)
        if why is not None:
            raise FailedPrecondition(
                f"no worker can be drained while not all of them are there: {why}", reason="WORKER_LOST", field="worker"
            )

    async def _load_part(self, index: int, member: Member) -> WorkerDescription:
        """Have a worker load what belongs to a place, and return its description."""
        plan, address = self._plan, member.address
        if index == len(plan.stages):
            return await self._loader.load_draft(address, beside=False)
        stage = replace(plan.stages[index], place=member.place)
        described = await self._loader.load_stage(self._losses.name(index), stage, address)
        check_same_model((*self.workers, described))
        if plan.draft_beside and index == len(plan.stages) - 1:
            await self._loader.load_draft(address, beside=True)
        return described

    async def _leave(self, member: Member, *, stands_by: bool) -> None:
        """Let a worker go that takes no place; one that stood by does so again."""
        if stands_by:
            self._standbys.add(member, self._plan)
        else:
            await self._peers.leave(member.address)
            await member.stop()

    def _put(self, index: int, member: Member) -> None:
        """Note that a worker has a place. `_start` connects it with the others."""
        self._losses.leave_process(index)
        self._members[index] = member
        if member.process is not None:
            self._losses.watch_process(index, member.process)
        self._plan = _with_places(self._plan, self._members)

    @property
    def _lost_stages(self) -> list[int]:
        return [index for index in range(len(self._plan.stages)) if self._losses.reason(index) is not None]

    # --- fewer workers than there should be

    @property
    def degraded(self) -> str | None:
        """Why the layers are not where they should be, as a sentence; None while they are."""
        if self._whole is None:
            return None
        plan, members = self._whole
        missing = ", ".join(str(member.place) for member in members if member not in self._members)
        return (
            f"the layers are split anew over {len(self._plan.stages)} of {len(plan.stages)} workers: {missing} did not "
            "come back"
        )

    async def resplit(self) -> bool:
        """Split the layers anew over the workers that are left, and return whether that is done.

        Those that are lost stand by from then on, once they are back, until `rejoin`. False where no stage is lost or
        none is left, and where those that are left have no room, or are lost meanwhile.
        """
        plan, lost = self._plan, self._lost_stages
        there = [index for index in range(len(plan.stages)) if index not in lost]
        described = await asyncio.gather(
            *(self._describe(self._members[index]) for index in there), return_exceptions=True
        )
        left = {
            index: worker
            for index, worker in zip(there, described, strict=True)
            if isinstance(worker, WorkerDescription)
        }
        if not left or len(left) == len(plan.stages):
            return False
        kept, workers = [plan.stages[index] for index in left], list(left.values())
        ranges = split_anew(
            [stage.layers for stage in kept],
            plan.stages[-1].layers.last,
            [weight_room(worker) for worker in workers],
            self._standby_plan.weigh,
            plan.last_cut,
        )
        if ranges is None or (plan.draft_beside and Role.DRAFT not in workers[-1].roles):
            why = "have no room for all layers" if ranges is None else "end with one that has no role for the draft"
            log.warning("cluster.resplit_failed", why=f"the workers that are left {why}")
            return False
        gone = [self._members[index] for index in range(len(plan.stages)) if index not in left]
        before = plan, self._members, self._losses
        stages = tuple(
            StagePlan(stage.place, layers, max(stage.host_experts, plan.host_experts_of(layers)))
            for stage, layers in zip(kept, ranges, strict=True)
        )
        members = [member for member in self._members if member not in gone]
        try:
            await self._rearrange(replace(plan, stages=stages), members)
        except FlashsplitError as error:
            log.warning("cluster.resplit_failed", **failure_fields(error))
            self._losses.close()
            self._plan, self._members, self._losses = before
            return False
        before[2].close()
        self._whole = self._whole or before[:2]
        for member in gone:
            member.roles = plan.stage_roles
            self._standbys.add(member, self._whole[0], LOST_PAUSE_S)
        log.warning("cluster.resplit", why=self.degraded, layers=[str(layers) for layers in ranges])
        return True

    @property
    def can_rejoin(self) -> bool:
        """Whether there are as many workers again as before the layers were split anew."""
        if self._whole is None:
            return False
        plan, members = self._whole
        missing = [index for index, member in enumerate(members) if member not in self._members]
        return self._standbys.can_take(missing, plan)

    async def rejoin(self) -> bool:
        """Give the layers back to as many workers as before they were split anew, and return whether that is done.

        No session may be open. Where False is returned the cluster is alive no more, and `restore` brings back what can
        be.
        """
        assert self._whole is not None
        plan, members = self._whole
        missing = [index for index, member in enumerate(members) if member not in self._members]
        found = await self._standbys.take(missing, plan)
        if found is None:
            return False
        members = [*members]
        for index, member in zip(missing, found, strict=True):
            members[index] = member
        losses = self._losses
        try:
            await self._rearrange(_with_places(plan, members), members)
        except FlashsplitError as error:
            log.warning("cluster.rejoin_failed", **failure_fields(error))
            return False
        finally:
            self._whole = None
            losses.close()
        log.warning("cluster.rejoined", layers=[str(stage.layers) for stage in plan.stages])
        return True

    async def _rearrange(self, plan: Plan, members: list[Member]) -> None:
        """Have these workers hold the stages of a plan. Raises what starting a cluster raises; then it is not alive."""
        losses = Losses(self._peers, len(plan.stages))
        losses.trouble = self._losses.trouble
        for index, member in enumerate(members):
            if member.process is not None:
                losses.watch_process(index, member.process)
        self._plan, self._members, self._losses = plan, members, losses
        try:
            # No session goes on over this, and a worker that is frozen ends none behind it.
            await self._start(ends_sessions=True)
        except FlashsplitError as error:
            losses.trouble = losses.trouble or error
            raise
        losses.restored()

    def _exchange(self, gone: Member, found: Member) -> None:
        """Note that a worker has another one's place, also where the layers are split anew."""
        if self._whole is not None:
            plan, members = self._whole
            swapped = {id(gone): found, id(found): gone}
            self._whole = plan, [swapped.get(id(member), member) for member in members]

    async def _describe(self, member: Member) -> WorkerDescription:
        return await (await self._peers.worker(member.address)).describe()

    @property
    def standbys(self) -> tuple[StandbyState, ...]:
        """What stands by, and for which stages."""
        return self._standbys.states(self._plan)

    def snapshot_places(self, *, with_draft: bool) -> tuple[SnapshotPlace, ...]:
        """Return where the parts of a prefix's state are kept: the stages in order, then the draft."""
        target, draft = self.target, self.draft
        places = [
            SnapshotPlace(address, SnapshotOwner.STAGE, worker.target.layers, target.fingerprint)
            for address, worker in zip(self.addresses, self.workers, strict=True)
            if worker.target is not None
        ]
        if with_draft and draft is not None:
            address = self.draft_address or self.addresses[-1]
            places.append(SnapshotPlace(address, SnapshotOwner.DRAFT, None, draft.fingerprint))
        return tuple(places)

    async def worker(self, address: str) -> RemoteWorker:
        """Return the service that describes a worker and measures it."""
        return await self._peers.worker(address)

    async def snapshots(self, address: str) -> RemoteSnapshots:
        """Return the service of a worker's kept prefixes, on a connection apart from the steps.

        Raises Unavailable at once for a worker that is lost, or has no part in this cluster any more.
        """
        if address in self._prepared:
            return await self._peers.snapshots(address)
        addresses = [*self.addresses, *([] if self.draft_address is None else [self.draft_address])]
        index = addresses.index(address) if address in addresses else None
        if index is None or self._losses.reason(index) is not None:
            why = "has no part any more" if index is None else "is lost"
            raise Unavailable(f"the worker at {address} {why}", reason="WORKER_UNREACHABLE", address=address)
        return await self._peers.snapshots(address)

    async def explain(self, error: FlashsplitError) -> FlashsplitError:
        """Return the error behind an error: where a local worker has just died, its death; where a worker does not hold
        its stage, that it is not there now, because it will be loaded again."""
        if self.workers and isinstance(error, FailedPrecondition) and error.reason in LOADED_OTHERWISE:
            return self._report_unloaded(error)
        if error.code_name not in ("UNAVAILABLE", "CANCELLED", "INTERNAL") or error.reason in STILL_THERE:
            return error
        # A broken connection is often noticed before the end of the process.
        if (found := await self._losses.first_death(CAUSE_S)) is not None:
            index, death = found
            message = f"{self._losses.name(index)}: {death.message}"
            return WorkerFailed(message, death.log_lines, reason="WORKER_DIED", **error.where)
        if error.code_name == "INTERNAL":
            for process in (member.process for member in self._members):
                raised = None if process is None else process.last_exception()
                if process is not None and raised is not None:
                    error.message += f" (worker for {process.device}: {raised})"
        return error

    async def close(self) -> None:
        """End local workers and close connections. Safe to call twice."""
        self._losses.close()
        with contextlib.suppress(Exception):
            await self._peers.close()
        await asyncio.gather(self._standbys.close(), *(member.stop() for member in self._members))

    # --- starting

    def _shared_launch(self) -> Launch:
        """Return how local workers are started that share this host's cores."""
        places = [member.place for member in self._members]
        return replace(self.launch, threads=self.launch.threads or threads_each(places, self._plan.host_computing))

    async def _start(self, *, ends_sessions: bool = False) -> None:
        """Have all workers run and hold their parts. ends_sessions: as of `Loader.load_stage`."""
        launch, began = self._shared_launch(), time.monotonic()
        await _all(self._start_worker(index, launch) for index in range(len(self._members)))
        run_at = time.monotonic()
        addresses = [member.address for member in self._members]
        stages = len(self._plan.stages)
        chain = tuple(addresses[:stages])
        if self._plan.auto and self._choose_split is not None:
            self._plan = await self._or_death(self._choose_split(self._plan, addresses, self._peers))
            self._choose_split = None
        try:
            loads = [
                self._loader.load_stage(self._losses.name(index), stage, address, ends_sessions=ends_sessions)
                for index, (stage, address) in enumerate(zip(self._plan.stages, chain, strict=True))
            ]
            # All at once: who asks meanwhile is told of the chain as it was.
            self.workers, self.addresses = tuple(await self._or_death(_all(loads))), chain
            self.draft_address = addresses[stages] if self._plan.draft is not None else None
            self._losses.leave_edges()
            edges = enumerate(itertools.pairwise(self.addresses), 1)
            await self._or_death(_all(self._losses.watch_edge(index, *edge) for index, edge in edges))
        except FlashsplitError as error:
            self._losses.trouble = error
            raise
        check_same_model(self.workers)
        if self._plan.has_draft:
            beside = self.draft_address is None
            load = self._loader.load_draft(self.draft_address or self.addresses[-1], beside=beside)
            self.draft_worker = await self._or_death(load)
            assert self.draft_worker.draft is not None
            check_fit(self.draft_worker.draft, self.target, self._loader.names)
            if self.draft_address is not None:
                await self._or_death(self._losses.watch_edge(stages, self.addresses[-1], self.draft_address))
        self.start_times = StartTimes(run_at - began, time.monotonic() - run_at)

    async def _start_worker(self, index: int, launch: Launch) -> None:
        """Start a worker unless it runs already."""
        member = self._members[index]
        was_there = member.process is not None
        try:
            await member.start(launch, self._peers, self._wait_s)
        except FlashsplitError as error:
            raise with_name(error, self._losses.name(index)) from error
        if member.process is not None and not was_there:
            self._losses.watch_process(index, member.process)

    async def _or_death(self, work: Awaitable[T]) -> T:
        """Return the work's result. Raises how a worker was lost as soon as one dies or falls silent meanwhile."""
        task = asyncio.ensure_future(work)
        lost = [asyncio.ensure_future(self._gone(member)) for member in self._members]
        try:
            await asyncio.wait([task, *self._losses.deaths, *lost], return_when=asyncio.FIRST_COMPLETED)
            error = task.exception() if task.done() else self._first_lost(lost)
            if isinstance(error, FlashsplitError):
                raise await self.explain(error)
            return task.result()
        finally:
            for one in (task, *lost):
                one.cancel()
            await asyncio.gather(task, *lost, return_exceptions=True)

    async def _gone(self, member: Member) -> Unavailable:
        """Wait until a worker is not reached any more, and return the error that says how. One whose device hangs
        answers what it is asked, and may have got over it."""
        while (error := await self._peers.lost(member.address)).reason == DEVICE_HUNG:
            await asyncio.sleep(CAUSE_S)
        return error

    def _first_lost(self, lost: Sequence[asyncio.Future[Unavailable]]) -> FlashsplitError:
        """Return the error of the first worker of which it is known how it was lost, with the worker's name."""
        for index, one in enumerate(lost):
            if one.done():
                return with_name(one.result(), self._losses.name(index))
        return Unavailable("a worker died")


def _with_places(plan: Plan, members: Sequence[Member]) -> Plan:
    """Return the plan with its stages, and the draft's own worker, where these workers are."""
    stages = zip(plan.stages, members, strict=False)
    return replace(
        plan,
        stages=tuple(replace(stage, place=member.place) for stage, member in stages),
        draft=None if plan.draft is None else members[len(plan.stages)].place,
    )


async def _all(work: Any) -> list[Any]:
    """Return the results in order; the first error is raised and cancels the rest."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
