"""A few rows through all layers of a segment by one call, on CPUs whose kernels take all that is between."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from services.model.config import Activation, AttentionShape, ModelConfig
from services.model.rope import Rope
from shard_worker.cpu_kernels import attention, elementwise, heads, native, norm
from shard_worker.cpu_kernels.codes_products import CodesProduct
from shard_worker.cpu_kernels.kernel_writer import BLOCK
from shard_worker.cpu_kernels.native import Call
from shard_worker.cpu_kernels.program import Program
from shard_worker.model.layer_weights import AttentionWeights, DecoderWeights, MlpWeights
from shard_worker.model.rows import Rows, SessionRows
from shard_worker.ops.attention import first_seen
from shard_worker.weights.cpu_codes import UNPACKED_FROM, CpuCodesWeight
from shard_worker.weights.weight import StackedWeight, Weight

_Tables = Mapping[Rope, Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""By how positions enter, the rotary table of each session's rows."""

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
        return cls(tuple(parts))

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
        """The most bytes that a row of activations takes while it is multiplied."""
        return max(product.rounded_row for product, _ in self.parts)

    def calls(self, x: torch.Tensor, rounded: torch.Tensor, product: torch.Tensor) -> Iterator[Call]:
        """Yield the calls that multiply rows x [n, columns] by it: product [n, rows]. rounded: as of `CodesProduct`."""
        first = 0
        for part, bias in self.parts:
            yield part.call(x, bias, rounded, product[:, first : first + part.rows])
            first += part.rows


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights as kernels take them. slot: its place in its caches."""

    weights: DecoderWeights
    mixer: AttentionWeights
    qkv: _Matrix
    out: _Matrix
    gate_up: _Matrix
    down: _Matrix
    slot: int

    @classmethod
    def of(cls, weights: DecoderWeights, slot: int) -> _Layer | None:
        """Return that of a layer; None where something of it has no kernel."""
        mixer, mlp = weights.mixer, weights.mlp
        if not isinstance(mixer, AttentionWeights) or not isinstance(mlp, MlpWeights):
            return None
        others = (
            *(weights.mixer_output_norm, weights.mlp_output_norm, weights.output_scale, weights.per_layer),
            *(mixer.sinks, mixer.head_gates, mixer.value_norm),
        )
        if (
            any(other is not None for other in others)
            or mixer.gated
            or mixer.shares
            or mlp.activation is not Activation.SILU
            or not _attends(mixer.shape)
        ):
            return None
        qkv, out = _Matrix.of(mixer.qkv, mixer.qkv_bias), _Matrix.of(mixer.out, mixer.out_bias)
        gate_up, down = _Matrix.of(mlp.gate_up, mlp.gate_up_bias), _Matrix.of(mlp.down, mlp.down_bias)
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        made = cls(weights, mixer, qkv, out, gate_up, down, slot)
        return made if all(matrix.rows % (2 * native.lanes()) == 0 for matrix in made.matrices) else None

    @property
    def matrices(self) -> tuple[_Matrix, ...]:
        """Its matrices in the order in which rows are multiplied by them."""
        return self.qkv, self.out, self.gate_up, self.down


def _attends(shape: AttentionShape) -> bool:
    """Return whether kernels turn heads, and attend, in this way."""
    lanes, turning = native.lanes(), shape.rope.rotary_dim
    return (
        not native.multiplies(torch.bfloat16)
        and shape.head_dim % lanes == 0
        and turning % (2 * lanes) == 0
        and (shape.head_dim - turning) % lanes == 0
        and (shape.window is None or shape.window >= BLOCK)
    )


class LayerProgram:
    """The layers of a segment, each of attention and SwiGLU, with all matrices in codes, on bfloat16 activations.

    A row comes out bit for bit as it does from `layers.decoder` with batch-invariant rows. It is run by one thread at a
    time.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[_Layer], captured: Set[int]) -> None:
        """captured: the layers, counted from the segment's first, whose outputs `run` returns too."""
        self._config, self._layers, self._captured = config, layers, captured
        self._steps: dict[tuple[int, ...], _Step] = {}

    @classmethod
    def of(
        cls, config: ModelConfig, weights: Sequence[DecoderWeights], slots: Sequence[int], captured: Set[int]
    ) -> LayerProgram | None:
        """Return that of these layers; None where some of them has no kernels. slots: their places in their caches."""
        layers = [_Layer.of(*each) for each in zip(weights, slots, strict=True)]
        known = [layer for layer in layers if layer is not None]
        return cls(config, known, captured) if len(known) == len(layers) else None

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
    """The program for sessions of so many rows each, with the memory that it computes in."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[_Layer], counts: Sequence[int], captured: Set[int]
    ) -> None:
        self._config, self._layers = config, layers
        self._count = count = sum(counts)
        self._parts = [slice(end - own, end) for own, end in zip(counts, itertools.accumulate(counts), strict=True)]
        qkvs, outs, gate_ups, downs = zip(*(layer.matrices for layer in layers), strict=True)

        def memory(sizes: Iterable[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(count * max(sizes), dtype=dtype)

        hidden = config.hidden_size
        self._normed, self._between, self._made = (torch.empty(count, hidden, dtype=torch.bfloat16) for _ in range(3))
        self._qkv, self._gate_up = (memory(one.rows for one in of) for of in (qkvs, gate_ups))
        self._queries, self._mixed, self._gated = (memory(one.columns for one in of) for of in (outs, outs, downs))
        self._rounded = memory((one.rounded_row for layer in layers for one in layer.matrices), torch.uint8)
        self._scores = torch.empty(0)
        # What a layer is given and what it makes are two tensors. What captured layers make stays to the end.
        turns = [torch.empty(count, hidden, dtype=torch.bfloat16) for _ in range(2)]
        self._streams = [turns[0]]
        for index in range(len(layers)):
            kept = index in captured
            self._streams.append(torch.empty_like(turns[0]) if kept else turns[(index + 1) % 2])
        self._captured = [self._streams[index + 1] for index in sorted(captured)]
        self._program: Program | None = None
        self._sessions_at: list[int] = []
        """Of each layer the number of the first call that depends on sessions and positions."""
        self._heads = [self._heads_of(layer) for layer in layers]

    def run(self, hidden: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `LayerProgram.run`."""
        self._streams[0].copy_(hidden)
        longest = max(session.base + session.count for session in rows.sessions)
        if self._scores.numel() < attention.scores_size(longest):
            self._scores = torch.empty(attention.scores_size(2 * longest))
        tables = {rope: [(cos[own], sin[own]) for own in self._parts] for rope, (cos, sin) in rows.ropes.items()}
        if self._program is None:
            calls: list[Call] = []
            for index in range(len(self._layers)):
                self._extend(calls, index, rows.sessions, tables)
            self._program = Program(calls)
        else:
            for index, first in enumerate(self._sessions_at):
                for number, call in enumerate(self._session_calls(index, rows.sessions, tables), first):
                    self._program.change(number, call)
        self._program.run()
        return self._streams[-1].clone(), [stream.clone() for stream in self._captured]

    def _extend(self, calls: list[Call], index: int, sessions: Sequence[SessionRows], tables: _Tables) -> None:
        """Write the calls of a layer behind others."""
        layer, eps = self._layers[index], self._config.norm_eps
        given, made = self._streams[index], self._streams[index + 1]
        qkv, mixed = self._of_rows(self._qkv, layer.qkv.rows), self._of_rows(self._mixed, layer.out.columns)
        gate_up = self._of_rows(self._gate_up, layer.gate_up.rows)
        gated = self._of_rows(self._gated, layer.down.columns)
        calls.append(norm.norm_call(given, layer.weights.input_norm, eps, self._normed))
        calls.extend(layer.qkv.calls(self._normed, self._rounded, qkv))
        self._sessions_at.append(len(calls))
        calls.extend(self._session_calls(index, sessions, tables))
        calls.extend(layer.out.calls(mixed, self._rounded, self._made))
        calls.append(elementwise.sum_call(given, self._made, self._between))
        calls.append(norm.norm_call(self._between, layer.weights.post_norm, eps, self._normed))
        calls.extend(layer.gate_up.calls(self._normed, self._rounded, gate_up))
        calls.append(elementwise.swiglu_call(gate_up, gated))
        calls.extend(layer.down.calls(gated, self._rounded, self._made))
        calls.append(elementwise.sum_call(self._between, self._made, made))

    def _session_calls(self, index: int, sessions: Sequence[SessionRows], tables: _Tables) -> Iterator[Call]:
        """Yield the calls of a layer that depend on sessions and positions."""
        layer, eps = self._layers[index], self._config.norm_eps
        shape, norms = layer.mixer.shape, layer.mixer.qk_norm
        first_value = shape.heads if shape.keys_as_values else shape.heads + shape.kv_heads
        each = zip(sessions, self._heads[index], tables[shape.rope], strict=True)
        for session, (projected, queries, mixed), table in each:
            base, cache = session.base, session.caches.attention_of(shape)
            [(places, _)] = cache.places(layer.slot, base, session.count)
            yield heads.finishing_call(projected, first_value, norms, eps, table, queries, *places)
            keys_and_values = cache.span(layer.slot, first_seen(base, shape.window), base + session.count)
            yield attention.attending_call(queries, *keys_and_values, mixed, self._scores, shape.window)

    def _heads_of(self, layer: _Layer) -> list[tuple[torch.Tensor, ...]]:
        """Return of each session the heads of its rows in a layer: those projected, the queries, and what attention
        makes of these, [n, heads, head_dim] all."""
        widths = (self._qkv, layer.qkv.rows), (self._queries, layer.out.columns), (self._mixed, layer.out.columns)
        whole = [self._of_rows(*each).view(self._count, -1, layer.mixer.shape.head_dim) for each in widths]
        return [tuple(tensor[own] for tensor in whole) for own in self._parts]

    def _of_rows(self, memory: torch.Tensor, width: int) -> torch.Tensor:
        """Return memory for rows of this width, [n, width]."""
        return memory[: self._count * width].view(self._count, width)
