"""A plan as figures: who holds what, how much of which memory, what travels, how fast. `picture` prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster.placement import Plan, WorkerPlace
from coordinator.planning.capacity import fitting_sessions
from coordinator.planning.edges import Edge, feature_bytes, plan_edges
from coordinator.planning.memory import Models, Share, cache_bytes, device_names, plan_shares
from coordinator.planning.planner import CONTEXT, SessionLoad
from coordinator.planning.step_time import Prediction, WorkerSpeed, bottleneck, predict
from services.layers import LayerRange
from services.messages.description import HeadPlace
from services.processes.device_memory import usable_bytes
from services.sizes import format_size, parse_size

PREFILL_ROWS = 512
"""Rows of a prefill chunk, as every command sends them by default."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """One device of one worker, in bytes.

    owner: "stage 0", "stage 0 experts" for those in the host's memory beside it, or "draft". memory: its name; devices
    that name the same one share it. cache_bytes: by context length. total_bytes, free_bytes: None where nobody has
    asked the device.
    """

    owner: str
    worker: str
    device: str
    memory: str
    share: Share
    weight_bytes: int
    cache_bytes: Mapping[int, int]
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Plain decode as predicted. by_length: tokens a second, by the number of tokens before them."""

    prediction: Prediction
    by_length: Mapping[int, float]
    bottleneck: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that `flashsplit plan` prints.

    lengths: the context lengths asked about. fitting: as of `fitting_sessions`. notes: sentences for people.
    """

    plan: Plan
    models: Models
    sessions: int
    lengths: tuple[int, ...]
    devices: tuple[DeviceLoad, ...]
    fitting: Mapping[int, int] | None
    edges: tuple[Edge, ...]
    draft_reason: str | None
    workers: tuple[WorkerSpeed, ...]
    forecast: Forecast | None
    notes: tuple[str, ...]


def make_report(
    models: Models,
    plan: Plan,
    *,
    lengths: Sequence[int],
    sessions: int,
    workers: Sequence[WorkerSpeed] = (),
    local_memory: tuple[int, int] | None = None,
    memory_share: float | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Return the figures of a plan.

    workers: as measured, one for each stage and then the draft's own; empty where nothing was measured. local_memory:
    this host's total and free bytes, for its CPU workers. memory_share: as of `fitting_sessions`.
    """
    stages = len(plan.stages)
    counts = [len(worker.devices) for worker in workers[:stages]] or [
        len(device_names(stage.place)) for stage in plan.stages
    ]
    loads: list[DeviceLoad] = []
    for index, shares in enumerate(plan_shares(models, plan, counts)):
        place = plan.stages[index].place if index < stages else plan.draft
        assert place is not None
        worker = workers[index] if workers else None
        for number, share in enumerate(shares):
            name = worker.devices[number].name if worker is not None else device_names(place)[number]
            total, free = (None, None)
            limited = place.memory is not None
            if worker is not None:
                total, free = worker.devices[number].total_bytes, worker.devices[number].free_bytes
                limited = worker.devices[number].limited
            elif place.memory is not None:
                total = free = usable_bytes(parse_size(place.memory, "--target-devices"), name)
            elif name == "cpu" and local_memory is not None:
                total, free = local_memory
            host = worker.host if worker is not None else "here"
            owner = f"stage {index}" if index < stages else "draft"
            memory = f"{name} of {host}" if place.address is None or worker is not None else str(place)
            loads.append(
                DeviceLoad(
                    owner=owner,
                    worker=str(place),
                    device=name,
                    memory=f"{memory} for {owner}" if limited else memory,
                    share=share,
                    weight_bytes=share.bytes_on(name),
                    cache_bytes={length: cache_bytes(models, share, length, sessions) for length in lengths},
                    total_bytes=total,
                    free_bytes=None if free is None else free + (worker.held_bytes // len(shares) if worker else 0),
                )
            )
        loads += _experts_beside(index, place, shares, worker, local_memory, dict.fromkeys(lengths, 0))
    notes = [*notes, *_sharing_notes(models), *_unpacked_notes(models, loads), *_expert_notes(plan, loads)]
    forecast = None
    if workers:
        layers, left = [stage.layers for stage in plan.stages], [stage.host_experts for stage in plan.stages]
        prediction = predict(models.target, layers, workers[:stages], CONTEXT, left)
        forecast = Forecast(
            prediction,
            {
                length: predict(models.target, layers, workers[:stages], length, left).tokens_per_s
                for length in (CONTEXT, *lengths)
            },
            bottleneck(prediction, workers[:stages]),
        )
    return Report(
        plan=plan,
        models=models,
        sessions=sessions,
        lengths=tuple(lengths),
        devices=tuple(loads),
        fitting=fitting_sessions(models, loads, memory_share),
        edges=tuple(plan_edges(models, plan, PREFILL_ROWS)),
        draft_reason=draft_reason(models, plan),
        workers=tuple(workers),
        forecast=forecast,
        notes=(*overfull(loads, SessionLoad(max(lengths), sessions)), *notes),
    )


def _experts_beside(
    index: int,
    place: WorkerPlace,
    shares: Sequence[Share],
    worker: WorkerSpeed | None,
    local_memory: tuple[int, int] | None,
    no_caches: Mapping[int, int],
) -> list[DeviceLoad]:
    """Return what the host of a stage's GPUs holds of its experts, as one load; none where that is nothing.

    index: the stage's. no_caches: nothing, by context length. The other arguments as of `make_report`.
    """
    names = device_names(place) if worker is None else [device.name for device in worker.devices]
    held = [share for share, name in zip(shares, names, strict=True) if share.bytes_beside(name)]
    if not held:
        return []
    total = free = None
    host = None if worker is None else worker.devices[0].host
    if worker is not None and host is not None:
        total, free = host.total_bytes, host.free_bytes + worker.host_held_bytes
    elif place.address is None and local_memory is not None:
        total, free = local_memory
    of = worker.host if worker is not None else "here"
    size = sum(share.host_bytes for share in held)
    return [
        DeviceLoad(
            owner=f"stage {index} experts",
            worker=str(place),
            device="cpu",
            memory=f"cpu of {of}" if place.address is None or worker is not None else f"cpu of {place}",
            share=Share(None, sum(share.left_bytes for share in held), size, draft=False),
            weight_bytes=size,
            cache_bytes=no_caches,
            total_bytes=total,
            free_bytes=free,
        )
    ]


def _expert_notes(plan: Plan, loads: Sequence[DeviceLoad]) -> list[str]:
    """Return what to know of stages that --expert-devices changes nothing for."""
    asked = [f"stage {index}" for index, stage in enumerate(plan.stages) if stage.host_experts]
    devices = {load.owner: load.device for load in loads}
    return [
        f"{owner} is on a CPU, whose memory holds its experts anyway: --expert-devices {plan.expert_devices} changes "
        "nothing there"
        for owner in asked
        if devices[owner] == "cpu"
    ]


def _sharing_notes(models: Models) -> list[str]:
    """Return what to know of layers that cannot be cut apart."""
    first, last = models.target.last_cut, len(models.target.layers)
    if first == last - 1:
        return []
    return [f"layers [{first}, {last}) share keys and values, so one device holds them: no stage begins behind {first}"]


def _unpacked_notes(models: Models, loads: Sequence[DeviceLoad]) -> list[str]:
    """Return what to know of CPUs that hold packed matrices in another form than that of the checkpoint."""
    target, draft = models.target, models.draft
    every = LayerRange(0, len(target.layers))
    stored = target.layers_bytes(every) + target.head_bytes
    on_cpu = target.cpu_layers_bytes(every) + target.cpu_head_bytes
    if on_cpu == stored and (draft is None or not draft.packed):
        # A draft's keys and values are made by matrices that a CPU holds twice, packed or not.
        return []
    how = (
        "its CPU multiplies by whole numbers of 4 and 8 bits, and has other forms, but for those of routed experts, "
        f"unpacked to {target.dtype}"
    )
    return [
        f"{load.owner} takes {format_size(load.weight_bytes)} for {format_size(load.share.weight_bytes)} of packed "
        f"weights: {how}"
        for load in loads
        if load.weight_bytes > load.share.weight_bytes
    ]


def draft_reason(models: Models, plan: Plan) -> str | None:
    """Return why the draft is where it is, and what that takes; None without a draft."""
    draft, target = models.draft, models.target
    if draft is None:
        return None
    last = len(plan.stages) - 1
    head = format_size(target.draft_head_bytes(draft.item_bytes))
    row = format_size(feature_bytes(models, len(target.layers)))
    own = draft.config.draft_vocab_size
    if plan.draft is None:
        shared = f"it shares that stage's lm_head, {head} less" if own is None else f"its own lm_head has {own} tokens"
        return (
            f"beside stage {last}, where the logits are: {shared}, and {row} of features a row stay in the process; "
            "--draft-device puts it elsewhere"
        )
    if own is not None:
        return (
            f"on {plan.draft}, as --draft-device says: its own lm_head has {own} tokens, and {row} of features a row "
            f"travel there from stage {last}; without --draft-device it sits beside that stage and they stay there"
        )
    if models.head_place is HeadPlace.LOADED:
        cost = f"it loads the target's lm_head, {head} more (--draft-head projected leaves that out)"
    else:
        cost = "its hidden rows go back to the last stage to be projected, which saves " + head
        if draft.chooser_bytes:
            cost += f" here, and has the {format_size(draft.chooser_bytes)} there by which its tokens are chosen"
    return (
        f"on {plan.draft}, as --draft-device says: {cost}, and {row} of features a row travel there from stage {last}; "
        "without --draft-device it sits beside that stage and neither is needed"
    )


def overfull(loads: Sequence[DeviceLoad], load: SessionLoad) -> list[str]:
    """Return a sentence for every memory that cannot hold its devices' weights and caches."""
    sentences = []
    for memory in dict.fromkeys(device.memory for device in loads):
        members = [device for device in loads if device.memory == memory]
        free = members[0].free_bytes
        needed = sum(device.weight_bytes + device.cache_bytes[load.length] for device in members)
        if free is not None and needed > free:
            sentences.append(
                f"{memory} has {format_size(free)} free and would need {format_size(needed)} for {load.sessions} "
                f"sessions of {load.length} tokens: give it fewer layers, or lower --max-model-len or --sessions"
            )
    return sentences


def as_json(report: Report) -> dict[str, object]:
    """Return the report for programs, in bytes, seconds and tokens a second."""
    target, draft, forecast = report.models.target, report.models.draft, report.forecast
    return {
        "dtype": target.dtype,
        "kv_dtype": target.kv_dtype,
        "num_layers": len(target.layers),
        "weight_bytes": target.weight_bytes,
        "sessions": report.sessions,
        "max_model_len": list(report.lengths),
        "fitting_sessions": None
        if report.fitting is None
        else {str(length): sessions for length, sessions in report.fitting.items()},
        "target_devices": ",".join(str(stage.place) for stage in report.plan.stages),
        "target_layers": ranges_text(report.plan),
        "expert_devices": report.plan.expert_devices,
        "devices": [
            {
                "owner": device.owner,
                "worker": device.worker,
                "device": device.device,
                "layers": None
                if device.share.layers is None
                else [device.share.layers.first, device.share.layers.last],
                "weight_bytes": device.weight_bytes,
                "cache_bytes": {str(length): size for length, size in device.cache_bytes.items()},
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
            }
            for device in report.devices
        ],
        "edges": [
            {
                "from": edge.source,
                "to": edge.to,
                "decode_bytes": edge.decode_bytes,
                "verify_bytes": edge.verify_bytes,
                "prefill_bytes": edge.prefill_bytes,
            }
            for edge in report.edges
        ],
        "draft": None
        if draft is None
        else {
            "layout": draft.config.layout,
            "weight_bytes": draft.weight_bytes,
            "block_size": draft.block_size,
            "reason": report.draft_reason,
        },
        "measured": [
            {
                "worker": str(worker.place),
                "host": worker.host,
                "round_trip_s": worker.link.round_trip_s,
                "link_bytes_per_s": worker.link.bytes_per_s,
                "devices": [
                    {
                        "device": device.name,
                        "read_bytes_per_s": device.read_bytes_per_s,
                        "matmul_flops_per_s": device.matmul_flops_per_s,
                        "layer_s": dict(device.layer_s),
                        "host": None
                        if device.host is None
                        else {
                            "total_bytes": device.host.total_bytes,
                            "free_bytes": device.host.free_bytes,
                            "read_bytes_per_s": device.host.read_bytes_per_s,
                            "layer_s": dict(device.host.layer_s),
                        },
                    }
                    for device in worker.devices
                ],
            }
            for worker in report.workers
        ],
        "predicted": None
        if forecast is None
        else {
            "decode_tokens_per_s": {str(length): rate for length, rate in forecast.by_length.items()},
            "step_s": forecast.prediction.step_s,
            "stages": [
                {
                    "read_s": stage.read_s,
                    "operators_s": stage.operators_s,
                    "hop_s": stage.hop_s,
                    "host_s": stage.host_s,
                }
                for stage in forecast.prediction.stages
            ],
            "bottleneck": forecast.bottleneck,
        },
        "notes": list(report.notes),
    }


def ranges_text(plan: Plan) -> str:
    """Return the plan's layers as --target-layers takes them."""
    return ",".join(f"{stage.layers.first}:{stage.layers.last}" for stage in plan.stages)
