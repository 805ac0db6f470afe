"""Workers that stand by for those of the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import click

from coordinator.cli.option_groups import Flag
from coordinator.cluster.cluster import StandbyPlan
from coordinator.cluster.placement import Plan, WorkerPlace, parse_place
from coordinator.planning.memory import Models, stage_shares
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.sizes import format_size

HOT, WARM = "hot", "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyOptions:
    """Workers that wait to take the place of a stage whose worker is lost, so that answers go on at once."""

    standby: Annotated[
        str | None,
        Flag(
            "Workers that stand by for lost stages, each a device or an address as in --target-devices. The one that "
            "was lost stands by once it is back.  [default: none]",
            metavar="ENTRY[,ENTRY…]",
        ),
    ] = None
    standby_weights: Annotated[
        str | None,
        Flag(
            "With --standby: they hold weights ahead (hot: all layers where those fit, else one stage's), or run "
            "without any and read a stage's when it is lost (warm).  [default: hot]",
            type=click.Choice([HOT, WARM]),
        ),
    ] = None

    @property
    def places(self) -> tuple[WorkerPlace, ...]:
        """Where they are. Raises InvalidArgument for what is no worker's place, and for weights of none."""
        if self.standby is None:
            if self.standby_weights is not None:
                raise InvalidArgument(
                    f"--standby-weights {self.standby_weights} has no effect without --standby: name the workers that "
                    "stand by, or leave it out",
                    field="--standby-weights",
                )
            return ()
        return tuple(parse_place(entry.strip(), "--standby") for entry in self.standby.split(","))

    def check(self, taken: Sequence[WorkerPlace]) -> None:
        """Raise InvalidArgument for a running worker that is named twice. taken: places that have another part."""
        addresses = [place.address for place in taken]
        for place in self.places:
            if place.address is not None and place.address in addresses:
                raise InvalidArgument(
                    f"--standby names {place.address}, which has a part already: name a worker that has none",
                    field="--standby",
                )
            addresses.append(place.address)

    def plan(self, models: Callable[[], Models], plan: Plan) -> StandbyPlan:
        """Return what stands by for the stages of a plan. models: returns the sizes of what is placed; called once a
        worker is to load."""

        def weigh(layers: LayerRange) -> int:
            return held_bytes(models(), layers, plan.host_experts_of(layers))

        return StandbyPlan(self.places, self.standby_weights != WARM, weigh)

    def notes(self, models: Models, plan: Plan) -> list[str]:
        """Return for each worker which stages it could replace, and after what, as sentences without their dots."""
        whole = LayerRange(0, len(models.target.layers))
        size, stages = held_bytes(models, whole, plan.host_experts_of(whole)), len(plan.stages)
        any_stage = "stage 0" if stages == 1 else f"any of {stages} stages"
        largest = max(held_bytes(models, stage.layers, stage.host_experts) for stage in plan.stages)
        if self.standby_weights == WARM:
            how = f"holds nothing, and takes the place of {any_stage} after it has read up to {format_size(largest)}"
        else:
            how = (
                f"holds all layers where {format_size(size)} fit, and takes the place of {any_stage} without reading "
                f"weights; with less memory it holds one stage, and reads up to {format_size(largest)} for others"
            )
        return [f"{place} stands by: it {how}" for place in self.places]


def held_bytes(models: Models, layers: LayerRange, host_experts: float = 0.0) -> int:
    """Return the bytes of layers, of the ends that belong to them, and of a draft beside the last one, but for the
    share of experts that is left to the host: 0 to 1."""
    last = layers.last == len(models.target.layers)
    shares = stage_shares(models, layers, 1, draft_here=last, host_experts=host_experts)
    return sum(max(share.weight_bytes, share.cpu_bytes) - share.left_bytes for share in shares)
