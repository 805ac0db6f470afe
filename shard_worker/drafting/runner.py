"""A DFlash draft on a GPU by kernels, as two captured graphs: taking features of a step's rows, and proposing a block.

As in `step_runner`, graphs know no session. A block may be issued before it is known on the host how many rows of the
step before it count: the parameters of both graphs are then completed on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shard_worker.cache.attention_cache import PAGE_ROWS
from shard_worker.device.devices import Device
from shard_worker.drafting.drafters.dflash import DFlashDraft, DFlashState
from shard_worker.model.kernels import decoder
from shard_worker.model.kernels.accept import STOPS, accept
from shard_worker.model.kernels.attention import rope_table
from shard_worker.model.kernels.heads import Heads, HeadShape
from shard_worker.model.kernels.matmul import begin, linear
from shard_worker.model.kernels.step_parameters import StepParameters
from shard_worker.model.layer_weights import AttentionWeights
from shard_worker.stage.step_runner import ROW_COUNTS
from shard_worker.weights.weight import Weight


class DFlashRunner:
    """Runs one draft with the lm_head [vocab, hidden] that it shares or has. It takes one session's call at a time."""

    def __init__(self, draft: DFlashDraft, head: Weight, *, graphs: bool) -> None:
        config, device = draft.config, draft.device.torch_device
        self._draft, self._head, self.graphs = draft, head, graphs
        self.rows = next(rows for rows in ROW_COUNTS if rows >= config.block_size)
        """The number of rows that both graphs are made with."""
        self._kinds = tuple(dict.fromkeys(config.layer_kinds))
        pages = -(-config.max_position // PAGE_ROWS) + 1
        self.appending, self.proposing = (
            StepParameters(device, pages, rows=self.rows, copies=len(self._kinds)) for _ in range(2)
        )
        made = {"dtype": draft.dtype, "device": device}
        self._context = torch.zeros((self.rows, config.hidden_size), **made)  # type: ignore[call-overload]
        self._block = torch.zeros((self.rows, config.hidden_size), **made)  # type: ignore[call-overload]
        self._masked = False
        self._draft_tokens = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self._layers = _layers(draft)
        self._appended: Callable[[], None] | None = None
        self._proposed: Callable[[], None] | None = None

    @property
    def device(self) -> Device:
        return self._draft.device

    @property
    def known_row(self) -> torch.Tensor:
        """The row for the embedding of the block's known token, [hidden]."""
        return self._block[0]

    def takes(self, state: DFlashState, rows: int) -> bool:
        """Return whether features of so many rows, and a block behind them, can be computed here."""
        return rows <= self.rows and state.length + rows + self.rows <= self._draft.config.max_position

    def prepare(self, mask_row: torch.Tensor, embedding: torch.Tensor | None = None) -> None:
        """Compile and capture both graphs. mask_row: the mask token's embedding, [hidden].

        embedding: the target's, [vocab, hidden] on the draft's device, where blocks may be issued ahead.
        """
        with self._draft.device.current():
            self._block.copy_(mask_row.expand_as(self._block))
            self._masked = True
            scratch = self._draft.allocate(self.rows)
            self.send_append_parameters(scratch, self.rows)
            self.send_block_parameters(scratch, self.rows - 1)
            self._appended = self._captured(self._append)
            self._proposed = self._captured(self._propose)
            if embedding is not None:
                self._prepare_accept(embedding)

    def _prepare_accept(self, embedding: torch.Tensor) -> None:
        """Compile what decides which rows of a verify count; the numbers that it leaves are sent anew for each step."""
        device = embedding.device
        stops = torch.full((STOPS,), -1, device=device)
        for rows in ROW_COUNTS:
            if rows <= self.rows:
                argmax, outcome = (torch.zeros(count, dtype=torch.int64, device=device) for count in (rows, 1 + rows))
                accept(
                    self.proposing, argmax, stops, outcome, self.appending, self.proposing, embedding, self.known_row
                )

    def append(self, state: DFlashState, mixed: torch.Tensor) -> None:
        """Take features of the n committed rows that follow the context: `DFlashDraft.mix` of them, [n, hidden]."""
        with self._draft.device.current():
            self.send_append_parameters(state, len(mixed))
            self.launch_append(mixed)
        state.length += len(mixed)

    def propose(self, state: DFlashState, embedded: torch.Tensor, draft_tokens: int) -> tuple[int, ...]:
        """Return the draft's most probable tokens behind the context. embedded: as in `DFlashDraft.propose`."""
        with self._draft.device.current():
            if not self._masked:
                self.prepare(embedded[1])
            self.known_row.copy_(embedded[0])
            self.send_block_parameters(state, draft_tokens)
            return tuple(self.launch_block()[1 : draft_tokens + 1].tolist())

    # --- the pieces, for a caller that completes the parameters itself

    def send_append_parameters(self, state: DFlashState, rows: int) -> None:
        """Send to the device where the next rows of the context go."""
        self._fill(self.appending, state, state.length, rows)

    def send_block_parameters(self, state: DFlashState, draft_tokens: int, *, behind: int = 0) -> None:
        """Send to the device where a block goes. behind: rows that may yet count before it."""
        self._fill(self.proposing, state, state.length, draft_tokens + 1, behind)

    def launch_append(self, mixed: torch.Tensor) -> None:
        """Queue taking as many rows as the parameters say, of `mixed` [n, hidden] in any element type."""
        self._context[: len(mixed)].copy_(mixed)
        if self._appended is None:
            self._appended = self._captured(self._append)
        self._appended()

    def launch_block(self) -> torch.Tensor:
        """Queue a proposal: int64 [rows], of which row 1 and those behind it are the draft tokens.

        The next call overwrites it.
        """
        if self._proposed is None:
            self._proposed = self._captured(self._propose)
        self._proposed()
        return self._draft_tokens

    def _fill(self, parameters: StepParameters, state: DFlashState, base: int, rows: int, behind: int = 0) -> None:
        for copy, kind in enumerate(self._kinds):
            cache = state.caches[kind]
            cache.reserve(base + behind + rows)
            parameters.fill(base, rows, copy=copy, attention=cache)
        parameters.send()
        parameters.record_launch()

    def _captured(self, job: Callable[[], None]) -> Callable[[], None]:
        # Once in the open: a capture must not see kernels being compiled. All that it writes is written again.
        job()
        if not self.graphs:
            return job
        self._draft.device.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            job()
        return graph.replay

    def _append(self) -> None:
        draft, layers = self._draft, self._layers
        config = draft.config
        context = begin(self._context, draft.hidden_norm, config.norm_eps)
        places = {kind: self.appending.places(self.rows, copy) for copy, kind in enumerate(self._kinds)}
        rope = rope_table(places[self._kinds[0]], self.rows, draft.frequencies, draft.dtype)
        queries = config.heads * config.head_dim
        for weights, slot in zip(layers.weights, layers.slots, strict=True):
            mixer = weights.mixer
            assert isinstance(mixer, AttentionWeights)
            bias = None if mixer.qkv_bias is None else mixer.qkv_bias[queries:]
            shape = _keys_alone(layers.heads[weights.kind])
            heads = Heads(shape, mixer.qk_norm[config.heads :], *rope, places[weights.kind], slot)
            linear(context, mixer.qkv.tensor[queries:], bias=bias, heads=heads, eps=config.norm_eps)

    def _propose(self) -> None:
        places = {kind: self.proposing.places(self.rows, copy) for copy, kind in enumerate(self._kinds)}
        result = decoder.run(self._layers, self._block, places, uncommitted=False, then=self._draft.norm)
        assert result.normed is not None
        logits, _ = linear(result.normed, self._head.tensor)
        torch.argmax(logits, -1, out=self._draft_tokens)


def _layers(draft: DFlashDraft) -> decoder.Layers:
    config = draft.config
    heads = {}
    for kind, causal in zip(config.layer_kinds, config.causal, strict=True):
        sliding = kind == "sliding_attention"
        heads[kind] = HeadShape(
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            rotary=config.head_dim,
            page=PAGE_ROWS,
            ring=(draft.ring or 0) if sliding else 0,
            window=(config.window or 0) if sliding else 0,
            causal=causal,
        )
    return decoder.Layers(
        weights=draft.layers,
        slots=draft.slots,
        heads=heads,
        delta=None,
        longest=config.max_position,
        frequencies=draft.frequencies,
        eps=config.norm_eps,
    )


def _keys_alone(shape: HeadShape) -> HeadShape:
    return HeadShape(
        0, shape.kv_heads, shape.dim, shape.rotary, shape.page, shape.ring, shape.window, shape.causal, shape.gated
    )
