"""Asking workers how fast they are: the running ones, and local ones started for it and ended after."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from coordinator.cluster.loading import when_free
from coordinator.cluster.placement import Plan, WorkerPlace, threads_each
from coordinator.planning.memory import Models
from coordinator.planning.planner import SessionLoad, choose_split
from coordinator.planning.step_time import WorkerSpeed
from services.errors import FlashsplitError
from services.messages.description import Role
from services.messages.measure import MeasureRequest
from services.processes.launch import Launch
from services.processes.worker_process import WorkerProcess
from services.rpc.peers import Peers

OnWorker = Callable[[str], None]
"""Called with the place of each worker before it is measured."""

AUTO_LENGTH, AUTO_SESSIONS = 8192, 1
"""What must fit where a command does not say it: one session, of this length or the model's own."""


def places_of(plan: Plan) -> list[WorkerPlace]:
    """Return the places of the stages in order, then of the draft's own worker."""
    return [*(stage.place for stage in plan.stages), *([plan.draft] if plan.draft is not None else [])]


@contextlib.asynccontextmanager
async def workers_at(plan: Plan, launch: Launch) -> AsyncIterator[tuple[str, ...]]:
    """Give the addresses of a plan's workers. The local ones, one for equal places, run as they would in a cluster."""
    places = places_of(plan)
    threads = launch.threads or threads_each(places, plan.host_computing)
    launch = replace(launch, threads=threads, prefix_cache_bytes=0)
    processes = {
        place: WorkerProcess(place.devices, [Role.TARGET], launch, place.memory)
        for place in places
        if place.devices is not None
    }
    try:
        starting = [asyncio.ensure_future(process.start()) for process in processes.values()]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        yield tuple(place.address or processes[place].address for place in places)
    finally:
        await asyncio.gather(*(process.stop() for process in processes.values()))


async def measure_workers(
    plan: Plan,
    addresses: Sequence[str],
    peers: Peers,
    models: Models,
    model_path: str,
    on_worker: OnWorker = lambda worker: None,
) -> tuple[WorkerSpeed, ...]:
    """Measure the workers of a plan, and return one speed for each stage in order, then for the draft's own worker.

    addresses: theirs, in that order. They are measured one after the other, because workers of one host would slow each
    other down; equal local places once.

    Raises Unavailable for a worker that doesn't answer, FailedPrecondition for one with open sessions, and for one that
    another process holds.
    """
    target = models.target
    request = MeasureRequest(model_path, target.dtype, target.weight_bytes, stages=len(plan.stages))
    speeds: dict[WorkerPlace, WorkerSpeed] = {}
    places = places_of(plan)
    for place, address in zip(places, addresses, strict=True):
        if place in speeds:
            continue
        on_worker(str(place))
        try:
            worker = await peers.worker(address)
            description = await worker.describe()
            devices = await when_free(functools.partial(worker.measure, request))
            link = await worker.measure_link(target.hidden_size * target.item_bytes)
        except FlashsplitError as error:
            error.message = f"measuring {place}: {error.message}"
            raise
        held = sum(part.weight_bytes for part in (description.target, description.draft) if part is not None)
        beside = 0 if description.target is None else description.target.host_weight_bytes
        speeds[place] = WorkerSpeed(place, description.host, devices, link, held, beside)
    return tuple(speeds[place] for place in places)


class SplitChooser:
    """What --target-layer-split auto does: it chooses the layers of a cluster whose workers have just been started."""

    def __init__(self, models: Models, model_path: str) -> None:
        self._models, self._model_path = models, model_path

    async def __call__(self, plan: Plan, addresses: Sequence[str], peers: Peers) -> Plan:
        """Return the plan with its layers. Raises what `measure_workers` and `choose_split` raise."""
        workers = await measure_workers(plan, addresses, peers, self._models, self._model_path)
        stages = len(plan.stages)
        draft_worker = workers[stages] if plan.draft is not None else None
        load = SessionLoad(min(AUTO_LENGTH, self._models.target.max_position), AUTO_SESSIONS)
        return choose_split(self._models, plan, workers[:stages], draft_worker, load)
