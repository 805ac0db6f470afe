"""What a placement takes of each device's memory: weights, and the caches of so many sessions of such a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.cluster.placement import Plan, WorkerPlace
from coordinator.planning.draft_size import DraftSize
from coordinator.planning.model_size import ModelSize
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace


@dataclass(frozen=True, slots=True)
class Models:
    """What is placed: the target, its draft if there is one, and how the two work together."""

    target: ModelSize
    draft: DraftSize | None
    head_place: HeadPlace = HeadPlace.LOADED
    transport: FeatureTransport = FeatureTransport.SUM

    @property
    def block_rows(self) -> int:
        """How many rows the largest verify has."""
        return 1 if self.draft is None else self.draft.block_size


@dataclass(frozen=True, slots=True)
class Share:
    """One device's part of a stage, or the draft in a worker of its own.

    weight_bytes: as packed as they are stored. cpu_bytes: on a CPU, which unpacks some packed matrices, and holds an
    embedding that is lm_head too only once, as lm_head. layers: None in the draft's own worker. draft: whether the
    draft is here. captures: how many blocks are captured here for it. left_bytes: of weight_bytes those of experts that
    a GPU leaves to its host; host_bytes: what these take there.
    """

    layers: LayerRange | None
    weight_bytes: int
    cpu_bytes: int
    draft: bool
    captures: int = 0
    left_bytes: int = 0
    host_bytes: int = 0

    def bytes_on(self, device: str) -> int:
        """Return the bytes of the weights on a device of this name."""
        return self.cpu_bytes if device == "cpu" else self.weight_bytes - self.left_bytes

    def bytes_beside(self, device: str) -> int:
        """Return the bytes of experts in the host's memory beside a device of this name."""
        return 0 if device == "cpu" else self.host_bytes


def device_names(place: WorkerPlace) -> tuple[str, ...]:
    """Return the names of the devices of a worker that is to be started; a running one alone knows its own."""
    return tuple((place.devices or str(place)).split("+"))


def spread(model: ModelSize, layers: LayerRange, devices: int) -> list[LayerRange]:
    """Return the layers of each of a worker's devices, as the worker spreads them.

    Raises InvalidArgument for fewer layers than devices, and where they can be cut in fewer places.
    """
    if layers.most_parts(model.last_cut) < devices:
        raise InvalidArgument(
            f"layers {layers} cannot be spread over {devices} devices of one worker: name fewer devices or give that "
            "worker more layers",
            field="--target-devices",
        )
    return layers.spread(devices, model.last_cut)


def stage_shares(
    models: Models, layers: LayerRange, devices: int, *, draft_here: bool, host_experts: float = 0.0
) -> list[Share]:
    """Return what each device of a stage's worker holds. draft_here: whether the last one holds the draft too.
    host_experts: as of `StagePlan`."""
    target, draft = models.target, models.draft
    shares = []
    runs = spread(target, layers, devices)
    for index, run in enumerate(runs):
        weights, on_cpu, captures, holds_draft = target.layers_bytes(run), target.cpu_layers_bytes(run), 0, False
        first, last = index == 0 and layers.first == 0, index == devices - 1 and layers.last == len(target.layers)
        if first:
            weights += target.embedding_bytes
            on_cpu += 0 if target.tied_head and last else target.embedding_bytes
        if last:
            weights += target.norm_bytes + (0 if target.tied_head and first else target.head_bytes)
            on_cpu += target.norm_bytes + target.cpu_head_bytes
        if draft is not None:
            captures = draft.captured(run)
            if models.transport is FeatureTransport.SUM:
                weights += captures * draft.capture_bytes
                on_cpu += captures * draft.capture_bytes
            if last and draft_here:
                weights += draft.weight_bytes
                on_cpu += draft.cpu_bytes
                holds_draft = True
            elif last:
                weights += _chooser_beside_head(models)
                on_cpu += _chooser_beside_head(models)
        shares.append(Share(run, weights, on_cpu, holds_draft, captures, *target.left_bytes(run, host_experts)))
    return shares


def draft_share(models: Models) -> Share:
    """Return what a draft's own worker holds."""
    target, draft = models.target, models.draft
    assert draft is not None
    if models.head_place is not HeadPlace.LOADED or draft.config.draft_vocab_size is not None:
        elsewhere = _chooser_beside_head(models)
        return Share(None, draft.weight_bytes - elsewhere, draft.cpu_bytes - elsewhere, True)
    head, head_on_cpu = (target.draft_head_bytes(draft.item_bytes, on_cpu=on_cpu) for on_cpu in (False, True))
    return Share(None, draft.weight_bytes + head, draft.cpu_bytes + head_on_cpu, True)


def _chooser_beside_head(models: Models) -> int:
    """Return the bytes of what chooses a draft's tokens that the last stage holds for a draft with a worker of its own:
    where its hidden rows go to the target's lm_head."""
    draft = models.draft
    assert draft is not None
    projected = models.head_place is HeadPlace.PROJECTED and draft.config.draft_vocab_size is None
    return draft.chooser_bytes if projected else 0


def cache_bytes(models: Models, share: Share, length: int, sessions: int) -> int:
    """Return the bytes of the caches of so many sessions of up to `length` tokens."""
    total = 0
    if share.layers is not None:
        layers = models.target.layers[share.layers.first : share.layers.last]
        total += sum(layer.cache_bytes(length, models.block_rows) for layer in layers)
    if share.draft and models.draft is not None:
        total += models.draft.cache_bytes(length)
    return total * sessions


def plan_shares(models: Models, plan: Plan, devices: Sequence[int]) -> list[list[Share]]:
    """Return the shares of every stage in order and then of the draft's own worker.

    devices: how many each stage's worker has.
    """
    shares = []
    for index, stage in enumerate(plan.stages):
        last = index == len(plan.stages) - 1
        draft_here = last and plan.has_draft and plan.draft is None
        host = stage.host_experts
        shares.append(stage_shares(models, stage.layers, devices[index], draft_here=draft_here, host_experts=host))
    if plan.draft is not None:
        shares.append([draft_share(models)])
    return shares
