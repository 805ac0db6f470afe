"""A step's rows and results, what a captured graph is for, and the step that is on the device between two calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.device.dtypes import OnHost
from shard_worker.model.features import Capture, Features


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step. The next step of the same runner overwrites them: take what is needed before that.

    hidden: the rows behind the last layer, [n, hidden]. logits: [n, vocab] where the head is, else None. argmax: the
    most probable token of each row, or what was drawn behind it, int64 [n], where the head is. on_host: of a step by
    kernels, a copy on the host of `argmax` where the head is, else of `hidden`. total: of a step of several sessions,
    the sum of all rows' features where a draft wants that, float32 [n, draft hidden]. total_on_host: a copy of it on
    the host, where the rows go to another stage from there; it is there with `on_host`, and nothing overwrites it.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    on_host: OnHost | None = None
    total: torch.Tensor | None = None
    total_on_host: torch.Tensor | None = None

    def with_total_on_host(self) -> StepOutput:
        """Return these results with the sum of features on its way to the host, behind that of the rows."""
        if self.total is None or self.on_host is None or self.on_host.done is None:
            return self
        if self.total.device.type == "cpu":
            # Nothing was added to what came from the stage before.
            return replace(self, total_on_host=self.total)
        copy = OnHost.of(self.total)
        return replace(self, on_host=replace(self.on_host, done=copy.done), total_on_host=copy.tensor)

    def argmax_on_host(self) -> list[int] | None:
        """Wait for the most probable token of each row, and return them; None where they are not copied."""
        if self.on_host is None or self.argmax is None:
            return None
        tokens: list[int] = self.on_host.wait().tolist()
        return tokens

    def _argmax_of_all(self) -> list[int] | None:
        """As `argmax_on_host`; of a step without kernels on the CPU they are computed, at once for all rows."""
        tokens = self.argmax_on_host()
        if tokens is None and self.logits is not None and self.logits.device.type == "cpu":
            tokens = self.logits.argmax(-1).tolist()
        return tokens

    def parts(self, counts: Sequence[int]) -> list[StepPart]:
        """Return the results of several sessions' rows, as many as `counts` says of each."""
        argmax = functools.cache(self._argmax_of_all)
        ends = [*itertools.accumulate(counts)]
        return [StepPart(self, end - count, end, argmax) for end, count in zip(ends, counts, strict=True)]


def token_of_row(row: int) -> int:
    """Return what stands, among a step's tokens, for the one that a row of the step before comes to."""
    return -1 - row


class StepPart:
    """The results of one session's rows in a step of several sessions, as in `StepOutput`.

    Rows are cut out when they are asked for: for many sessions that would take as long as the step.
    """

    def __init__(self, whole: StepOutput, first: int, last: int, argmax: Callable[[], list[int] | None]) -> None:
        """Take rows [first, last) of `whole`. argmax: returns the most probable tokens of all its rows, where they can
        be had at once."""
        self._whole, self._rows, self._argmax_on_host = whole, slice(first, last), argmax

    @property
    def whole(self) -> StepOutput:
        """The results of all sessions' rows."""
        return self._whole

    def precedes(self, other: StepPart) -> bool:
        """Return whether the other part is of the same step, and begins where this one ends."""
        return self._whole is other._whole and self._rows.stop == other._rows.start

    def up_to(self, last: StepPart) -> StepPart:
        """Return the part from this one's first row to the last one's last."""
        return StepPart(self._whole, self._rows.start, last._rows.stop, self._argmax_on_host)

    @property
    def hidden(self) -> torch.Tensor:
        return self._whole.hidden[self._rows]

    def hidden_row(self, row: int) -> Callable[[], torch.Tensor]:
        """Return what cuts out one row [1, hidden] later. It holds the hidden rows of the step, and not its logits."""
        hidden, first = self._whole.hidden, self._rows.start + row
        return lambda: hidden[first : first + 1]

    @property
    def logits(self) -> torch.Tensor | None:
        return None if self._whole.logits is None else self._whole.logits[self._rows]

    @property
    def argmax(self) -> torch.Tensor | None:
        return None if self._whole.argmax is None else self._whole.argmax[self._rows]

    @property
    def on_host(self) -> OnHost | None:
        whole = self._whole.on_host
        return None if whole is None else replace(whole, tensor=whole.tensor[self._rows])

    @property
    def total_on_host(self) -> torch.Tensor | None:
        whole = self._whole.total_on_host
        return None if whole is None else whole[self._rows]

    def argmax_on_host(self) -> list[int] | None:
        tokens = self._argmax_on_host()
        return None if tokens is None else tokens[self._rows]


def side_by_side(outputs: Sequence[StepOutput | StepPart]) -> StepOutput | StepPart | None:
    """Return the rows of several sessions as one, where they lie side by side in one step, in their order."""
    parts = [one for one in outputs if isinstance(one, StepPart)]
    if len(outputs) == 1:
        return outputs[0]
    if len(parts) == len(outputs) and all(map(StepPart.precedes, parts, parts[1:])):
        return parts[0].up_to(parts[-1])
    return None


def joined_rows(outputs: Sequence[StepOutput | StepPart]) -> tuple[torch.Tensor, OnHost | None]:
    """Return the hidden rows of several sessions, one session's behind the other's, and their copy on the host where
    there is one. Parts that lie side by side in one step are not copied."""
    whole = side_by_side(outputs)
    return (torch.cat([one.hidden for one in outputs]), None) if whole is None else (whole.hidden, whole.on_host)


@dataclass(frozen=True, slots=True)
class Variant:
    """The kind of step that a graph is captured for.

    rows: one of the numbers that steps are made with. uncommitted, featured: as of `StepRows`, where they make a
    difference.
    """

    rows: int
    uncommitted: bool
    featured: bool


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step.

    base: the first row's position. token_ids: a token for each row. uncommitted: it is decided later which of the rows
    count. featured: a draft wants their features.
    """

    base: int
    token_ids: tuple[int, ...]
    uncommitted: bool
    featured: bool


@dataclass(frozen=True, slots=True)
class Prelaunched:
    """A step that waits on the device to be released.

    caches: those whose addresses are in its parameters. rows: those that are in its parameters, None where they are not
    known yet.
    """

    variant: Variant
    caches: SegmentCaches
    rows: StepRows | None


@dataclass(frozen=True, slots=True)
class Released:
    """A prelaunched step that was released before `run` was called for it."""

    variant: Variant
    caches: SegmentCaches
    rows: StepRows

    def matches(self, variant: Variant, caches: SegmentCaches, rows: StepRows) -> bool:
        """Return whether it is the step of these rows."""
        return self.caches is caches and (self.variant, self.rows) == (variant, rows)


@dataclass(slots=True)
class CapturedStep:
    """A graph and the memory that it writes to.

    graph: None where steps are launched kernel by kernel. layer_rows: the rows behind each layer that the draft
    reads, where they are wanted one by one. total: their sum through the draft's `fc`, float32 [rows, hidden], where
    that is wanted.
    """

    graph: torch.cuda.CUDAGraph | None
    output: StepOutput
    layer_rows: list[torch.Tensor] = field(default_factory=list)
    total: torch.Tensor | None = None

    def results(self, count: int, capture: Capture | None, features: Features | None, on_host: OnHost) -> StepOutput:
        """Return the results of the first `count` rows.

        features: what the draft reads of them is added to it, where the segment captures something: `capture`.
        """
        if features is not None and capture is not None:
            # Copies: they are used behind steps of other sessions.
            if self.total is not None:
                features.add(self.total[:count].clone())
            else:
                layer_rows = [rows[:count].clone() for rows in self.layer_rows]
                features.slices |= dict(zip(capture.indices.values(), layer_rows, strict=True))
        output = self.output
        return StepOutput(
            output.hidden[:count],
            None if output.logits is None else output.logits[:count],
            None if output.argmax is None else output.argmax[:count],
            on_host,
        )
