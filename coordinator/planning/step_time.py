"""How long a plain decode step takes: the stages one after the other, each reading all its weights, and the hops.

At one row a layer costs the bytes of its matrices over the device's bandwidth, and what its operators cost whatever
their size; both are measured (`shard_worker/measure/probe.py`). On a CPU they add up. On a GPU the operators are
launched ahead while weights are read, so the longer of the two counts. Stages never overlap: the next token needs this
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.cluster.placement import WorkerPlace
from coordinator.planning.memory import spread
from coordinator.planning.model_size import ModelSize
from services.layers import LayerRange
from services.messages.measure import DeviceSpeed, LinkSpeed

COORDINATOR_S = 0.0001
"""Seconds that the coordinator itself takes for a token: text, stop strings, the next frame."""

SESSION_S = 0.00025
"""Seconds that a session takes around each stage's step: checks, positions, packing what comes and goes."""


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """One worker, measured.

    host: where its devices are. held_bytes, host_held_bytes: weights that it holds now, on its devices and in the
    host's memory beside them, and will give up for new ones.
    """

    place: WorkerPlace
    host: str
    devices: tuple[DeviceSpeed, ...]
    link: LinkSpeed
    held_bytes: int = 0
    host_held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PredictedStageTime:
    """Where a stage's share of a step goes.

    read_s: reading weights and caches. operators_s: what operators cost beside that. hop_s: the way there and back.
    overlapping: whether reading and operators run at the same time. host_s: reading experts in the host's memory.
    """

    read_s: float
    operators_s: float
    hop_s: float
    overlapping: bool = False
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The share, with what a session does around it."""
        both = (self.read_s, self.operators_s)
        return (max(both) if self.overlapping else sum(both)) + self.host_s + SESSION_S + self.hop_s


def stage_time(
    model: ModelSize, layers: LayerRange, worker: WorkerSpeed, context: int, host_experts: float = 0.0
) -> PredictedStageTime:
    """Return a stage's share of a step with `context` tokens before it. host_experts: as of `StagePlan`.

    A GPU that leaves experts to its host waits for them in each layer, so that nothing is launched ahead there.
    """
    read = operators = in_host = 0.0
    overlapping = worker.devices[0].name != "cpu"
    for device, run in zip(worker.devices, spread(model, layers, len(worker.devices)), strict=True):
        held = model.layers[run.first : run.last]
        layer_s, left = device.layer_s, 0.0
        if host_experts and device.host is not None:
            layer_s, left, overlapping = device.host.layer_s, model.in_host(host_experts), False
            in_host += left * sum(layer.cpu_expert_read for layer in held) / device.host.read_bytes_per_s
        read_bytes = sum(layer.read_bytes - left * layer.expert_read + layer.context_bytes(context) for layer in held)
        read += read_bytes / device.read_bytes_per_s
        slowest = max(layer_s.values(), default=0.0)
        operators += device.step_s + sum(layer_s.get(layer.kind, slowest) for layer in held)
    if layers.last == len(model.layers):
        last = worker.devices[-1]
        read += model.head_bytes / last.read_bytes_per_s
        operators += last.choose_s
    return PredictedStageTime(read, operators, worker.link.round_trip_s, overlapping, in_host)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The times of all stages of one placement, in a step with `context` tokens before it."""

    context: int
    stages: tuple[PredictedStageTime, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return sum(stage.total_s for stage in self.stages) + COORDINATOR_S

    @property
    def tokens_per_s(self) -> float:
        """Plain decode's rate."""
        return 1 / self.step_s


def predict(
    model: ModelSize,
    layers: Sequence[LayerRange],
    workers: Sequence[WorkerSpeed],
    context: int,
    host_experts: Sequence[float] | None = None,
) -> Prediction:
    """Return the times of plain decode over these stages.

    layers, workers: one for each stage. host_experts: as of `StagePlan`, one for each; None for experts with their
    layers.
    """
    parts = zip(layers, workers, host_experts or [0.0] * len(layers), strict=True)
    return Prediction(context, tuple(stage_time(model, part, worker, context, host) for part, worker, host in parts))


def bottleneck(prediction: Prediction, workers: Sequence[WorkerSpeed]) -> str:
    """Return a sentence that says what the largest part of a step is and what would make it smaller."""
    parts = []
    for index, (stage, worker) in enumerate(zip(prediction.stages, workers, strict=True)):
        name = f"stage {index} ({worker.place})"
        rate = worker.devices[0].read_bytes_per_s / 1e9
        parts += [
            (stage.read_s, f"{name} reading its weights at {rate:.1f} GB/s: a faster device or fewer layers there"),
            (stage.operators_s, f"operators of {name}: fewer layers there, or a device that runs them faster"),
            (stage.host_s, f"{name} reading experts in its host's memory: a smaller share of them there"),
            (stage.hop_s, f"the way to {name}: a faster link, or one worker less"),
        ]
    seconds, what = max(parts)
    return f"{what} would help; {seconds * 1e3:.2f} of {prediction.step_s * 1e3:.2f} ms"
