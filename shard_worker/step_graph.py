"""What a captured step is for, what it writes, and where it stands between two calls of its runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shard_worker.caches import SegmentCaches
from shard_worker.dtypes import OnHost


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step made of its rows. logits [n, vocab] and the likeliest token of each row [n] where the head is.

    on_host: of a step by kernels, the likeliest tokens where the head is, else `hidden`. The next step overwrites all
    of it: take what is needed before that.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
    on_host: OnHost | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """What a graph is captured for."""

    rows: int
    deferred: bool
    featured: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """A step that waits for its numbers. caches: whose addresses it has been told."""

    variant: Variant
    caches: SegmentCaches


@dataclass(frozen=True, slots=True)
class Gone:
    """A step that stood by and was let go before `run` was called for it."""

    variant: Variant
    caches: SegmentCaches
    base: int
    token_ids: tuple[int, ...]

    def is_(self, variant: Variant, caches: SegmentCaches, base: int, token_ids: Sequence[int]) -> bool:
        rows = (variant, base, tuple(token_ids))
        return self.caches is caches and (self.variant, self.base, self.token_ids) == rows


@dataclass(slots=True)
class Captured:
    """A graph, or None where steps are launched kernel by kernel, and what it writes to."""

    graph: torch.cuda.CUDAGraph | None
    output: StepOutput
    captured: list[torch.Tensor] = field(default_factory=list)
    total: torch.Tensor | None = None
