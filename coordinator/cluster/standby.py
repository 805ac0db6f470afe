"""Workers that stand by: each holds what it can of the model, and takes the place of a stage's worker that is lost.

It owns the stand-by workers and the tasks that keep them ready; `take` gives one away, and a lost worker that is given
to `add` becomes one itself once it is back. It knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from coordinator.cluster.loading import Loader
from coordinator.cluster.member import Member
from coordinator.cluster.placement import Plan, StagePlan
from coordinator.cluster.resplit import WeighLayers, weight_room
from services.errors import FailedPrecondition, FlashsplitError
from services.layers import LayerRange
from services.messages.description import Role, WorkerDescription
from services.processes.launch import Launch
from services.processes.worker_process import failure_fields
from services.rpc.peers import Peers

LOST_PAUSE_S = 2.0
"""Before a lost worker is started again to stand by: answers that go on have the host's cores first."""

AGAIN_S, LONGEST_AGAIN_S = 0.5, 10.0
"""Before a stand-by worker that was not made ready is tried again, and at most: each time the pause is doubled."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StandbyState:
    """A worker that stands by, for people.

    place: where it is, as the command line says it. layers: what it holds; None where it holds nothing (warm). stages:
    those whose place it could take at once, by what it holds; without layers all of them, each after a load. why: what
    keeps it from that now, None for nothing.
    """

    place: str
    layers: LayerRange | None
    stages: tuple[int, ...]
    why: str | None


class _Standby:
    """One worker. layers: what it holds; None before that and for nothing. why: what keeps it from being ready."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.layers: LayerRange | None = None
        self.roles: tuple[Role, ...] = ()
        self.why: str | None = "it is being started"
        self.task: asyncio.Task[None] | None = None


class Standbys:
    """The stand-by workers of a cluster. Use `close`."""

    def __init__(
        self, peers: Peers, loader: Loader, launch: Launch, *, hot: bool = True, weigh: WeighLayers | None = None
    ) -> None:
        """hot: they load layers ahead, those that fit by `weigh`; without it, whatever they can load."""
        self._peers, self._loader, self._launch, self._hot, self._weigh = peers, loader, launch, hot, weigh
        self._workers: list[_Standby] = []

    def add(self, member: Member, plan: Plan, pause_s: float = 0.0) -> None:
        """Make a worker ready to stand by for the stages of this plan, however long that takes.

        pause_s: begin after so many seconds.
        """
        standby = _Standby(member)
        self._workers.append(standby)
        standby.task = asyncio.ensure_future(self._keep(standby, plan, pause_s))

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers that stand by, or are being made ready to."""
        return tuple(one.member for one in self._workers)

    def states(self, plan: Plan) -> tuple[StandbyState, ...]:
        """Return what stands by for the stages of a plan."""
        return tuple(
            StandbyState(
                str(one.member.place),
                one.layers,
                tuple(
                    index for index, stage in enumerate(plan.stages) if _suits(one, index, plan) and _covers(one, stage)
                ),
                one.why,
            )
            for one in self._workers
        )

    def can_take(self, indices: Sequence[int], plan: Plan) -> bool:
        """Return whether there is a worker that is ready for the place of each of these stages."""
        return self._choose(indices, plan) is not None

    async def take(self, indices: Sequence[int], plan: Plan) -> list[Member] | None:
        """Return a worker that is ready for the place of each of these stages, best one that holds it; None where there
        are not enough.

        They stand by no more.
        """
        chosen = self._choose(indices, plan)
        if chosen is None:
            return None
        for one in chosen:
            self._workers.remove(one)
            await _end(one)
        return [one.member for one in chosen]

    def ready_for(self, index: int, plan: Plan) -> str | None:
        """Return the address of a worker that is ready for the place of a stage; None without one."""
        chosen = self._choose([index], plan)
        return None if chosen is None else chosen[0].member.address

    async def take_named(self, text: str, roles: Sequence[Role]) -> Member | None:
        """Return the worker that stands by at this place or address, which stands by no more; None where none does.

        roles: what it must offer; one on a device that was started with others is passed over, since another one can be
        started there. Raises FailedPrecondition for one that is not ready.
        """
        for one in self._workers:
            if one.member.place.devices is not None and not {*roles} <= {*one.member.roles}:
                continue
            if text == str(one.member.place) or (one.why is None and text == one.member.address):
                if one.why is not None:
                    raise FailedPrecondition(
                        f"the stand-by worker {text} is not ready, {one.why}: wait for it, or name another one",
                        reason="STANDBY_NOT_READY",
                        field="to",
                    )
                self._workers.remove(one)
                await _end(one)
                return one.member
        return None

    def _choose(self, indices: Sequence[int], plan: Plan) -> list[_Standby] | None:
        chosen: list[_Standby] = []
        for index in indices:
            stage = plan.stages[index]
            fit = [
                one
                for one in self._workers
                if one not in chosen
                and one.why is None
                and _suits(one, index, plan)
                and self._peers.trouble(one.member.address) is None
                and self._peers.leaving(one.member.address) is None
            ]
            if not fit:
                return None
            # Of those that hold the stage the one that holds the least else.
            chosen.append(min(fit, key=lambda one: (not _covers(one, stage), len(one.layers or ()))))
        return chosen

    async def close(self) -> None:
        """End all workers that stand by. Safe to call twice."""
        workers, self._workers = self._workers, []
        for one in workers:
            await _end(one)
        await asyncio.gather(*(one.member.stop() for one in workers))

    async def _keep(self, standby: _Standby, plan: Plan, pause_s: float) -> None:
        """Make a worker ready, and ready again whenever it is lost."""
        await asyncio.sleep(pause_s)
        pause_s = AGAIN_S
        while True:
            try:
                # One that was lost may be there still, in no state to be called.
                await standby.member.stop()
                await standby.member.start(self._launch, self._peers)
                await self._prepare(standby, plan)
            except FlashsplitError as error:
                standby.why = error.message.partition("\n")[0]
                log.info("standby.not_ready", place=str(standby.member.place), **failure_fields(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_AGAIN_S)
                continue
            standby.why, pause_s = None, AGAIN_S
            log.info("standby.ready", place=str(standby.member.place), layers=str(standby.layers))
            lost = await self._peers.lost(standby.member.address)
            standby.why, standby.layers = lost.message, None
            log.warning("standby.lost", place=str(standby.member.place), why=lost.message)

    async def _prepare(self, standby: _Standby, plan: Plan) -> None:
        """Have a worker load what it can hold of the stages, where it is to hold any."""
        address = standby.member.address
        described = await (await self._peers.worker(address)).describe()
        standby.roles, standby.layers = described.roles, None
        if not self._hot:
            return
        name = f"stand-by ({standby.member.place})"
        for layers in _holdings(plan, self._workers.index(standby)):
            if not self._fits(layers, described):
                continue
            try:
                stage = StagePlan(standby.member.place, layers, plan.host_experts_of(layers))
                await self._loader.load_stage(name, stage, address)
                holds_last = layers.last == plan.stages[-1].layers.last
                if holds_last and plan.draft_beside and Role.DRAFT in described.roles:
                    await self._loader.load_draft(address, beside=True)
            except FlashsplitError as error:
                if error.reason not in ("DOES_NOT_FIT", "OUT_OF_MEMORY"):
                    raise
                log.info("standby.does_not_fit", place=str(standby.member.place), layers=str(layers), why=error.message)
                continue
            standby.layers = layers
            return

    def _fits(self, layers: LayerRange, described: WorkerDescription) -> bool:
        room = weight_room(described)
        return self._weigh is None or room is None or self._weigh(layers) <= room


def _holdings(plan: Plan, number: int) -> Sequence[LayerRange]:
    """Return what a stand-by worker may hold, the most useful first: all layers, so that it can be any stage; else one
    stage, another one for each worker."""
    stages = [stage.layers for stage in plan.stages]
    first = number % len(stages)
    return list(dict.fromkeys([LayerRange(0, stages[-1].last), *stages[first:], *stages[:first]]))


def _suits(standby: _Standby, index: int, plan: Plan) -> bool:
    """Return whether a worker offers the roles that the worker of a stage must have."""
    holds_draft = plan.draft_beside and index == len(plan.stages) - 1
    return Role.TARGET in standby.roles and (Role.DRAFT in standby.roles or not holds_draft)


def _covers(standby: _Standby, stage: StagePlan) -> bool:
    """Return whether a worker holds all layers of a stage."""
    held = standby.layers
    return held is not None and held.first <= stage.layers.first and stage.layers.last <= held.last


async def _end(standby: _Standby) -> None:
    """End the task that keeps a worker ready."""
    if standby.task is not None:
        standby.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await standby.task
        standby.task = None
