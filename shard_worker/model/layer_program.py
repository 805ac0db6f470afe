"""A few rows through all layers of a segment by as few calls as can be, on CPUs with kernels for most of the layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch

from services.model.config import Activation, ModelConfig
from services.model.rope import Rope
from shard_worker.cpu_kernels import attention, elementwise, heads, native, norm
from shard_worker.cpu_kernels.codes_kernel import scratch_size
from shard_worker.cpu_kernels.codes_products import CodesProduct
from shard_worker.cpu_kernels.kernel_writer import BLOCK
from shard_worker.cpu_kernels.native import Call
from shard_worker.cpu_kernels.program import Program
from shard_worker.model.layer_weights import AttentionWeights, DecoderWeights, MlpWeights
from shard_worker.model.layers import decoder
from shard_worker.model.rows import Rows, SessionRows
from shard_worker.ops.attention import first_seen
from shard_worker.weights.cpu_codes import UNPACKED_FROM, CpuCodesWeight
from shard_worker.weights.weight import StackedWeight, Weight

_Tables = Mapping[Rope, Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""By how positions enter, the rotary table of each session's rows."""

_Piece = Program | Callable[[Rows], torch.Tensor]
"""A program, or what is done between two of them to rows."""

_MOST_STEPS = 16
"""How many steps are kept, each of other numbers of sessions' rows."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix as kernels take it: what multiplies by parts of it that stand below each other, with their biases."""

    parts: tuple[tuple[CodesProduct, torch.Tensor | None], ...]

    @classmethod
    def of(cls, weight: Weight, bias: torch.Tensor | None) -> _Matrix | None:
        """Return that of a matrix and its bias; None where it has no kernel."""
        parts, first = [], 0
        for part in weight.parts if isinstance(weight, StackedWeight) else (weight,):
            if not isinstance(part, CpuCodesWeight):
                return None
            own = None if bias is None else bias[first : first + part.rows].to(torch.bfloat16).contiguous()
            parts.append((part.product, own))
            first += part.rows
        return cls(tuple(parts)) if first % (2 * native.lanes()) == 0 else None

    @property
    def rows(self) -> int:
        """The rows of all parts together."""
        return sum(product.rows for product, _ in self.parts)

    @property
    def columns(self) -> int:
        """Its columns, which every part has."""
        return self.parts[0][0].columns

    @property
    def rounded_row(self) -> int:
        """The most bytes that a row of activations takes while it is multiplied, as `scratch_size` asks."""
        return max(product.rounded_row for product, _ in self.parts)

    def calls(self, x: torch.Tensor, scratch: torch.Tensor, product: torch.Tensor) -> Iterator[Call]:
        """Yield the calls that multiply rows x [n, columns] by it: product [n, rows]. scratch: as of `CodesProduct`."""
        first = 0
        for part, bias in self.parts:
            yield part.call(x, bias, scratch, product[:, first : first + part.rows])
            first += part.rows


@dataclass(frozen=True, slots=True)
class _Attention:
    """An attention mixer that kernels take."""

    weights: AttentionWeights
    qkv: _Matrix
    out: _Matrix

    @classmethod
    def of(cls, weights: object) -> _Attention | None:
        """Return that of a mixer; None where kernels do not take it."""
        if not isinstance(weights, AttentionWeights) or not _attends(weights):
            return None
        qkv, out = _Matrix.of(weights.qkv, weights.qkv_bias), _Matrix.of(weights.out, weights.out_bias)
        return None if qkv is None or out is None else cls(weights, qkv, out)


@dataclass(frozen=True, slots=True)
class _SwiGlu:
    """A feed-forward part that kernels take."""

    gate_up: _Matrix
    down: _Matrix

    @classmethod
    def of(cls, weights: object) -> _SwiGlu | None:
        """Return that of a feed-forward part; None where kernels do not take it."""
        if not isinstance(weights, MlpWeights) or weights.activation is not Activation.SILU:
            return None
        gate_up, down = _Matrix.of(weights.gate_up, weights.gate_up_bias), _Matrix.of(weights.down, weights.down_bias)
        return None if gate_up is None or down is None else cls(gate_up, down)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights, with what kernels take of them. slot: its place in its caches."""

    weights: DecoderWeights
    attention: _Attention | None
    swiglu: _SwiGlu | None
    slot: int


def _attends(mixer: AttentionWeights) -> bool:
    """Return whether kernels turn heads, and attend, in a mixer's way."""
    shape, lanes = mixer.shape, native.lanes()
    turning = shape.rope.rotary_dim
    return (
        not (mixer.gated or mixer.shares)
        and all(one is None for one in (mixer.sinks, mixer.head_gates, mixer.value_norm))
        and shape.head_dim % lanes == 0
        and turning % (2 * lanes) == 0
        and (shape.head_dim - turning) % lanes == 0
        and (shape.window is None or shape.window >= BLOCK)
    )


class LayerProgram:
    """The layers of a segment, some parts of which have their matrices in codes, on bfloat16 activations.

    All that kernels take between two other parts is one call. A row comes out bit for bit as it does from
    `layers.decoder` with batch-invariant rows. It is run by one thread at a time.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[_Layer], captured: Set[int]) -> None:
        """captured: the layers, counted from the segment's first, whose outputs `run` returns too."""
        self._config, self._layers, self._captured = config, layers, captured
        self._steps: dict[tuple[int, ...], _Step] = {}

    @classmethod
    def of(
        cls, config: ModelConfig, weights: Sequence[DecoderWeights], slots: Sequence[int], captured: Set[int]
    ) -> LayerProgram | None:
        """Return that of these layers; None where there is one of which kernels take nothing, or which does more than
        most do. slots: their places in their caches."""
        is_usual = all(one.output_scale is None and one.per_layer is None for one in weights)
        if config.hidden_size % native.lanes() or not is_usual:
            return None
        layers = [
            _Layer(one, _Attention.of(one.mixer), _SwiGlu.of(one.mlp), slot)
            for one, slot in zip(weights, slots, strict=True)
        ]
        is_taken = all(layer.attention is not None or layer.swiglu is not None for layer in layers)
        return cls(config, layers, captured) if is_taken else None

    def takes(self, rows: Rows) -> bool:
        """Return whether `run` takes these rows: all are to come out as they would alone, and see enough positions."""
        count = sum(session.count for session in rows.sessions)
        return (
            (rows.batch_invariant_rows is not None or count == 1)
            and count < UNPACKED_FROM
            and all(session.base + 1 >= BLOCK for session in rows.sessions)
        )

    def run(self, hidden: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what rows [n, hidden] that `takes` says yes to become, [n, hidden], and the outputs of captured layers
        in order. Their keys and values are written to the caches."""
        counts = tuple(session.count for session in rows.sessions)
        step = self._steps.pop(counts, None) or _Step(self._config, self._layers, counts, self._captured)
        # The one that was not used for longest goes first.
        self._steps[counts] = step
        if len(self._steps) > _MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return step.run(hidden, rows)


class _Step:
    """What is done to rows of sessions, so many of each, with the memory that it is computed in."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[_Layer], counts: Sequence[int], captured: Set[int]
    ) -> None:
        self._config, self._layers = config, layers
        self._count = count = sum(counts)
        self._parts = [slice(end - own, end) for own, end in zip(counts, itertools.accumulate(counts), strict=True)]
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        swiglus = [layer.swiglu for layer in layers if layer.swiglu is not None]

        def memory(sizes: Iterable[int]) -> torch.Tensor:
            return torch.empty(count * max(sizes, default=0), dtype=torch.bfloat16)

        self._normed, self._between, self._made, *turns = (
            torch.empty(count, config.hidden_size, dtype=torch.bfloat16) for _ in range(5)
        )
        self._qkv = memory(one.qkv.rows for one in attentions)
        self._queries, self._mixed = (memory(one.out.columns for one in attentions) for _ in range(2))
        self._gate_up = memory(one.gate_up.rows for one in swiglus)
        self._gated = memory(one.down.columns for one in swiglus)
        matrices = [matrix for one in attentions for matrix in (one.qkv, one.out)]
        matrices += [matrix for one in swiglus for matrix in (one.gate_up, one.down)]
        rounded_row = max((one.rounded_row for one in matrices), default=0)
        self._scratch = torch.zeros(scratch_size(rounded_row, count), dtype=torch.uint8)
        self._scores = torch.empty(0)
        # What a layer is given and what it makes are two tensors. What captured layers make stays to the end.
        self._streams = [turns[0]]
        for index in range(len(layers)):
            self._streams.append(torch.empty_like(turns[0]) if index in captured else turns[(index + 1) % 2])
        self._captured = [self._streams[index + 1] for index in sorted(captured)]
        self._heads = [self._heads_of(layer) for layer in layers]
        self._pieces: list[_Piece] = []
        """Programs, and between them what is done by `layers`, whose results go to `_made`."""
        self._sessions_at: dict[int, tuple[Program, int]] = {}
        """Of layers that kernels attend for, where the calls are that depend on sessions and positions: the number of
        the first one in a program."""

    def run(self, hidden: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `LayerProgram.run`."""
        self._streams[0].copy_(hidden)
        longest = max(session.base + session.count for session in rows.sessions)
        if self._scores.numel() < attention.scores_size(longest):
            self._scores = torch.empty(attention.scores_size(2 * longest))
        tables = {rope: [(cos[own], sin[own]) for own in self._parts] for rope, (cos, sin) in rows.ropes.items()}
        if not self._pieces:
            # Where a session has no memory for its rows, nothing is left of what was written by then.
            self._pieces, self._sessions_at = self._written(rows.sessions, tables)
        else:
            for index, (program, first) in self._sessions_at.items():
                for number, call in enumerate(self._session_calls(index, rows.sessions, tables), first):
                    program.change(number, call)
        for piece in self._pieces:
            if isinstance(piece, Program):
                piece.run()
            else:
                self._made.copy_(piece(rows))
        return self._streams[-1].clone(), [stream.clone() for stream in self._captured]

    def _written(
        self, sessions: Sequence[SessionRows], tables: _Tables
    ) -> tuple[list[_Piece], dict[int, tuple[Program, int]]]:
        """Return all pieces, and where in them the calls are that depend on sessions and positions."""
        config, eps = self._config, self._config.norm_eps
        pieces: list[_Piece] = []
        sessions_at: dict[int, tuple[Program, int]] = {}
        calls: list[Call] = []
        waiting: dict[int, int] = {}

        def end_program() -> None:
            program = Program(calls)
            pieces.append(program)
            sessions_at.update({index: (program, first) for index, first in waiting.items()})
            calls.clear()
            waiting.clear()

        for index, layer in enumerate(self._layers):
            weights, given, made = layer.weights, self._streams[index], self._streams[index + 1]
            calls.append(norm.norm_call(given, weights.input_norm, eps, self._normed))
            if layer.attention is not None:
                qkv, out = layer.attention.qkv, layer.attention.out
                calls.extend(qkv.calls(self._normed, self._scratch, self._of_rows(self._qkv, qkv.rows)))
                waiting[index] = len(calls)
                calls.extend(self._session_calls(index, sessions, tables))
                calls.extend(out.calls(self._of_rows(self._mixed, out.columns), self._scratch, self._made))
            else:
                end_program()
                mixer = decoder.mixer_of(weights.kind.mixer)
                pieces.append(partial(mixer.run, config, weights.mixer, layer.slot, self._normed))
            if weights.mixer_output_norm is not None:
                calls.append(norm.norm_call(self._made, weights.mixer_output_norm, eps, self._made))
            calls.append(elementwise.sum_call(given, self._made, self._between))
            calls.append(norm.norm_call(self._between, weights.post_norm, eps, self._normed))
            if layer.swiglu is not None:
                first, second = layer.swiglu.gate_up, layer.swiglu.down
                gate_up, gated = self._of_rows(self._gate_up, first.rows), self._of_rows(self._gated, second.columns)
                calls.extend(first.calls(self._normed, self._scratch, gate_up))
                calls.append(elementwise.swiglu_call(gate_up, gated))
                calls.extend(second.calls(gated, self._scratch, self._made))
            else:
                end_program()
                run = decoder.feed_forward_of(weights.feed_forward).run
                pieces.append(partial(run, weights.mlp, self._normed, residual=self._between))
            if weights.mlp_output_norm is not None:
                calls.append(norm.norm_call(self._made, weights.mlp_output_norm, eps, self._made))
            calls.append(elementwise.sum_call(self._between, self._made, made))
        end_program()
        return pieces, sessions_at

    def _session_calls(self, index: int, sessions: Sequence[SessionRows], tables: _Tables) -> Iterator[Call]:
        """Yield the calls of a layer that depend on sessions and positions."""
        layer, eps = self._layers[index], self._config.norm_eps
        assert layer.attention is not None
        shape, norms = layer.attention.weights.shape, layer.attention.weights.qk_norm
        first_value = shape.heads if shape.keys_as_values else shape.heads + shape.kv_heads
        each = zip(sessions, self._heads[index], tables[shape.rope], strict=True)
        for session, (projected, queries, mixed), table in each:
            base, cache = session.base, session.caches.attention_of(shape)
            [(places, _)] = cache.places(layer.slot, base, session.count)
            yield heads.finishing_call(projected, first_value, norms, eps, table, queries, *places)
            keys_and_values = cache.span(layer.slot, first_seen(base, shape.window), base + session.count)
            yield attention.attending_call(queries, *keys_and_values, mixed, self._scores, shape.window)

    def _heads_of(self, layer: _Layer) -> list[tuple[torch.Tensor, ...]]:
        """Return of each session the heads of its rows in a layer that kernels attend for: those projected, the
        queries, and what attention makes of these, [n, heads, head_dim] all."""
        if layer.attention is None:
            return []
        qkv, out = layer.attention.qkv, layer.attention.out
        widths = (self._qkv, qkv.rows), (self._queries, out.columns), (self._mixed, out.columns)
        head_dim = layer.attention.weights.shape.head_dim
        whole = [self._of_rows(*each).view(self._count, -1, head_dim) for each in widths]
        return [tuple(tensor[own] for tensor in whole) for own in self._parts]

    def _of_rows(self, memory: torch.Tensor, width: int) -> torch.Tensor:
        """Return memory for rows of this width, [n, width]."""
        return memory[: self._count * width].view(self._count, width)
