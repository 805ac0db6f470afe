"""Steps of few rows through a segment on a GPU: kernels, captured as CUDA graphs, one for each number of rows.

A graph knows no session: where its rows stand and where its session's memory lies is data that is sent along. So graphs
outlive sessions, and a session's memory must only outlive the steps that were launched for it, which queueing on one
stream sees to. Owns the graphs and the memory that they read and write between sessions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from services.model.cached_tensors import PAGE_ROWS
from services.model.config import LayerKind
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.device.dtypes import OnHost, bytes_of
from shard_worker.device.graph_capture import capture_graph
from shard_worker.device.stream_gate import StreamGate
from shard_worker.model.features import Features
from shard_worker.model.head import Head
from shard_worker.model.kernel_support import can_read, can_run_model, have_layers
from shard_worker.model.layer_weights import DecoderWeights, matrices_of
from shard_worker.stage.kernel_layers import kernel_layers, page_count
from shard_worker.stage.per_layer_rows import PerLayerRows
from shard_worker.stage.segment import Segment
from shard_worker.stage.step_graph import CapturedStep, Prelaunched, Released, StepOutput, StepRows, Variant
from shard_worker.weights.weight import RowLookup

if TYPE_CHECKING:
    from shard_worker.model.kernels import decoder
    from shard_worker.model.kernels.step_parameters import StepParameters

ROW_COUNTS = (1, 16, 32, 64)
"""The numbers of rows that steps are made with; a step of another number leaves the last rows unused."""

BLOCK_ROWS = 16
"""Rows of the blocks that steps are captured for at the start; drafts are trained for so many, or fewer."""


class StepRunner:
    """Runs the steps of one segment, with the embedding and the head where they are on its device."""

    def __init__(self, segment: Segment, embedding: RowLookup | None, head: Head | None, *, graphs: bool) -> None:
        from shard_worker.model.kernels.step_parameters import StepParameters

        self._segment, self._embedding, self._head, self._graphs = segment, embedding, head, graphs
        self._layers = kernel_layers(segment)
        device, config = segment.device.torch_device, segment.config
        self._parameters = StepParameters(
            device, page_count(config), rows=ROW_COUNTS[-1], caches=len(segment.key_kinds)
        )
        self._hidden = torch.zeros((ROW_COUNTS[-1], config.hidden_size), dtype=segment.dtype, device=device)
        self._own: PerLayerRows | None = None
        if segment.per_layer is not None:
            self._own = PerLayerRows(segment.per_layer, self._hidden, embedded=embedding is not None)
        # Page-locked, so that rows from another process are sent as part of a step.
        self._incoming = torch.zeros_like(self._hidden, device="cpu", pin_memory=device.type != "cpu")
        self._incoming_bytes = bytes_of(self._incoming)
        outgoing = self._hidden if head is None else torch.zeros(ROW_COUNTS[-1], dtype=torch.int64)
        self._outgoing = torch.zeros_like(outgoing, device="cpu", pin_memory=device.type != "cpu")
        self._has_recurrent_layers = self._layers.delta is not None
        self._captured: dict[Variant, CapturedStep] = {}
        self._last_variant: Variant | None = None
        self._gate = StreamGate.on(segment.device) if graphs else None
        self._prelaunched: Prelaunched | None = None
        self._released: Released | None = None
        self._filled_caches: Callable[[], SegmentCaches | None] = lambda: None
        """Returns the caches whose addresses are in the step parameters, None where they are gone."""
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    @property
    def graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return self._graphs

    @property
    def prelaunched(self) -> Variant | None:
        """The kind of step that waits on the device to be released, None where none does."""
        return None if self._prelaunched is None else self._prelaunched.variant

    @property
    def released(self) -> Variant | None:
        """The kind of step that `release` let begin and `run` was not called for yet, None where there is none."""
        return None if self._released is None else self._released.variant

    def takes(self, rows: int, *, uncommitted: bool) -> bool:
        """Return whether steps of so many rows run here. Rows that count at once come one by one, or many together."""
        return rows == 1 or (uncommitted and rows <= ROW_COUNTS[-1])

    def prepare(self, *, drafted: bool) -> None:
        """Compile what steps of any number of rows need, and capture the usual ones, so that none need wait.

        drafted: blocks of a draft are verified, and it wants features.
        """
        variants = [
            self._make_variant(1, uncommitted=False, featured=False),
            # Without a draft as well tokens are looked up and verified, and known ones computed anew by such steps.
            self._make_variant(BLOCK_ROWS, uncommitted=True, featured=False),
        ]
        longer: list[Variant] = []
        if drafted:
            variants.append(self._make_variant(1, uncommitted=False, featured=True))
            variants.append(self._make_variant(BLOCK_ROWS, uncommitted=True, featured=True))
            counts = [rows for rows in ROW_COUNTS if rows > BLOCK_ROWS]
            longer = [self._make_variant(rows, uncommitted=True, featured=True) for rows in counts]
        with self._segment.device.current():
            if self._graphs:
                from shard_worker.model.kernels.compile_ahead import compile_together

                launches = [functools.partial(self._launch, variant) for variant in (*variants, *longer)]
                compile_together(launches, self._hidden.device)
            for variant in variants:
                self._capture_once(variant)
            self.commit(self._segment.allocate(PAGE_ROWS, BLOCK_ROWS), 0)
            for variant in longer:
                self._launch_on_scratch(variant)

    def run(
        self,
        token_ids: Sequence[int],
        hidden: torch.Tensor | None,
        base: int,
        caches: SegmentCaches,
        features: Features | None,
        *,
        uncommitted: bool,
    ) -> StepOutput:
        """Launch a step of the rows of these tokens, or release the one that was prelaunched for them.

        hidden: the rows [n, hidden] from the stage before, on any device, where no embedding is here. base: the first
        row's position. features: what the draft reads of the rows is added to it; None where no draft wants it.
        """
        rows = StepRows(base, tuple(token_ids), uncommitted, features is not None)
        variant = self._variant_of(rows)
        released, self._released = self._released, None
        was_released = released is not None and released.matches(variant, caches, rows)
        # First of all: others wait meanwhile, and this is but a few stores.
        is_released = was_released or self._release_with_hidden(variant, rows, hidden, caches)
        with self._segment.device.current():
            step = self._captured[variant] if is_released else self._start(variant, rows, hidden, caches)
            if not was_released:
                self._parameters.record_launch()
            self._last_variant = variant
            on_host = OnHost(self._outgoing[: len(token_ids)], self._parameters.done)
            return step.results(len(token_ids), self._segment.capture, features, on_host)

    def release(self, rows: StepRows, activation: memoryview | None, caches: SegmentCaches, *, certain: bool) -> None:
        """Let the prelaunched step begin where it is that of these rows, before `run` is called for it.

        activation: bytes of the rows from elsewhere, where no embedding is here. certain: the next call of `run` is for
        this step; otherwise it may be for another one, and only what can be done again is done.
        """
        prelaunched = self._prelaunched
        if prelaunched is None or prelaunched.caches is not caches:
            return
        variant = prelaunched.variant if prelaunched.rows is rows else self._variant_of(rows)
        if not certain and variant.uncommitted != self._has_recurrent_layers:
            return
        if self._release(variant, rows, activation, caches):
            with self._segment.device.current():
                self._parameters.record_launch()
            self._released = Released(variant, caches, rows)

    def _release_with_hidden(
        self, variant: Variant, rows: StepRows, hidden: torch.Tensor | None, caches: SegmentCaches
    ) -> bool:
        if self._prelaunched is None or (hidden is not None and hidden.device.type != "cpu"):
            return False
        return self._release(variant, rows, None if hidden is None else bytes_of(hidden), caches)

    def _release(self, variant: Variant, rows: StepRows, activation: memoryview | None, caches: SegmentCaches) -> bool:
        """Tell the prelaunched step what it does not know yet and let it begin; False where there is no such step."""
        prelaunched = self._prelaunched
        if prelaunched is None or prelaunched.variant != variant:
            return False
        if prelaunched.caches is not caches or (prelaunched.rows is not rows and prelaunched.rows != rows):
            # Nothing else can be computed before the one that waits.
            if caches.defers or not caches.has_room(rows.base + len(rows.token_ids)):
                return False
            if prelaunched.caches is not caches:
                self._fill(caches)
            self._set_rows(rows)
        if activation is not None:
            self._copy_activation(activation)
        self._open_gate()
        return True

    def _fill(self, caches: SegmentCaches) -> None:
        caches.settle()
        self._parameters.fill(0, 0, attention=caches.attention, others=caches.others, recurrent=caches.recurrent)
        self._filled_caches = weakref.ref(caches)

    def _set_rows(self, rows: StepRows) -> None:
        """Set the rows of a step whose caches are filled in, behind `StepParameters.wait`."""
        # The tokens in any case: what counts of a verify is decided by them.
        self._parameters.set_rows(rows.base, len(rows.token_ids), token_ids=rows.token_ids)
        if self._own is not None:
            self._own.fill(0, rows.token_ids)

    def _copy_activation(self, activation: memoryview) -> None:
        self._incoming_bytes[: len(activation)] = activation

    def _start(
        self, variant: Variant, rows: StepRows, hidden: torch.Tensor | None, caches: SegmentCaches
    ) -> CapturedStep:
        """Launch a step for which none was prelaunched."""
        count = len(rows.token_ids)
        self.cancel()
        step = self._capture_once(variant)
        caches.reserve(rows.base + count)
        self._fill(caches)
        self._set_rows(rows)
        if hidden is not None:
            if hidden.device.type == "cpu":
                self._copy_activation(bytes_of(hidden))
                hidden = self._incoming[:count]
            self._hidden[:count].copy_(hidden, non_blocking=True)
        if step.graph is None:
            return self._launch(variant)
        step.graph.replay()
        return step

    def prelaunch(
        self, caches: SegmentCaches, length: int, *, known: StepRows | None = None, running: bool = False
    ) -> None:
        """Launch a step like the last one now, which waits for its parameters: `run` then only sets them. For the time
        between two steps, of these caches in all likelihood, up to `length`.

        known: its rows, where they are that. running: the last one may not be done yet; then only for its own caches,
        where they have room, and for rows that are not known.
        Until then the device must not be waited for, nor memory be asked for, except by `run` and `cancel`.
        """
        variant = self._last_variant
        if self._gate is None or variant is None or self._prelaunched is not None:
            return
        if running and (self._filled_caches() is not caches or not caches.has_room(length) or caches.defers):
            return
        if not running:
            caches.reserve(length)
            self._fill(caches)
            if known is not None and self._variant_of(known) != variant:
                known = None
            if known is not None:
                self._set_rows(known)
        with self._segment.device.current():
            self._gate.shut()
            self._prelaunched = Prelaunched(variant, caches, known)
            if self._embedding is None:
                self._hidden[: variant.rows].copy_(self._incoming[: variant.rows], non_blocking=True)
            graph = self._captured[variant].graph
            assert graph is not None
            graph.replay()

    def cancel(self) -> None:
        """Let a prelaunched step run with no rows, which changes nothing, and wait for it, so that what it reads may be
        freed."""
        if self._prelaunched is not None:
            self._parameters.wait()
            self._parameters.set_rows(0, 0)
            self._open_gate()
            with self._segment.device.current():
                self._parameters.record_launch()
            self._segment.device.synchronize()

    def _open_gate(self) -> None:
        assert self._gate is not None
        self._gate.open()
        self._prelaunched = None

    @property
    def parameters(self) -> StepParameters:
        """The parameters of the last step."""
        return self._parameters

    def commit(self, caches: SegmentCaches, rows: int | torch.Tensor) -> None:
        """Let the first `rows` rows of the step in flight count.

        rows: a number, or a tensor, int64 [1 or more], whose first element is the number.
        """
        if caches.recurrent is None:
            return
        from shard_worker.model.kernels import deltanet
        from shard_worker.model.kernels.step_parameters import Places

        assert self._layers.delta is not None
        # Another session's step may be prelaunched, and this asks for memory.
        self.cancel()
        with self._segment.device.current():
            count = rows
            if not isinstance(count, torch.Tensor):
                count = torch.full((1,), count, dtype=torch.int64, device=self._hidden.device)
            deltanet.commit(self._layers.delta, Places(caches.recurrent.step_parameters), count, caches.recurrent.conv)

    def _variant_of(self, rows: StepRows) -> Variant:
        return self._make_variant(len(rows.token_ids), rows.uncommitted, rows.featured)

    def _make_variant(self, count: int, uncommitted: bool, featured: bool) -> Variant:
        rows = next(rows for rows in ROW_COUNTS if count <= rows)
        return Variant(rows, uncommitted and self._has_recurrent_layers, featured and self._segment.capture is not None)

    def _capture_once(self, variant: Variant) -> CapturedStep:
        if variant not in self._captured:
            # Kernels are compiled and loaded then, which a capture must not see.
            step = self._launch_on_scratch(variant)
            self._captured[variant] = self._capture(variant) if self._graphs else step
        return self._captured[variant]

    def _launch_on_scratch(self, variant: Variant) -> CapturedStep:
        """Launch a step once, on memory of no session."""
        scratch = self._segment.allocate(PAGE_ROWS, variant.rows)
        scratch.reserve(variant.rows)
        self._fill(scratch)
        self._parameters.set_rows(0, variant.rows)
        step = self._launch(variant)
        self._parameters.record_launch()
        return step

    def _capture(self, variant: Variant) -> CapturedStep:
        graph, step = capture_graph(lambda: self._launch(variant), self._pool)
        step.graph = graph
        return step

    def _launch(self, variant: Variant) -> CapturedStep:
        self._parameters.send()
        if self._own is not None:
            self._own.send(variant.rows)
        step = launch(
            self._segment,
            self._layers,
            self._embedding,
            self._head,
            self._parameters,
            variant,
            self._hidden,
            own=self._own,
        )
        output = step.output
        outgoing = output.hidden if output.argmax is None else output.argmax
        self._outgoing[: variant.rows].copy_(outgoing, non_blocking=True)
        return step


def launch(
    segment: Segment,
    layers: decoder.Layers,
    embedding: RowLookup | None,
    head: Head | None,
    parameters: StepParameters,
    variant: Variant,
    hidden: torch.Tensor,
    logits: torch.Tensor | None = None,
    own: PerLayerRows | None = None,
) -> CapturedStep:
    """Queue a step's kernels: all layers, with the embedding and the head where they are there.

    layers: the segment's, as kernels take them. parameters: on the device already. hidden: the rows [variant.rows or
    more, hidden] from the stage before, where there is no embedding. logits: memory for those of as many rows, [rows,
    vocab], that steps share; None for memory of this step's own. own: what the rows bring to each layer by themselves,
    on its way to the device; None without per-layer embeddings.
    """
    from shard_worker.model.kernels import decoder, synthetic
    from shard_worker.model.kernels.deltanet import commit
    from shard_worker.model.kernels.matmul import linear
    from shard_worker.model.kernels.step_parameters import COUNTED, ROWS

    places = parameters.places(variant.rows, blocks=variant.featured)
    hidden = hidden[: variant.rows]
    if embedding is not None:
        hidden = embedding.lookup(parameters.tokens[: variant.rows])
    capture = segment.capture if variant.featured else None
    capture_indices = [] if capture is None else [layer - segment.layers.first for layer in capture.indices]
    result = decoder.run(
        layers,
        hidden,
        dict.fromkeys(LayerKind, places),
        uncommitted=variant.uncommitted,
        then=None if head is None else head.norm,
        capture=capture_indices,
        own=None if own is None else own.inputs(hidden),
    )
    if layers.delta is not None and not variant.uncommitted:
        counted = ROWS if places.sessions is None else COUNTED
        commit(layers.delta, places, places.lines[:, counted.value], hidden, states=False)
    step = CapturedStep(None, StepOutput(result.hidden))
    if capture is not None and capture.fc is not None:
        step.total = linear(torch.cat(result.captured, -1), capture.fc)[0].float()
    elif capture is not None:
        step.layer_rows = result.captured
    if head is not None and result.normed is not None:
        products, _ = linear(result.normed, head.weight, out=None if logits is None else logits[: variant.rows])
        logits = head.capped(products)
        chosen = logits.argmax(-1)
        if head.synthetic is not None:
            synthetic.choose(head.synthetic, parameters.tokens, places, chosen)
        step.output = StepOutput(result.hidden, logits, chosen)
    return step


def make_runner(segment: Segment, embedding: RowLookup | None, head: Head | None, *, graphs: bool) -> StepRunner | None:
    """Return a runner of a segment's steps.

    Returns None where plain torch has to do, as `can_run_model`, `have_layers` and `can_read` say.
    """
    are_decoders = all(isinstance(weights, DecoderWeights) for weights in segment.weights)
    if not are_decoders or not can_run_model(segment.device, segment.config):
        return None
    if not have_layers(segment.device, segment.weights):
        return None
    matrices = [matrix for weights in segment.weights for matrix in matrices_of(weights)]
    matrices += [] if head is None else [head.weight]
    matrices += [] if segment.per_layer is None else [segment.per_layer.projection]
    if not can_read(segment.device, matrices):
        return None
    return StepRunner(segment, embedding, head, graphs=graphs)
