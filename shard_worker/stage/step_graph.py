"""What a captured step is for, what it writes, and where it stands between two calls of its runner."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.device.dtypes import OnHost


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step made of its rows. logits [n, vocab] and the likeliest token of each row [n] where the head is.

    on_host: of a step by kernels, the likeliest tokens where the head is, else `hidden`. The next step overwrites all
    of it: take what is needed before that.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    on_host: OnHost | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """What a graph is captured for."""

    rows: int
    uncommitted: bool
    featured: bool


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where a step's rows begin, and their tokens. deferred: it is decided later which of them count. featured: a draft
    wants their features."""

    base: int
    token_ids: tuple[int, ...]
    uncommitted: bool
    featured: bool


@dataclass(frozen=True, slots=True)
class Prelaunched:
    """A step that waits on the device to be released. caches: whose addresses it has been told. rows: those it has
    been told of, None where they are not known yet."""

    variant: Variant
    caches: SegmentCaches
    rows: StepRows | None


@dataclass(frozen=True, slots=True)
class Released:
    """A prelaunched step that was released before `run` was called for it."""

    variant: Variant
    caches: SegmentCaches
    rows: StepRows

    def is_(self, variant: Variant, caches: SegmentCaches, rows: StepRows) -> bool:
        return self.caches is caches and (self.variant, self.rows) == (variant, rows)


@dataclass(slots=True)
class Captured:
    """A graph, or None where steps are launched kernel by kernel, and what it writes to."""

    graph: torch.cuda.CUDAGraph | None
    output: StepOutput
    captured: list[torch.Tensor] = field(default_factory=list)
    total: torch.Tensor | None = None
