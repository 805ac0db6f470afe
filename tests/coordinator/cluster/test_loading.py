"""Having workers load: what they keep keys and values in is what was asked for, and the same in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from coordinator.cluster.agreement import check_same_model
from coordinator.cluster.loading import Checkpoints, Loader, LoadReporter
from coordinator.cluster.placement import StagePlan, WorkerPlace
from services.errors import FailedPrecondition
from services.layers import LayerRange
from services.messages.description import WorkerDescription
from services.rpc.peers import Peers
from services.rpc.worker import LoadProgress, LoadTarget, Part
from tests.services.fakes import WORKER

FLOAT8 = "float8_e4m3fn"


class Told:
    """A worker, and the peers that lead to it. heeds: whether it knows that there is a choice."""

    def __init__(self, *, heeds: bool) -> None:
        self._heeds = heeds
        self.parts: list[Part] = []

    async def worker(self, address: str) -> Told:
        return self

    async def describe(self) -> WorkerDescription:
        return WORKER

    async def load(self, part: Part, on_progress: Callable[[LoadProgress], None]) -> WorkerDescription:
        self.parts.append(part)
        assert isinstance(part, LoadTarget)
        assert WORKER.target is not None
        return replace(WORKER, target=replace(WORKER.target, kv_dtype=part.kv_dtype if self._heeds else None))


async def load(told: Told, kv_dtype: str | None) -> WorkerDescription:
    checkpoints = Checkpoints(Path("/models/t"), None, "bfloat16", kv_dtype=kv_dtype)
    loader = Loader(cast(Peers, told), checkpoints, LoadReporter())
    return await loader.stage(0, StagePlan(WorkerPlace(None, "a:1"), LayerRange(0, 3)), "a:1")


@pytest.mark.parametrize("kv_dtype", [None, FLOAT8])
async def test_the_wish_reaches_the_worker(kv_dtype: str | None) -> None:
    told = Told(heeds=True)

    loaded = await load(told, kv_dtype)

    assert told.parts == [LoadTarget("/models/t", LayerRange(0, 3), "bfloat16", None, kv_dtype)]
    assert loaded.target is not None
    assert loaded.target.kv_dtype == kv_dtype


async def test_a_worker_that_passes_over_it_is_refused() -> None:
    """One of an older release, which keeps them as ever: named, with what it keeps and its release."""
    with pytest.raises(FailedPrecondition) as caught:
        await load(Told(heeds=False), FLOAT8)

    assert f"keeps keys and values in bfloat16, not in {FLOAT8}" in caught.value.message
    assert WORKER.flashsplit_version in caught.value.message
    assert caught.value.where["field"] == "kv_dtype"
    await load(Told(heeds=False), None)


def test_stages_of_two_types_do_not_go_together() -> None:
    """Both sides are named."""
    assert WORKER.target is not None
    other = replace(WORKER, target=replace(WORKER.target, kv_dtype=FLOAT8))

    check_same_model([other, other])
    with pytest.raises(FailedPrecondition, match=f"stage 1 .* holds kv_dtype {FLOAT8}, stage 0 .* auto") as caught:
        check_same_model([WORKER, other])
    assert caught.value.reason == "DTYPE_MISMATCH"
