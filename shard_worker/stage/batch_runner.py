"""Steps of several sessions at once through a segment on a GPU: kernels, captured as CUDA graphs by number of rows.

A row's result is to the last bit that of a step of its session alone, as `step_runner` takes it. Owns the graphs, and
the memory that they read and write between sessions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from services.messages.tensors import WireTensor
from services.records import record
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.device.dtypes import OnHost, adjoining_rows, bytes_of, copy_rows
from shard_worker.device.graph_capture import capture_graph
from shard_worker.model.features import Features
from shard_worker.model.head import Head
from shard_worker.model.layer_weights import matrices_of
from shard_worker.stage.kernel_layers import kernel_layers, page_count
from shard_worker.stage.per_layer_rows import PerLayerRows
from shard_worker.stage.segment import Segment
from shard_worker.stage.step_graph import CapturedStep, StepOutput, Variant
from shard_worker.stage.step_runner import launch
from shard_worker.weights.weight import RowLookup

if TYPE_CHECKING:
    from shard_worker.model.kernels.step_parameters import StepParameters

ROW_COUNTS = (16, 32, 64, 128, 256, 512)
"""The numbers of rows that steps are made with; a step of another number leaves the last rows unused."""

PACKED_ROW_COUNTS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""The same where matrices are packed. Every tile of rows unpacks them anew, so that its rows cost time whether they are
used or not: products of the 8B shape in int4 take 3.1 ms with 32 rows and 4.7 with 64, 7.0 with 96 and 7.7 with 128,
and dense ones 4.4, 4.5, 5.9 and 5.1 (H200)."""

FEW_ROW_COUNTS = (4, 8)
"""In front of these where matrices are packed, whose products with 8 rows take three fifths of the time of those with
16, or where there are mixtures of experts, whose programs are as many as rows may choose experts: a step of two rows
of the 30B-A3B shape in int4 takes three quarters of the time that it takes with 16 (H200)."""

MAX_SESSIONS = 128
"""The most sessions of a step."""

DrawTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Queues drawing tokens, of logits [n, vocab] behind all rows of a step. What is drawn takes the place of the most
probable tokens, int64 [n]: in the second tensor as it is, in the third one with a token in any case."""

_STEPS_PLACED = 4
"""The most steps that are placed at a time: two that are launched, of which the results of each stay on the host until
the one behind the next is, and those that follow both."""


@record(frozen=True, slots=True)
class SessionTokens:
    """One session's part of a step: the first row's position, a token for each, and the session's caches.

    A token may be one of `token_of_row`, where the embedding and the head are on this device. behind: the session's
    number in the step before, where only the device knows which of its rows count there: `base` is then the highest
    that it may be, and the tokens stand for what the device knows. uncommitted: `commit` says later which rows count;
    otherwise all do.
    """

    base: int
    token_ids: tuple[int, ...]
    caches: SegmentCaches
    behind: int | None = None
    uncommitted: bool = False

    @property
    def length(self) -> int:
        """The session's positions, these rows' included."""
        return self.base + len(self.token_ids)

    @property
    def is_single(self) -> bool:
        """Whether it is one row, which counts."""
        return len(self.token_ids) == 1 and not self.uncommitted and self.behind is None

    @property
    def follows(self) -> bool:
        """Whether it is one row with a token of `token_of_row`: it counts, but may be taken back."""
        return self.is_single and self.token_ids[0] < 0


@record(frozen=True, slots=True)
class PlacedStep:
    """A step of single rows whose places are in the parameters before its tokens are known.

    sessions: with any tokens. mark: of the parameters. first_sum: as of `FIRST_SUM`, behind these sessions.
    """

    sessions: Sequence[SessionTokens]
    mark: tuple[int, int]
    first_sum: int


class BatchRunner:
    """Runs steps of several sessions through one segment, with the embedding and the head where they are there."""

    def __init__(self, segment: Segment, embedding: RowLookup | None, head: Head | None, *, graphs: bool) -> None:
        from shard_worker.model.kernels.step_parameters import StepParameters

        self._segment, self._embedding, self._head, self._graphs = segment, embedding, head, graphs
        self._layers = kernel_layers(segment)
        device, config = segment.device.torch_device, segment.config
        self._longest = config.max_position
        self._may_follow = embedding is not None and head is not None
        """Whether rows may have tokens of `token_of_row`."""
        self.row_counts = row_counts(segment)
        """The numbers of rows that its steps are made with."""
        self._parameters = StepParameters(
            device,
            page_count(config),
            rows=ROW_COUNTS[-1],
            sessions=MAX_SESSIONS,
            caches=len(segment.key_kinds),
            twins=_STEPS_PLACED,
        )
        self._committing = StepParameters(device, 0, rows=1, sessions=MAX_SESSIONS)
        self._hidden = torch.zeros((ROW_COUNTS[-1], config.hidden_size), dtype=segment.dtype, device=device)
        self._own: PerLayerRows | None = None
        if segment.per_layer is not None:
            embedded = embedding is not None
            self._own = PerLayerRows(segment.per_layer, self._hidden, embedded=embedded, twins=_STEPS_PLACED)
        outgoing = self._hidden if head is None else torch.zeros(ROW_COUNTS[-1], dtype=torch.int64)
        self._outgoing = [
            torch.zeros_like(outgoing, device="cpu", pin_memory=device.type != "cpu") for _ in range(_STEPS_PLACED)
        ]
        incoming = self._hidden if embedding is None else self._hidden[:0]
        self._incoming = [
            torch.zeros_like(incoming, device="cpu", pin_memory=device.type != "cpu") for _ in range(_STEPS_PLACED)
        ]
        """The rows from the stage before on their way to the device."""
        self._logits: torch.Tensor | None = None
        """Of all rows of the last step, where the head is: graphs with their own would take a gigabyte for them."""
        if head is not None:
            shape = (ROW_COUNTS[-1], head.weight.rows)
            self._logits = torch.empty(shape, dtype=segment.dtype, device=device)
        self._tokens_made = torch.zeros(ROW_COUNTS[-1], dtype=torch.int64, device=device)
        """The most probable token of each row of the last step, where the head is."""
        self._captured: dict[Variant, CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def prepare(self, *, drafted: bool) -> None:
        """Compile and capture steps of any number of rows, so that none need wait.

        drafted: blocks of a draft are verified, and it wants features.
        """
        kinds = {False, drafted and self._segment.capture is not None}
        variants = [self._variant(rows, featured) for featured in kinds for rows in self.row_counts]
        with self._segment.device.current():
            if self._graphs:
                from shard_worker.model.kernels.compile_ahead import compile_together

                launches: list[Callable[[], object]]
                launches = [functools.partial(self._launch, variant) for variant in variants]
                compile_together([*launches, self._draw_once], self._hidden.device)
            for variant in variants:
                self._capture_once(variant)
            self._draw_once()
            if drafted:
                self.commit([], [])
                self.commit_last(torch.zeros(MAX_SESSIONS, dtype=torch.int64, device=self._hidden.device))

    def _draw_once(self) -> None:
        """Launch all that draws tokens, where the head is."""
        if self._logits is not None:
            from shard_worker.model.kernels.draw import launch_all

            launch_all(self._logits, self._tokens_made, self._tokens_made)

    @property
    def parameters(self) -> StepParameters:
        """The parameters of the last step."""
        return self._parameters

    def fits(self, sessions: Sequence[SessionTokens]) -> bool:
        """Return whether these rows can be one step: neither too many, nor of sessions that are too long together."""
        from shard_worker.model.kernels.attention import chunk_count, sums_room

        rows = sum(len(session.token_ids) for session in sessions)
        if len(sessions) > MAX_SESSIONS or rows > ROW_COUNTS[-1]:
            return False
        sums = sum(len(session.token_ids) * chunk_count(session.length) for session in sessions)
        return sums <= sums_room(self._made_with(rows), self._longest, alone=False)

    def runs_behind(self, rows: int, *, blocks: bool) -> bool:
        """Return whether a step of so many rows can be launched before the results of the last one are read: it knows
        the tokens, keeps nothing that could not be left out later, and has been captured, which would be in the way of
        those results.

        blocks: they are blocks of a draft that were issued with the last step; otherwise single rows, with tokens of
        `token_of_row`.
        """
        if not self._may_follow:
            return False
        if self._own is not None:
            # What tokens bring to each layer is looked up on the host.
            return False
        return self.is_captured(rows, featured=blocks)

    def is_captured(self, rows: int, *, featured: bool) -> bool:
        """Return whether a step of so many rows has been captured, so that `run` does nothing but launch it. featured:
        a draft wants features of its rows."""
        featured = featured and self._segment.capture is not None
        return rows <= ROW_COUNTS[-1] and self._variant(rows, featured) in self._captured

    def run(
        self,
        sessions: Sequence[SessionTokens],
        hidden: torch.Tensor | Sequence[WireTensor],
        features: Features | None,
        *,
        complete: Callable[[StepParameters], None] | None = None,
        placed: PlacedStep | None = None,
        draw: DrawTokens | None = None,
    ) -> StepOutput:
        """Launch a step of all these sessions' rows, one session's behind the other's.

        They must fit, as `fits` says. hidden: the rows [n, hidden] from the segment before, on any device, or from the
        stage before, some sessions' behind others'; none where the embedding is here. features: what the draft reads of
        the rows is added to it; None where no draft wants it. complete: queues that the parameters are completed, where
        sessions are `behind`. placed: the first sessions' part of it, if it was placed before. draw: queues drawing the
        tokens behind some rows.
        """
        count = sum(len(session.token_ids) for session in sessions)
        variant = self._variant(count, features is not None and self._segment.capture is not None)
        with self._segment.device.current():
            step = self._capture_once(variant)
            if placed is None or not self._parameters.take_up(placed.mark):
                self._parameters.begin()
                self._add(sessions)
            else:
                self._add(sessions[len(placed.sessions) :], len(placed.sessions), placed.first_sum)
                if self._embedding is not None:
                    self._parameters.set_tokens([token for session in sessions for token in session.token_ids])
            if len(hidden):
                rows = hidden if isinstance(hidden, torch.Tensor) else self._taken_in(hidden)
                self._hidden[:count].copy_(rows, non_blocking=True)
            self._parameters.send()
            if self._own is not None:
                self._own.send(count, self._parameters.turn)
            if complete is not None:
                complete(self._parameters)
            if step.graph is None:
                step = self._launch(variant)
            else:
                step.graph.replay()
            output = step.output
            if draw is not None:
                assert output.logits is not None
                assert output.argmax is not None
                draw(output.logits, output.argmax, self._tokens_made)
            outgoing = self._outgoing[self._parameters.turn][:count]
            outgoing.copy_((output.hidden if output.argmax is None else output.argmax)[:count], non_blocking=True)
            self._parameters.record_launch()
            on_host = OnHost(outgoing, self._parameters.done)
            return step.results(count, self._segment.capture, features, on_host)

    def commit(self, caches: Sequence[SegmentCaches], rows: Sequence[int]) -> None:
        """Let the first rows of each session's step in flight count, which are uncommitted, as many as `rows` says of
        it."""
        if self._layers.delta is None:
            return
        from shard_worker.model.kernels import deltanet

        like = self._hidden
        with self._segment.device.current():
            self._committing.begin()
            for session, one in enumerate(caches):
                self._committing.add(session, 0, 0, 0, recurrent=one.recurrent)
            self._committing.send()
            counts = torch.zeros(MAX_SESSIONS, dtype=torch.int64)
            counts[: len(rows)] = torch.tensor(rows)
            places = self._committing.places(MAX_SESSIONS)
            deltanet.commit(self._layers.delta, places, counts.to(like.device), like)
            self._committing.record_launch()

    def commit_last(self, counts: torch.Tensor) -> None:
        """Let the first rows of each session of the step launched last count whose rows are uncommitted.

        counts: int64 [MAX_SESSIONS or more] on the device, how many of each session; 0 for one that is committed later,
        and where there is none.
        """
        if self._layers.delta is None:
            return
        from shard_worker.model.kernels import deltanet

        with self._segment.device.current():
            deltanet.commit(self._layers.delta, self._parameters.places(MAX_SESSIONS), counts, self._hidden)

    def place(self, sessions: Sequence[SessionTokens]) -> PlacedStep | None:
        """Place the single rows of a step that will be launched later, for which the sessions have the memory; None
        where that is done as it is launched."""
        if self._own is not None:
            return None
        with self._segment.device.current():
            self._parameters.begin()
            # Unused rows are looked up too, and what stands for an unknown token is none of the embedding's rows.
            first_sum = self._add(sessions, known=False)
        return PlacedStep(sessions, self._parameters.mark(), first_sum)

    def _add(
        self, sessions: Sequence[SessionTokens], before: int = 0, first_sum: int = 0, *, known: bool = True
    ) -> int:
        """Add sessions to the step that is begun, behind so many others of single rows; return the first sum behind
        them. first_sum: of the first one. known: whether their tokens are set, too."""
        from shard_worker.model.kernels.attention import chunk_count, sums_room

        first_row = before
        for session in sessions:
            session.caches.reserve(session.length)
        # Nothing fails from here on: what is noted of a state is done with it, too.
        for number, session in enumerate(sessions, before):
            rows = len(session.token_ids)
            deferred, recurrent = None, session.caches.recurrent
            defers = recurrent is not None and self._may_follow and session.follows
            if recurrent is not None and session.is_single:
                deferred = recurrent.begin_row(self._advance if defers else None)
            elif recurrent is not None:
                recurrent.settle()
            self._parameters.add(
                number,
                first_row,
                session.base,
                rows,
                token_ids=session.token_ids if known else (),
                uncommitted=session.uncommitted or defers,
                first_sum=first_sum,
                behind=session.behind,
                deferred=deferred,
                attention=session.caches.attention,
                others=session.caches.others,
                recurrent=recurrent,
            )
            if self._own is not None:
                self._own.fill(first_row, session.token_ids, self._parameters.turn)
            first_row += rows
            first_sum += rows * chunk_count(session.length)
        # Kernels would write behind it.
        assert first_sum <= sums_room(self._made_with(first_row), self._longest, alone=False)
        return first_sum

    def _advance(self, recorded: torch.Tensor) -> None:
        """Make recurrent layers advance by the row that was deferred, as `RecurrentCache.begin_row` asks."""
        from shard_worker.model.kernels import deltanet
        from shard_worker.model.kernels.step_parameters import Places

        assert self._layers.delta is not None
        with self._segment.device.current():
            one = torch.ones(1, dtype=torch.int64, device=self._hidden.device)
            deltanet.commit(self._layers.delta, Places(recorded), one, self._hidden)

    def _taken_in(self, tensors: Sequence[WireTensor]) -> torch.Tensor:
        """Return the rows in page-locked memory: where they lie already, or in what the last step of the same turn has
        left."""
        if (whole := adjoining_rows(tensors)) is not None:
            return whole
        rows = self._incoming[self._parameters.turn]
        copy_rows(tensors, bytes_of(rows))
        return rows[: sum(tensor.shape[0] for tensor in tensors)]

    def _capture_once(self, variant: Variant) -> CapturedStep:
        if variant not in self._captured:
            self._captured[variant] = self._capture(variant)
        return self._captured[variant]

    def _capture(self, variant: Variant) -> CapturedStep:
        # Kernels are compiled and loaded first, which a capture must not see.
        step = self._launch_without_rows(variant)
        if not self._graphs:
            return step
        graph, step = capture_graph(lambda: self._launch(variant), self._pool)
        step.graph = graph
        return step

    def _launch_without_rows(self, variant: Variant) -> CapturedStep:
        """Launch a step that writes nothing."""
        self._parameters.begin()
        self._parameters.send()
        step = self._launch(variant)
        self._parameters.record_launch()
        return step

    def _launch(self, variant: Variant) -> CapturedStep:
        """Launch a step whose parameters are on the device."""
        from shard_worker.model.kernels.step_parameters import take_tokens

        if self._may_follow:
            take_tokens(self._parameters.tokens[: variant.rows], self._tokens_made)
        step = launch(
            self._segment,
            self._layers,
            self._embedding,
            self._head,
            self._parameters,
            variant,
            self._hidden,
            self._logits,
            self._own,
        )
        if step.output.argmax is not None:
            self._tokens_made[: variant.rows].copy_(step.output.argmax)
        return step

    def _made_with(self, rows: int) -> int:
        return next(count for count in self.row_counts if rows <= count)

    def _variant(self, rows: int, featured: bool) -> Variant:
        """Return the kind of a step of so many rows, of which each session says whether its own are uncommitted."""
        return Variant(self._made_with(rows), False, featured)


def row_counts(segment: Segment) -> tuple[int, ...]:
    """Return the numbers of rows that steps of several sessions are made with on a segment."""
    matrices = (matrix for weights in segment.weights for matrix in matrices_of(weights))
    packed = any(one.nbytes < one.rows * one.columns * one.dtype.itemsize for one in matrices)
    counts = PACKED_ROW_COUNTS if packed else ROW_COUNTS
    return FEW_ROW_COUNTS + counts if packed or segment.config.experts is not None else counts
