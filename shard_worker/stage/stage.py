"""A stage of the target: its segments, the embedding where it is first, the head where it is last.

It owns weights; a session's caches are in a `StageState`. It must not know processes, streams or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from services.layers import LayerRange
from services.messages.description import StepEngine
from services.messages.steps import LONGEST_JOINING
from services.messages.tensors import WireTensor
from services.model.config import LayerKind, ModelConfig
from services.records import record
from shard_worker.cache.prefix_state import GroupKind, TensorGroup
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.device.dtypes import over_wire, rows_from_wire
from shard_worker.model.features import Features, joined
from shard_worker.model.head import Head
from shard_worker.model.layer_weights import ExpertsBesideWeights, ExpertsWeights
from shard_worker.model.rows import PLAIN, SessionRows
from shard_worker.stage.batch_runner import ROW_COUNTS, BatchRunner, DrawTokens, PlacedStep, SessionTokens
from shard_worker.stage.segment import Segment
from shard_worker.stage.step_graph import StepOutput, StepPart, StepRows
from shard_worker.stage.step_runner import StepRunner
from shard_worker.weights.weight import RowLookup

if TYPE_CHECKING:
    from shard_worker.model.kernels.step_parameters import StepParameters

MOST_ROWS_TOGETHER = 256
"""Most rows of a step of several sessions in plain torch."""


@dataclass(slots=True)
class StageState:
    """One session's memory on a stage."""

    capacity: int
    """How many tokens there may be."""
    caches: list[SegmentCaches]
    """One for each segment."""
    batch_invariant_rows: int | None = None
    """As in `Rows`, for decode and verify steps."""
    length: int = 0
    """Committed tokens."""
    pending: int = 0
    """Rows of a verify that is not committed yet."""
    ahead: int = 0
    """Rows of a verify that was launched behind that one."""

    @property
    def size_bytes(self) -> int:
        """Memory that the caches take by now."""
        return sum(caches.size_bytes for caches in self.caches)

    @property
    def shortest(self) -> int:
        """The fewest tokens that its committed ones can be cut to."""
        return max((caches.shortest(self.length) for caches in self.caches), default=0)

    def commit_to(self, length: int) -> None:
        """Let the tokens up to `length` count. What no row behind them sees gives its memory back."""
        self.length = length
        for caches in self.caches:
            caches.free_unseen(length)


@record(frozen=True, slots=True)
class StepInput:
    """A step's rows of one session on a stage, as `Stage.step_together` takes them.

    token_ids: a token for each row. features: what captured rows are added to, with what came of the stages before;
    None where no draft wants any. uncommitted: `commit` says later how many of the rows count; otherwise all do.
    hidden: what the stage before made of the rows, [n, hidden]; None on the first stage. behind: as of
    `SessionTokens`.
    """

    stage: Stage
    state: StageState
    token_ids: tuple[int, ...]
    features: Features | None
    uncommitted: bool
    hidden: WireTensor | None = None
    behind: int | None = None

    def with_tokens(self, token_ids: tuple[int, ...], hidden: WireTensor | None = None) -> StepInput:
        """Return the same rows with other tokens, and with what the stage before made of them."""
        return StepInput(self.stage, self.state, token_ids, self.features, self.uncommitted, hidden, self.behind)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Memory that a layer's weights take: on its device, and of experts in the host's memory beside a GPU's."""

    device: int
    host: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The target's layers [first, last) in this worker."""

    config: ModelConfig
    layers: LayerRange
    segments: tuple[Segment, ...]
    """The layers by device, in order."""
    embedding: RowLookup | None
    """[vocab, hidden] on the first stage, None on others."""
    head: Head | None
    """On the last stage, None on others."""
    dtype: torch.dtype
    """The element type of matrices and activations."""
    weight_bytes: int
    """Memory that the weights take on the devices."""
    layer_bytes: tuple[LayerBytes, ...] = ()
    """Of both that of each layer, in order."""
    captures: tuple[int, ...] = ()
    """All target layers whose output the draft wants, here and elsewhere."""
    summed: bool = False
    """Whether captured rows travel as one sum, and not as slices."""
    runners: tuple[StepRunner | None, ...] = ()
    """One a segment, for steps of few rows; None, or none at all, where plain torch does them."""
    host_weight_bytes: int = 0
    """Memory that experts take in the host's memory beside a GPU's."""
    batch_runners: tuple[BatchRunner, ...] = ()
    """One a segment, for steps of several sessions; none at all where plain torch does them."""

    @property
    def device(self) -> torch.device:
        """Where rows come in."""
        return self.segments[0].device.torch_device

    @property
    def prelaunches(self) -> bool:
        """Whether a step may gain from `prelaunch`: a CPU is there for others meanwhile."""
        return self.device.type != "cpu"

    @property
    def engine(self) -> StepEngine:
        """How steps of few rows run."""
        if not self.runners or any(runner is None for runner in self.runners):
            return StepEngine.TORCH
        return StepEngine.GRAPHS if all(runner and runner.graphs for runner in self.runners) else StepEngine.KERNELS

    @property
    def session_tokens(self) -> int | None:
        """The most tokens of one session for which the devices' pools have room; None where there is no bound."""
        bounds = [segment.session_tokens for segment in self.segments]
        return min((bound for bound in bounds if bound is not None), default=None)

    def prepare(self) -> None:
        """Compile and capture what steps would have to wait for, with a draft and without."""
        for runner in self.runners:
            if runner is not None:
                runner.prepare(drafted=bool(self.captures))
        for batch_runner in self.batch_runners:
            batch_runner.prepare(drafted=bool(self.captures))
        for segment in self.segments:
            if segment.operations is not PLAIN:
                # Kernels are compiled apart for multiples of 16 rows.
                for count in (2, 64):
                    shape, device = (count, self.config.hidden_size), segment.device.torch_device
                    with segment.device.current():
                        rows = torch.zeros(shape, dtype=self.dtype, device=device)
                        sessions = [SessionRows(0, count, segment.allocate(count, 1), False)]
                        segment.run(rows, sessions, None, token_ids=[0] * count)

    def without_kernels(self) -> Stage:
        """Return the same stage in plain torch."""
        segments = (replace(segment, operations=PLAIN) for segment in self.segments)
        return replace(self, runners=(), batch_runners=(), segments=tuple(segments))

    def batch_invariant_rows(self, asked: int | None) -> int | None:
        """Return what a session gets that asked for so many batch-invariant rows.

        That is None where kernels run its steps, which are batch-invariant anyway.
        """
        return asked if self.engine is StepEngine.TORCH else None

    def allocate(self, capacity: int, block_rows: int, batch_invariant_rows: int | None = None) -> StageState:
        """Return the memory for one session of up to `capacity` tokens.

        block_rows: rows of its largest verify. batch_invariant_rows: from the method of that name.
        """
        row_by_row = batch_invariant_rows is not None
        caches = [segment.allocate(capacity, block_rows, row_by_row=row_by_row) for segment in self.segments]
        return StageState(capacity, caches, batch_invariant_rows)

    def state_groups(self) -> tuple[TensorGroup, ...]:
        """Say what a prefix keeps, in the order of a session's views; the last stage's logits come last."""
        groups = [group for segment in self.segments for group in segment.state_groups()]
        if self.head is not None:
            weight = self.head.weight
            groups.append(TensorGroup(GroupKind.LOGITS, ("logits",), (weight.rows,), weight.dtype))
        return tuple(groups)

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the embedding's rows of these tokens, [n, hidden]."""
        assert self.embedding is not None
        return self.embedding.lookup(torch.tensor(tuple(token_ids))).to(self.dtype)

    def step(
        self,
        state: StageState,
        token_ids: Sequence[int],
        features: Features | None,
        *,
        uncommitted: bool,
        hidden: WireTensor | None = None,
    ) -> StepOutput | StepPart:
        """Run the stage on the rows of these tokens, by kernels where they take such a step. Otherwise as `run`.

        hidden: what the stage before made of the rows; None on the first stage. The logits of all rows are
        in the output where kernels computed it.
        """
        count = len(token_ids)
        runners = self._runners(count, uncommitted)
        if not runners and self.batch_runners and self.joins(count, state.length + count, uncommitted=uncommitted):
            return self.step_together([StepInput(self, state, tuple(token_ids), features, uncommitted, hidden)])[0]
        if not runners:
            self.cancel()
            rows = self.embed(token_ids) if hidden is None else rows_from_wire([hidden], self.device)
            return StepOutput(self.run(state, rows, features, uncommitted=uncommitted, token_ids=token_ids))
        output: StepOutput | None = None
        moving = None if hidden is None else over_wire(hidden)
        for runner, caches in zip(runners, state.caches, strict=True):
            output = runner.run(token_ids, moving, state.length, caches, features, uncommitted=uncommitted)
            moving = output.hidden
        self._count(state, count, uncommitted)
        assert output is not None
        return output

    @property
    def draws(self) -> bool:
        """Whether `step_together` can have tokens drawn behind rows as it computes them."""
        return bool(self.batch_runners) and self.head is not None

    @property
    def most_rows_together(self) -> int:
        """Most rows of a step of several sessions."""
        return ROW_COUNTS[-1] if self.batch_runners else MOST_ROWS_TOGETHER

    @property
    def batch_row_counts(self) -> tuple[int, ...]:
        """The numbers of rows with which steps of several sessions are computed; empty where it is any number, and
        where segments have unlike ones."""
        counts = {runner.row_counts for runner in self.batch_runners}
        return counts.pop() if len(counts) == 1 else ()

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has a recurrent state."""
        return LayerKind.LINEAR in self.config.layer_kinds[self.layers.first : self.layers.last]

    @property
    def is_mixture(self) -> bool:
        """Whether any layer has routed experts."""
        return any(
            isinstance(weights.mlp, ExpertsWeights | ExpertsBesideWeights)
            for segment in self.segments
            for weights in segment.weights
        )

    def joins(self, rows: int, length: int, *, uncommitted: bool) -> bool:
        """Return whether so many rows of a session may be part of a step of several ones. That is the session's own
        matter: its rows are computed in one way, whether there are others or not. length: its positions, these rows'
        included."""
        if rows == 1 or uncommitted:
            return True
        return bool(self.batch_runners) and 0 < rows <= self.most_rows_together and length <= LONGEST_JOINING

    def most_together(self, inputs: Sequence[StepInput]) -> int:
        """Return how many of these can be one step, from the first on: at least one."""
        count = len(inputs)
        while count > 1 and not self._fit(inputs[:count]):
            count -= 1
        return count

    def _fit(self, inputs: Sequence[StepInput]) -> bool:
        if not self.batch_runners:
            return sum(len(one.token_ids) for one in inputs) <= MOST_ROWS_TOGETHER
        return all(runner.fits(_session_tokens(inputs, index)) for index, runner in enumerate(self.batch_runners))

    def steps_behind(self, rows: int, *, blocks: bool) -> bool:
        """Return whether a step of so many rows of several sessions can be launched before the results of the last one
        are read. Rows of it may be left out later, by `take_back`. blocks: as of `BatchRunner.runs_behind`."""
        return len(self.batch_runners) == 1 and self.batch_runners[0].runs_behind(rows, blocks=blocks)

    def overlaps(self, inputs: Sequence[StepInput]) -> bool:
        """Return whether these, which fit into one step, can be launched while the results of one before it are on
        their way to the host."""
        if len(self.batch_runners) != 1:
            return False
        rows = sum(len(one.token_ids) for one in inputs)
        return self.batch_runners[0].is_captured(rows, featured=inputs[0].features is not None)

    @staticmethod
    def take_back(state: StageState) -> None:
        """Leave out the rows that were computed last, where the stage steps behind others. They keep their memory."""
        if state.ahead:
            state.ahead = 0
        elif state.pending:
            state.pending = 0
        else:
            state.length -= 1
            for caches in state.caches:
                caches.take_back()

    def commit_last(self, counts: torch.Tensor) -> None:
        """Let rows count of each session of the step of several launched last, as `BatchRunner.commit_last`."""
        for runner in self.batch_runners:
            runner.commit_last(counts)

    def place_together(self, inputs: Sequence[StepInput]) -> PlacedStep | None:
        """Place a step of single rows that is launched later, whose tokens may not be known yet; None where nothing can
        be done for it now."""
        return self.batch_runners[0].place(_session_tokens(inputs, 0)) if len(self.batch_runners) == 1 else None

    def step_together(
        self,
        inputs: Sequence[StepInput],
        complete: Callable[[StepParameters], None] | None = None,
        placed: PlacedStep | None = None,
        draw: DrawTokens | None = None,
    ) -> list[StepPart]:
        """Run the stage on a step of several sessions, which fit as `most_together` says and are alike in whether
        features are wanted and steps batch-invariant. Each one's output is as of `step`; logits are there where the
        head is. Features are added to each one's own. complete, placed: as of `BatchRunner.run`; draw too, where the
        stage `draws`."""
        self.cancel()
        counts = [len(one.token_ids) for one in inputs]
        token_ids = [token for one in inputs for token in one.token_ids]
        incoming = [one.hidden for one in inputs if one.hidden is not None]
        wanted = [one.features for one in inputs if one.features is not None]
        features = joined(wanted, self.device) if wanted else None
        if self.batch_runners:
            output = self._run_kernels(inputs, incoming, features, complete, placed, draw)
        else:
            rows = rows_from_wire(incoming, self.device) if incoming else self.embed(token_ids)
            states = [one.state for one in inputs]
            uncommitted = [one.uncommitted for one in inputs]
            result = self.run_together(states, counts, rows, features, uncommitted=uncommitted, token_ids=token_ids)
            logits = None
            if self.head is not None:
                logits = self.head.logits(result, states[0].batch_invariant_rows)
            output = StepOutput(result, logits)
        if features is not None:
            first = 0
            for one, count in zip(inputs, counts, strict=True):
                if one.features is not None:
                    features.give(one.features, first, first + count)
                first += count
            if len(wanted) == len(inputs):
                output = replace(output, total=features.total)
                if self.head is None and not features.slices:
                    # The next step may be launched before they leave for the stage behind this one.
                    output = output.with_total_on_host()
        return output.parts(counts)

    def _run_kernels(
        self,
        inputs: Sequence[StepInput],
        incoming: Sequence[WireTensor],
        features: Features | None,
        complete: Callable[[StepParameters], None] | None,
        placed: PlacedStep | None,
        draw: DrawTokens | None,
    ) -> StepOutput:
        output = None
        hidden: torch.Tensor | Sequence[WireTensor] = incoming
        for index, runner in enumerate(self.batch_runners):
            sessions = _session_tokens(inputs, index)
            is_last = runner is self.batch_runners[-1]
            output = runner.run(
                sessions, hidden, features, complete=complete, placed=placed, draw=draw if is_last else None
            )
            hidden = output.hidden
        assert output is not None
        for one in inputs:
            self._count(one.state, len(one.token_ids), one.uncommitted)
        # One copy for all sessions, each of which keeps its last row.
        return replace(output, hidden=output.hidden.clone())

    def run(
        self,
        state: StageState,
        hidden: torch.Tensor,
        features: Features | None,
        *,
        uncommitted: bool,
        token_ids: Sequence[int] = (),
    ) -> torch.Tensor:
        """Run the stage's layers on the rows of one session, as `run_together` does."""
        counts = [len(hidden)]
        return self.run_together([state], counts, hidden, features, uncommitted=[uncommitted], token_ids=token_ids)

    def run_together(
        self,
        states: Sequence[StageState],
        counts: Sequence[int],
        hidden: torch.Tensor,
        features: Features | None,
        *,
        uncommitted: Sequence[bool],
        token_ids: Sequence[int] = (),
    ) -> torch.Tensor:
        """Run the stage's layers in plain torch on rows [n, hidden] of several sessions; return [n, hidden].

        states, counts: each session's memory, and how many rows it has, behind those of the sessions before it. Its
        rows follow its committed ones. All sessions have the same number of batch-invariant rows, or none has one.
        features: what captured rows are added to, None where no draft wants any. uncommitted: of each session whether
        `commit` says later how many of its rows count; otherwise all do at once. token_ids: as of `Segment.run`.
        """
        # Rows of a prompt come in the same chunks, whatever its answer is made by.
        alike = all(later or count == 1 for count, later in zip(counts, uncommitted, strict=True))
        for index, segment in enumerate(self.segments):
            sessions = [
                SessionRows(state.length, count, state.caches[index], later)
                for state, count, later in zip(states, counts, uncommitted, strict=True)
            ]
            hidden = segment.run(
                hidden,
                sessions,
                features,
                batch_invariant_rows=states[0].batch_invariant_rows if alike else None,
                token_ids=token_ids,
            )
        for state, count, later in zip(states, counts, uncommitted, strict=True):
            self._count(state, count, later)
        return hidden

    def reserve(self, state: StageState, rows: int) -> None:
        """Take the memory for a session's next rows: one that finds none must not be the end of those that are computed
        with it. Raises ResourceExhausted where there is no memory."""
        for caches in state.caches:
            caches.reserve(state.length + state.pending + rows)

    def commit(self, state: StageState, length: int) -> None:
        """Let the rows of the verify in flight count up to the position `length`."""
        rows = length - state.length
        runners = self._runners(state.pending, uncommitted=True)
        if runners:
            for runner, caches in zip(runners, state.caches, strict=True):
                runner.commit(caches, rows)
        else:
            for caches in state.caches:
                caches.commit_block(rows)
        state.pending = 0
        state.commit_to(length)

    def _runners(self, rows: int, uncommitted: bool) -> Sequence[StepRunner]:
        """Return one runner for each segment where all of them take such a step, else none."""
        runners = [
            runner for runner in self.runners if runner is not None and runner.takes(rows, uncommitted=uncommitted)
        ]
        return runners if len(runners) == len(self.segments) else ()

    def prelaunch(self, state: StageState, rows: int, *, known: StepRows | None = None, running: bool = False) -> None:
        """Between two steps alike, of up to so many rows: launch the next one now, where it can wait for its numbers.

        Duties, `known` and `running` as of `StepRunner.prelaunch`.
        """
        runner = self.runners[0] if len(self.runners) == 1 else None
        if runner is not None and not (state.pending and state.caches[0].recurrent is not None):
            length = state.length + state.pending + rows
            runner.prelaunch(state.caches[0], length, known=known, running=running)

    def release(self, state: StageState, rows: StepRows, activation: memoryview | None, *, certain: bool) -> None:
        """Let a prelaunched step of these rows begin before `step` is called for it, as `StepRunner.release` does."""
        runner = self.runners[0] if len(self.runners) == 1 else None
        if runner is not None:
            runner.release(rows, activation, state.caches[0], certain=certain)

    def cancel(self) -> None:
        """Cancel a prelaunched step: to be called before anything else is done with the device."""
        for runner in self.runners:
            if runner is not None:
                runner.cancel()

    @staticmethod
    def _count(state: StageState, rows: int, uncommitted: bool) -> None:
        if uncommitted and state.pending:
            state.ahead = rows
        elif uncommitted:
            state.pending = rows
        else:
            state.commit_to(state.length + rows)


def _session_tokens(inputs: Sequence[StepInput], segment: int) -> list[SessionTokens]:
    return [
        SessionTokens(
            one.state.length + (0 if one.behind is None else one.state.pending),
            one.token_ids,
            one.state.caches[segment],
            one.behind,
            one.uncommitted,
        )
        for one in inputs
    ]
