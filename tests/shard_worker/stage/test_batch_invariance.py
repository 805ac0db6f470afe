"""Batch-invariant steps are promised where they hold, and refused elsewhere."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.layers import LayerRange
from services.messages.steps import OpenSession
from shard_worker.stage.batch_invariance import allocate, check_batch_invariance
from shard_worker.stage.segment import Segment
from shard_worker.stage.step_runner import StepRunner
from tests.shard_worker.tiny import Tiny, load_split, load_stage


class UnevenSegment(Segment):
    """Rounds rows by where they stand, as a library with other loops for the last rows would."""

    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        hidden = super().run(*args, **options)
        hidden[12:, 0] *= 1 + 2**-7
        return hidden


def uneven(segment: Segment) -> Segment:
    return UnevenSegment(**{field.name: getattr(segment, field.name) for field in fields(segment)})


def request(**changes: Any) -> OpenSession:
    return replace(OpenSession("r", "f", 0, LayerRange(0, 1), (), 64, 32, 16, 3, batch_invariant_rows=16), **changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3-sliding", "qwen3_5"])
def test_a_stage_that_is_batch_invariant_passes(tiny: Tiny, name: str, dtype: str) -> None:
    """First stages and last ones, with as many rows as may be asked for, or one; it is tried out once."""
    for stage in load_split(tiny.path(name), (2,), dtype=dtype):
        known: set[int] = set()
        for rows in (1, 16, 64):
            asked = request(batch_invariant_rows=rows, block_rows=1)
            assert allocate(asked, stage, known).batch_invariant_rows == rows
        assert known == {1, 16, 64}


def test_a_stage_that_is_not_is_refused(tiny: Tiny) -> None:
    """Rows that come out differently in another place of a step are found, and what can be done is said."""
    stage = load_stage(tiny.path("qwen3_5"), dtype="bfloat16")
    segments = tuple(uneven(segment) for segment in stage.segments)
    known: set[int] = set()

    with pytest.raises(FailedPrecondition, match="16 rows .* on cpu, so --exact cannot be kept here") as caught:
        allocate(request(), replace(stage, segments=segments), known)

    assert caught.value.reason == "NOT_EXACT"
    assert not known
    check_batch_invariance(stage, 16)


@pytest.mark.parametrize("rows", [15, 65])
def test_blocks_must_fit(tiny: Tiny, rows: int) -> None:
    """Fewer rows than a block has, and more than a stage takes at once, are refused by name."""
    with pytest.raises(InvalidArgument, match=f"exact_rows is {rows}; it must be between block_rows, 16, and 64"):
        allocate(request(batch_invariant_rows=rows), load_stage(tiny.path("qwen3")), set())


def test_kernels_take_no_notice(tiny: Tiny) -> None:
    """Where they run the steps nothing is tried out or computed otherwise; unasked, nothing is anywhere."""
    stage = load_stage(tiny.path("qwen3"))
    by_kernels = replace(stage, runners=(cast(StepRunner, SimpleNamespace(graphs=False)),))
    known: set[int] = set()

    assert allocate(request(), by_kernels, known).batch_invariant_rows is None
    assert allocate(request(batch_invariant_rows=None), stage, known).batch_invariant_rows is None
    assert not known
