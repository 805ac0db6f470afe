"""Choosing the layers of each worker from what was measured, and finding where fewer workers would be faster."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.cluster.placement import Plan
from coordinator.planning.memory import Models, Share, cache_bytes, draft_share, stage_shares
from coordinator.planning.split import best_split
from coordinator.planning.step_time import Prediction, WorkerSpeed, predict, stage_time
from services.errors import FailedPrecondition
from services.layers import LayerRange
from services.sizes import format_size

RESERVE = 0.05
"""Share of a device's memory left free: activations of a prefill chunk, rounding of the allocator, other programs."""

CONTEXT = 256
"""Tokens before the step whose time is minimised."""

HOST_SHARES = tuple(eighths / 8 for eighths in range(1, 9))
"""The shares of experts in hosts' memory that are tried where they do not fit the devices', the smallest first."""

Memory = Hashable


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """What must fit beside the weights: so many sessions of up to `length` tokens each."""

    length: int
    sessions: int


def memory_of(worker: WorkerSpeed, index: int, device: int) -> Memory:
    """Return what names a device's memory: devices of one name on one host are one memory, but for a part of one that a
    worker keeps to. index: which worker of the plan it is."""
    name = worker.devices[device].name
    return (worker.host, name, index) if worker.devices[device].limited else (worker.host, name)


def host_memory(worker: WorkerSpeed) -> Memory:
    """Return what names the memory of a worker's host, in which CPU workers are too."""
    return (worker.host, "cpu")


def free_bytes(workers: Sequence[WorkerSpeed]) -> dict[Memory, int]:
    """Return the bytes that may be used of each memory: what is free, and what the workers hold and will give up."""
    free: dict[Memory, int] = {}
    held: dict[Memory, int] = {}
    for index, worker in enumerate(workers):
        for number, device in enumerate(worker.devices):
            memory = memory_of(worker, index, number)
            room = device.free_bytes - int(device.total_bytes * RESERVE)
            free[memory] = min(free.get(memory, room), room)
            held[memory] = held.get(memory, 0) + worker.held_bytes // len(worker.devices)
            if device.host is not None:
                beside = host_memory(worker)
                room = device.host.free_bytes - int(device.host.total_bytes * RESERVE)
                free[beside] = min(free.get(beside, room), room)
                held[beside] = held.get(beside, 0) + worker.host_held_bytes // len(worker.devices)
    return {memory: max(room + held[memory], 0) for memory, room in free.items()}


def choose_split(
    models: Models, plan: Plan, workers: Sequence[WorkerSpeed], draft_worker: WorkerSpeed | None, load: SessionLoad
) -> Plan:
    """Return the plan with the fastest layers that fit.

    Where none fit, and the plan does not say where experts are, hosts of GPUs take the smallest share of them with
    which they do. workers: one for each stage. draft_worker: the draft's own, where the plan names one.

    Raises FailedPrecondition when nothing fits, saying how much is missing.
    """
    everyone = [*workers, *([draft_worker] if draft_worker is not None else [])]
    free = free_bytes(everyone)
    if draft_worker is not None:
        share = draft_share(models)
        free[memory_of(draft_worker, len(workers), 0)] -= share.weight_bytes + cache_bytes(
            models, share, load.length, load.sessions
        )
    for tried in (plan, *_with_host_experts(models, plan, workers)):
        ranges = _fastest(models, tried, workers, free, load)
        if ranges is not None:
            stages = (replace(stage, layers=layers) for stage, layers in zip(tried.stages, ranges, strict=True))
            return replace(tried, stages=tuple(stages), auto=False)
    raise FailedPrecondition(_does_not_fit(models, free, load), reason="DOES_NOT_FIT")


def _with_host_experts(models: Models, plan: Plan, workers: Sequence[WorkerSpeed]) -> Iterator[Plan]:
    """Yield the plan with more and more experts in the memory of GPUs' hosts, where it does not say where they are."""
    beside = [worker.devices[0].host is not None for worker in workers]
    if plan.expert_devices is not None or not models.target.experts or not any(beside):
        return
    names = [place.devices or str(place) for place in (stage.place for stage in plan.stages)]
    gpus = dict.fromkeys(name for name, has_host in zip(names, beside, strict=True) if has_host)
    for share in HOST_SHARES:
        stages = zip(plan.stages, beside, strict=True)
        kept = ",".join(f"{name}={1 - share:g}" for name in gpus)
        yield replace(
            plan,
            stages=tuple(replace(stage, host_experts=share if has_host else 0.0) for stage, has_host in stages),
            expert_devices="cpu" if share == 1 else f"{kept},cpu={share:g}",
        )


def faster_subset(
    models: Models, plan: Plan, workers: Sequence[WorkerSpeed], load: SessionLoad, *, by: float = 1.05
) -> tuple[tuple[int, ...], Prediction] | None:
    """Return the indices of workers that alone would decode faster than the plan by a factor, and their prediction.

    None where no smaller set of workers would.
    """
    model = models.target
    host = [stage.host_experts for stage in plan.stages]
    ranges = _fastest(models, plan, workers, free_bytes(workers), load, may_skip=True)
    chosen = tuple(index for index, layers in enumerate(ranges or ()) if len(layers))
    if ranges is None or len(chosen) == len(workers):
        return None
    alone = predict(
        model,
        [ranges[index] for index in chosen],
        [workers[index] for index in chosen],
        CONTEXT,
        [host[index] for index in chosen],
    )
    whole = predict(model, [stage.layers for stage in plan.stages], workers, CONTEXT, host)
    return (chosen, alone) if whole.step_s > alone.step_s * by else None


def _fastest(
    models: Models,
    plan: Plan,
    workers: Sequence[WorkerSpeed],
    free: Mapping[Memory, int],
    load: SessionLoad,
    *,
    may_skip: bool = False,
) -> tuple[LayerRange, ...] | None:
    model, host = models.target, [stage.host_experts for stage in plan.stages]
    count = len(model.layers)

    def cost(stage: int, layers: LayerRange) -> float:
        if layers.first > model.last_cut or layers.most_parts(model.last_cut) < len(workers[stage].devices):
            return float("inf")
        return stage_time(model, layers, workers[stage], CONTEXT, host[stage]).total_s

    def usage(stage: int, layers: LayerRange) -> dict[Memory, int]:
        worker = workers[stage]
        memories = [memory_of(worker, stage, index) for index in range(len(worker.devices))]
        taken = dict.fromkeys(memories, 0)
        leaves = host[stage] > 0 and worker.devices[0].host is not None
        if leaves:
            taken.setdefault(host_memory(worker), 0)
        if layers.most_parts(model.last_cut) < len(worker.devices):
            return taken
        here = plan.draft_beside and layers.last == count
        shares = stage_shares(models, layers, len(worker.devices), draft_here=here, host_experts=host[stage])
        for index, share in enumerate(shares):
            taken[memories[index]] += taken_bytes(models, share, load, worker.devices[index].name)
            if leaves:
                taken[host_memory(worker)] += share.bytes_beside(worker.devices[index].name)
        return taken

    return best_split(count, len(workers), cost, usage, free, may_skip=may_skip)


def taken_bytes(models: Models, share: Share, load: SessionLoad, device: str = "") -> int:
    """Return the bytes that a share takes with its sessions: weights and caches. device: its name, where it matters."""
    return share.bytes_on(device) + cache_bytes(models, share, load.length, load.sessions)


def _does_not_fit(models: Models, free: Mapping[Memory, int], load: SessionLoad) -> str:
    whole = stage_shares(models, LayerRange(0, len(models.target.layers)), 1, draft_here=models.draft is not None)[0]
    caches = cache_bytes(models, whole, load.length, load.sessions)
    room = format_size(sum(max(size, 0) for size in free.values()))
    return (
        f"no split fits: {format_size(whole.weight_bytes)} of weights and {format_size(caches)} of caches for "
        f"{load.sessions} sessions of {load.length} tokens, {room} usable on the workers; name more devices or a "
        "smaller --dtype, or see with flashsplit plan which --sessions and --max-model-len fit"
    )
