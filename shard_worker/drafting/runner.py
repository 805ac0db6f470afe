"""A DFlash draft on a GPU by kernels, as captured graphs of two kinds: taking features of a step's rows, and proposing
blocks.

As in `step_runner` and `batch_runner`, graphs know no session. Blocks may be issued before it is known on the host how
many rows of the step before them count: the parameters of both kinds are then completed on the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from services.model.cached_tensors import PAGE_ROWS
from shard_worker.device.devices import Device
from shard_worker.device.graph_capture import capture_graph
from shard_worker.drafting.chooser_kernels import LaunchedRows, choose
from shard_worker.drafting.choosers import NOT_PROPOSED
from shard_worker.drafting.choosers.argmax import Argmax
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters.dflash import DFlashDraft, DFlashState
from shard_worker.model.kernels import decoder
from shard_worker.model.kernels.accept import ASKED, accept
from shard_worker.model.kernels.attention import chunk_count, rope_table, sums_room
from shard_worker.model.kernels.block_rows import block_rows
from shard_worker.model.kernels.compile_ahead import compile_together
from shard_worker.model.kernels.complete_step import complete_step
from shard_worker.model.kernels.heads import Heads, HeadShape
from shard_worker.model.kernels.matmul import begin, linear
from shard_worker.model.kernels.step_parameters import StepParameters
from shard_worker.model.layer_weights import AttentionWeights
from shard_worker.stage.batch_runner import ROW_COUNTS as BATCH_ROW_COUNTS
from shard_worker.stage.step_runner import ROW_COUNTS


class DFlashRunner:
    """Runs one draft with the head that it shares or has, for one session a call, or for several.

    A session's draft tokens and context are the same to the last bit either way.
    """

    def __init__(self, draft: DFlashDraft, head: DraftHead, *, graphs: bool, sessions: int | None = None) -> None:
        """sessions: the most of a call; None for calls of one session alone, which have less to look up."""
        config, device = draft.config, draft.device.torch_device
        self._draft, self._head, self.graphs, self._sessions = draft, head, graphs, sessions
        self.session_rows = next(rows for rows in ROW_COUNTS if rows >= config.block_size)
        """The most rows of a session's block."""
        self._row_counts = (self.session_rows,) if sessions is None else BATCH_ROW_COUNTS
        """The numbers of rows that graphs are made with."""
        self._kinds = tuple(dict.fromkeys(config.layer_kinds))
        # Blocks of several sessions are queued while those of others are on the device.
        twins = 1 if sessions is None else 2
        pages, rows = -(-config.max_position // PAGE_ROWS) + 1, self._row_counts[-1]
        self.appending, self.proposing = (
            StepParameters(device, pages, rows=rows, sessions=sessions, copies=len(self._kinds), twins=twins)
            for _ in range(2)
        )
        made = {"dtype": draft.dtype, "device": device}
        self._context = torch.zeros((rows, config.hidden_size), **made)  # type: ignore[call-overload]
        self.known_rows = torch.zeros((sessions or 1, config.hidden_size), **made)  # type: ignore[call-overload]
        self.known_tokens = torch.zeros(sessions or 1, dtype=torch.int64, device=device)
        self._mask_row = torch.zeros_like(self.known_rows[0])
        self._masked = False
        self._embedding: torch.Tensor | None = None
        """The target's, where it is on the draft's device."""
        # Where a block's first row chooses a token too, the last one stands behind its rows.
        self._draft_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._block_rows = 0
        self._layers = _layers(draft)
        self._captured: dict[tuple[Callable[[int], None], int], Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    @property
    def device(self) -> Device:
        return self._draft.device

    def takes(
        self, states: Sequence[DFlashState], before: Sequence[int], appended: Sequence[int], draft_tokens: Sequence[int]
    ) -> bool:
        """Return whether so many rows of features of each session, and blocks behind them, can be computed here.

        before: rows that may come before those.
        """
        if self._lacks_embedding:
            return False
        longest, blocks = self._draft.config.max_position, [self._rows_of_block(tokens) for tokens in draft_tokens]
        if len(states) > (self._sessions or 1) or max(sum(appended), sum(blocks)) > self._row_counts[-1]:
            return False
        sums = 0
        for state, earlier, rows, block in zip(states, before, appended, blocks, strict=True):
            length = state.length + earlier + rows
            if length + self.session_rows > longest:
                return False
            sums += block * chunk_count(length + block)
        return self._sessions is None or sums <= sums_room(self._made_with(sum(blocks)), longest, alone=False)

    def prepare(self, mask_row: torch.Tensor, embedding: torch.Tensor | None = None) -> None:
        """Compile and capture everything. mask_row: the mask token's embedding, [hidden].

        embedding: the target's, [vocab, hidden] on the draft's device, where blocks may be issued ahead.
        """
        with self._draft.device.current():
            self.set_mask_row(mask_row, embedding)
            if self._lacks_embedding:
                # Plain torch looks rows up where they are.
                return
            # Several sessions without rows write nothing; one alone writes to memory of nobody.
            scratch = [self._draft.allocate(self.session_rows)] if self._sessions is None else []
            self.send_append_parameters(scratch, [self.session_rows] * len(scratch), [0] * len(scratch))
            self.send_block_parameters(scratch, [self.session_rows - 1] * len(scratch), [0] * len(scratch))
            jobs = list(itertools.product((self._append, self._propose), self._row_counts))
            if self.graphs:
                compile_together([functools.partial(job, rows) for job, rows in jobs], self._context.device)
            for job, rows in jobs:
                self._capture_once(job, rows)
            if embedding is not None:
                self._prepare_accept(embedding)

    def set_mask_row(self, mask_row: torch.Tensor, embedding: torch.Tensor | None = None) -> None:
        """Take the mask token's embedding, [hidden], without which nothing can be proposed; and the target's whole one,
        as `prepare` does."""
        self._embedding = embedding
        self._mask_row.copy_(mask_row)
        self._masked = True

    def _prepare_accept(self, embedding: torch.Tensor) -> None:
        """Compile what decides which rows of a verify count, and what completes the step behind it; the numbers that
        both leave are sent anew for each step."""
        sessions, device = len(self.known_rows), embedding.device
        asked = torch.zeros((sessions, ASKED), dtype=torch.int64, device=device)
        for rows in ROW_COUNTS:
            if rows <= self.session_rows:
                chosen = torch.zeros(rows, dtype=torch.int64, device=device)
                outcome = torch.zeros(sessions + rows, dtype=torch.int64, device=device)
                accept(
                    self.proposing,
                    chosen,
                    asked,
                    outcome,
                    self.appending,
                    self.proposing,
                    embedding,
                    self.known_rows,
                    self.known_tokens,
                    rows,
                )
        if self._sessions is not None:
            step, tokens = self.proposing, self._draft_tokens
            complete_step(step, self.proposing, asked, self.known_tokens, tokens, ROW_COUNTS[-1])

    def append(self, states: Sequence[DFlashState], counts: Sequence[int], mixed: torch.Tensor) -> None:
        """Take features of the committed rows that follow each session's context, one session's behind the other's.

        counts: how many rows each has. mixed: `DFlashDraft.mix` of them, [n, hidden].
        """
        with self._draft.device.current():
            self.send_append_parameters(states, counts, [0] * len(states))
            self.launch_append(mixed)
        for state, count in zip(states, counts, strict=True):
            state.length += count

    def propose(
        self, states: Sequence[DFlashState], embedded: torch.Tensor, draft_tokens: Sequence[int], known: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Return of each session the draft's tokens behind its context, as many as `draft_tokens` says.

        embedded: as in `DFlashDraft.propose`. known: the token before each session's.
        """
        with self._draft.device.current():
            if not self._masked:
                self.set_mask_row(embedded[-1])
            self.known_rows[: len(states)].copy_(embedded[:-1])
            if not isinstance(self._head.chooser, Argmax):
                self.known_tokens[: len(states)].copy_(torch.tensor(known))
            self.send_block_parameters(states, draft_tokens, [0] * len(states))
            return self.blocks_of(self.launch_blocks().tolist(), draft_tokens)

    def blocks_of(self, tokens: Sequence[int], draft_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return each session's draft tokens, of what `launch_blocks` gives; a block that was cut short has fewer.

        draft_tokens: how many each session was to have; 0 where it has no block.
        """
        blocks, first = [], 0
        for count in draft_tokens:
            block = tokens[first + 1 : first + 1 + count]
            blocks.append(tuple(itertools.takewhile(lambda token: token != NOT_PROPOSED, block)))
            first += self._rows_of_block(count)
        return blocks

    # --- the pieces, for a caller that completes the parameters itself

    def send_append_parameters(
        self, states: Sequence[DFlashState | None], counts: Sequence[int], behind: Sequence[int]
    ) -> None:
        """Send to the device where the next rows of the contexts go; those of a session without a context go nowhere.

        counts: how many rows each session has, one session's behind the other's. behind: rows of each that may yet
        count before them.
        """
        self._send(self.appending, states, counts, behind)

    def send_block_parameters(
        self, states: Sequence[DFlashState | None], draft_tokens: Sequence[int], behind: Sequence[int]
    ) -> None:
        """Send to the device where blocks go. behind: rows of each session that may yet count before its block."""
        counts = [self._rows_of_block(tokens) for tokens in draft_tokens]
        self._block_rows = sum(counts)
        self._send(self.proposing, states, counts, behind)

    def launch_append(self, mixed: torch.Tensor) -> None:
        """Queue taking the rows that the parameters name, of `mixed` [n, hidden] in any element type."""
        self._context[: len(mixed)].copy_(mixed)
        self._capture_once(self._append, self._made_with(len(mixed)))()

    def launch_blocks(self) -> torch.Tensor:
        """Queue the blocks that the parameters name: int64 [n + 1], a session's block behind that of the one before it.

        Behind the place of each one's first row stand its draft tokens. The next call overwrites it.
        """
        self._capture_once(self._propose, self._made_with(self._block_rows))()
        return self._draft_tokens[: self._block_rows + 1]

    def _send(
        self,
        parameters: StepParameters,
        states: Sequence[DFlashState | None],
        counts: Sequence[int],
        behind: Sequence[int],
    ) -> None:
        """Send where so many rows of each session go, and where its pages are, also for rows that come before them."""
        if self._sessions is not None:
            parameters.begin()
        first_row = first_sum = 0
        for number, (state, count, before) in enumerate(zip(states, counts, behind, strict=True)):
            if state is not None and count:
                base, end = state.length, state.length + before + count
                for copy, kind in enumerate(self._kinds):
                    cache = state.caches[kind]
                    cache.free_unseen(base)
                    cache.reserve(end)
                    if self._sessions is None:
                        parameters.fill(base, count, copy=copy, attention=cache)
                    else:
                        parameters.add(number, first_row, base, count, copy=copy, first_sum=first_sum, attention=cache)
                first_sum += count * chunk_count(end)
            first_row += count
        parameters.send()
        parameters.record_launch()

    def _rows_of_block(self, draft_tokens: int) -> int:
        """Return how many rows a block of so many draft tokens has: one more, for the known token, where that chooses
        none; or none at all."""
        return draft_tokens + int(not self._draft.config.from_anchor) if draft_tokens else 0

    @property
    def _lacks_embedding(self) -> bool:
        """Whether tokens are chosen by the target's embedding, and it is elsewhere."""
        return self._draft.config.chooser.needs_embedding and self._embedding is None

    def _made_with(self, rows: int) -> int:
        return next(count for count in self._row_counts if rows <= count)

    def _capture_once(self, job: Callable[[int], None], rows: int) -> Callable[[], None]:
        """Return what launches a job of so many rows."""
        if (job, rows) not in self._captured:
            self._captured[job, rows] = self._capture(job, rows)
        return self._captured[job, rows]

    def _capture(self, job: Callable[[int], None], rows: int) -> Callable[[], None]:
        # Once in the open: a capture must not see kernels being compiled. All that it writes is written again.
        job(rows)
        if not self.graphs:
            return functools.partial(job, rows)
        graph, _ = capture_graph(functools.partial(job, rows), self._pool)
        return graph.replay

    def _append(self, rows: int) -> None:
        draft, layers = self._draft, self._layers
        config = draft.config
        context = begin(self._context[:rows], draft.hidden_norm, config.norm_eps)
        places = {kind: self.appending.places(rows, copy, blocks=True) for copy, kind in enumerate(self._kinds)}
        rope = rope_table(places[self._kinds[0]], rows, draft.rotation, draft.dtype)
        queries = config.heads * config.head_dim
        for weights, slot, whole in zip(layers.weights, layers.slots, layers.heads, strict=True):
            mixer = weights.mixer
            assert isinstance(mixer, AttentionWeights)
            assert mixer.qk_norm is not None
            assert whole is not None
            bias = None if mixer.qkv_bias is None else mixer.qkv_bias[queries:]
            shape = _keys_alone(whole)
            heads = Heads(shape, mixer.qk_norm[config.heads :], *rope, places[weights.kind], slot)
            linear(context, mixer.qkv.select_rows(slice(queries, None)), bias=bias, heads=heads, eps=config.norm_eps)

    def _propose(self, rows: int) -> None:
        places = {kind: self.proposing.places(rows, copy, blocks=True) for copy, kind in enumerate(self._kinds)}
        hidden = block_rows(self.known_rows, self._mask_row, places[self._kinds[0]], rows)
        result = decoder.run(self._layers, hidden, places, uncommitted=False, then=self._draft.norm)
        assert result.normed is not None
        logits, _ = linear(result.normed, self._head.weight)
        made = LaunchedRows(
            normed=result.normed,
            logits=logits,
            known=self.known_tokens,
            places=places[self._kinds[0]],
            from_anchor=self._draft.config.from_anchor,
            most=self._draft.config.block_size - 1,
            embedding=self._embedding,
        )
        choose(self._head, made, self._draft_tokens)


def _layers(draft: DFlashDraft) -> decoder.Layers:
    config = draft.config
    heads = []
    for kind, causal in zip(config.layer_kinds, config.causal, strict=True):
        sliding = kind == "sliding_attention"
        heads.append(
            HeadShape(
                heads=config.heads,
                kv_heads=config.kv_heads,
                dim=config.head_dim,
                rotary=config.head_dim,
                page=PAGE_ROWS,
                window=(config.window or 0) if sliding else 0,
                causal=causal,
            )
        )
    return decoder.Layers(
        weights=draft.layers,
        slots=draft.slots,
        heads=heads,
        delta=None,
        longest=config.max_position,
        rotations={config.rope: draft.rotation},
        eps=config.norm_eps,
    )


def _keys_alone(shape: HeadShape) -> HeadShape:
    return HeadShape(0, shape.kv_heads, shape.dim, shape.rotary, shape.page, shape.window, shape.causal, shape.gated)
