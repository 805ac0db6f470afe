"""Decoder layers with kernels: what `layers.decoder` does, for a few rows whose position is data on the device.

Six launches a layer with attention, seven one with a recurrent mixer, one more where there are experts, one where heads
have gates or are wider than a tile, two where what sublayers make has norms, and three with per-layer embeddings. Every
product also does what lies between it and the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.model.config import Activation, LayerKind
from services.model.rope import Rope
from shard_worker.model.kernels import deltanet, experts
from shard_worker.model.kernels.attention import attend, rope_table
from shard_worker.model.kernels.block_convolution import convolve
from shard_worker.model.kernels.heads import WIDEST_TILE, Heads, HeadShape, finish_apart
from shard_worker.model.kernels.matmul import Normed, Summed, begin, linear, sums_for
from shard_worker.model.kernels.output_norm import add_both, add_normed, add_normed_for_two
from shard_worker.model.kernels.step_parameters import Places
from shard_worker.model.layer_weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsBesideWeights,
    ExpertsWeights,
    MlpWeights,
)
from shard_worker.ops.rope import Rotation
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers in order, each with its slot in the caches of its kind.

    heads: the shape of each layer's heads, None for a recurrent one. delta: that of recurrent layers, None where there
    are none. longest: positions that any session may have. rotations: of each RoPE that layers have. eps: of all norms.
    """

    weights: Sequence[DecoderWeights]
    slots: Sequence[int]
    heads: Sequence[HeadShape | None]
    delta: deltanet.Shape | None
    longest: int
    rotations: Mapping[Rope, Rotation]
    eps: float


@dataclass(frozen=True, slots=True)
class Result:
    """What layers made of their rows.

    hidden: [n, hidden] behind the last layer. normed: the same on its way into the norm that follows, where one was
    named. captured: the rows [n, hidden] behind each layer asked for.
    """

    hidden: torch.Tensor
    normed: Normed | None
    captured: list[torch.Tensor]


def run(
    layers: Layers,
    hidden: torch.Tensor,
    places: dict[LayerKind, Places],
    *,
    uncommitted: bool,
    then: torch.Tensor | None = None,
    capture: Collection[int] = (),
    own: torch.Tensor | None = None,
) -> Result:
    """Take rows [n, hidden] through all layers.

    places: where the rows stand, by kind of layer. uncommitted: recurrent layers record the rows of a session alone and
    do not advance; of several ones `places` says it of each.
    then: float32 [hidden], the weight of the norm behind the last layer. capture: indices into `layers.weights` of the
    layers whose output is wanted. own: the rows' inputs of each layer by per-layer embeddings, [layers, n, size].
    """
    captured = []
    some = next(iter(places.values()))
    ropes = {rope: rope_table(some, len(hidden), turned, hidden.dtype) for rope, turned in layers.rotations.items()}
    norms = [*(weights.input_norm for weights in layers.weights[1:]), then]
    firsts = [*(_first_matrix(weights) for weights in layers.weights[1:]), None]
    normed: Normed | Summed | None = begin(hidden, layers.weights[0].input_norm, layers.eps)
    for index, weights in enumerate(layers.weights):
        assert isinstance(normed, Normed)
        mlp = weights.mlp
        if weights.convolutions is not None:
            hidden, normed = _convolved(layers, index, normed, hidden, ropes, places[weights.kind], norms[index])
            continue
        mixed = _mix(layers, index, normed, ropes, places[weights.kind], uncommitted)
        bias = weights.mixer.out_bias if isinstance(weights.mixer, AttentionWeights) else None
        if weights.mixer_output_norm is not None:
            _, made = linear(mixed, weights.mixer.out, bias=bias, norm=weights.mixer_output_norm, eps=layers.eps)
            assert isinstance(made, Normed)
            if weights.per_layer is None:
                hidden, normed = _normed_feed_forward(
                    layers, index, made, hidden, norms[index], firsts[index], places[weights.kind]
                )
            else:
                assert own is not None
                hidden, _ = _normed_feed_forward(layers, index, made, hidden, None, None, places[weights.kind])
                hidden, normed = _enter(layers, index, hidden, own[index], norms[index], firsts[index])
            if index in capture:
                captured.append(hidden)
            continue
        # `have_layers` says which there are kernels for.
        assert isinstance(mlp, ExpertsWeights | MlpWeights)
        hidden, normed = linear(
            mixed,
            weights.mixer.out,
            bias=bias,
            residual=hidden,
            norm=weights.post_norm,
            eps=layers.eps,
            then=_gate_up(mlp),
        )
        assert isinstance(normed, Normed)
        if isinstance(mlp, ExpertsWeights):
            hidden, normed = experts.run(
                mlp, normed, hidden, norms[index], layers.eps, firsts[index], places=places[weights.kind]
            )
            if index in capture:
                captured.append(hidden)
            continue
        hidden, normed = linear(
            _gated(mlp, normed),
            mlp.down,
            residual=hidden,
            norm=norms[index],
            eps=layers.eps,
            then=firsts[index],
        )
        if index in capture:
            captured.append(hidden)
    assert not isinstance(normed, Summed)
    return Result(hidden, normed, captured)


def _gated(mlp: MlpWeights, normed: Normed) -> torch.Tensor | Normed | Summed:
    """Return what the second product of a dense part takes."""
    gelu = mlp.activation is Activation.GELU_TANH
    gated, summed = linear(normed, mlp.gate_up, paired=True, gelu=gelu, then=mlp.down)
    return gated if summed is None else summed


def _normed_feed_forward(
    layers: Layers,
    index: int,
    made: Normed,
    hidden: torch.Tensor,
    then: torch.Tensor | None,
    first: Weight | None,
    places: Places,
) -> tuple[torch.Tensor, Normed | None]:
    """Add what a mixer made of rows, and what the part behind it makes, each with a norm of its own. then: the weight
    of the norm behind the layer. first: what the rows are multiplied by behind that. places: where the rows stand."""
    weights, eps = layers.weights[index], layers.eps
    mlp, behind = weights.mlp, weights.mlp_output_norm
    # What the layer makes is scaled at its very end.
    scale = weights.output_scale if weights.per_layer is None else None
    if isinstance(mlp, ExpertsBesideWeights):
        norms, readers = (weights.post_norm, mlp.experts_norm), (mlp.dense.gate_up, experts.reads(mlp.experts))
        hidden, normed, beside = add_normed_for_two(made, hidden, norms, eps, then=readers)
        _, dense = linear(_gated(mlp.dense, normed), mlp.dense.down, norm=mlp.dense_output_norm, eps=mlp.eps)
        _, mixed = experts.run(
            mlp.experts, beside, None, mlp.experts_output_norm, mlp.eps, None, routed=hidden, places=places
        )
        assert isinstance(dense, Normed)
        assert mixed is not None
        assert behind is not None
        return add_both(dense, mixed, behind, hidden, then, eps, scale=scale, then=first)
    assert isinstance(mlp, MlpWeights)
    hidden, entered = add_normed(made, hidden, weights.post_norm, eps, then=mlp.gate_up)
    assert entered is not None
    _, left = linear(_gated(mlp, entered), mlp.down, norm=behind, eps=eps)
    assert isinstance(left, Normed)
    return add_normed(left, hidden, then, eps, scale=scale, then=first)


def _enter(
    layers: Layers,
    index: int,
    hidden: torch.Tensor,
    own: torch.Tensor,
    then: torch.Tensor | None,
    first: Weight | None,
) -> tuple[torch.Tensor, Normed | None]:
    """Add what the rows' own inputs of a layer [n, size] become. then, first: as of `_normed_feed_forward`."""
    weights = layers.weights[index]
    inner = weights.per_layer
    assert inner is not None
    gelu = inner.activation is Activation.GELU_TANH
    gates, summed = linear(hidden, inner.gate, residual=own, gates_residual=True, gelu=gelu, then=inner.out)
    _, made = linear(gates if summed is None else summed, inner.out, norm=inner.norm, eps=layers.eps)
    assert isinstance(made, Normed)
    return add_normed(made, hidden, then, layers.eps, scale=weights.output_scale, then=first)


def _convolved(
    layers: Layers,
    index: int,
    normed: Normed,
    hidden: torch.Tensor,
    ropes: Mapping[Rope, tuple[torch.Tensor, torch.Tensor]],
    places: Places,
    then: torch.Tensor | None,
) -> tuple[torch.Tensor, Normed | None]:
    """Take rows through a layer with attention and SwiGLU whose sublayers stand between convolutions; 15 launches."""
    weights = layers.weights[index]
    mixer, mlp, around = weights.mixer, weights.mlp, weights.convolutions
    assert isinstance(mixer, AttentionWeights)
    assert isinstance(mlp, MlpWeights)
    assert around is not None
    added, _ = linear(normed, around.attention.projection)
    x = convolve(normed, added, around.attention.base, 0, places)
    made, _ = linear(_mix(layers, index, x, ropes, places, uncommitted=False), mixer.out, bias=mixer.out_bias)
    hidden = convolve(made, added, around.attention.base, 1, places, hidden)
    normed = begin(hidden, weights.post_norm, layers.eps)
    added, _ = linear(normed, around.mlp.projection)
    gated, _ = linear(convolve(normed, added, around.mlp.base, 0, places), mlp.gate_up, paired=True)
    made, _ = linear(gated, mlp.down)
    hidden = convolve(made, added, around.mlp.base, 1, places, hidden)
    return hidden, None if then is None else begin(hidden, then, layers.eps)


def _first_matrix(weights: DecoderWeights) -> Weight:
    """Return what the rows that enter a layer are multiplied by."""
    return weights.mixer.qkv if isinstance(weights.mixer, AttentionWeights) else weights.mixer.projection


def _gate_up(mlp: MlpWeights | ExpertsWeights) -> Weight | None:
    """Return what rows that enter a layer's feed-forward part are multiplied by, as of `then` in `linear`."""
    return mlp.gate_up if isinstance(mlp, MlpWeights) else experts.reads(mlp)


def _mix(
    layers: Layers,
    index: int,
    normed: Normed | torch.Tensor,
    ropes: Mapping[Rope, tuple[torch.Tensor, torch.Tensor]],
    places: Places,
    uncommitted: bool,
) -> torch.Tensor | Summed:
    """Return what the mixer of a layer makes of its rows, before its last product, with the sums that this wants.

    index: the layer's in `layers`.
    """
    mixer, slot = layers.weights[index].mixer, layers.slots[index]
    shape, delta = layers.heads[index], layers.delta
    rows = len(normed.scaled if isinstance(normed, Normed) else normed)
    if isinstance(mixer, AttentionWeights):
        assert shape is not None
        sums = sums_for(mixer.out, (rows, mixer.out.columns), shape.dim)
        heads = Heads(shape, mixer.qk_norm, *ropes[mixer.shape.rope], places, slot)
        if shape.dim > WIDEST_TILE:
            projected, _ = linear(normed, mixer.qkv, bias=mixer.qkv_bias)
            queries = finish_apart(heads, projected, layers.eps)
        else:
            queries, _ = linear(normed, mixer.qkv, bias=mixer.qkv_bias, heads=heads, eps=layers.eps)
        head_gates = None if mixer.head_gates is None else linear(normed, mixer.head_gates)[0]
        mixed = attend(shape, queries, places, slot, layers.longest, mixer.sinks, head_gates, sums)
    else:
        assert delta is not None
        sums = sums_for(mixer.out, (rows, mixer.out.columns), delta.value_dim)
        projected, _ = linear(normed, mixer.projection)
        mixed = deltanet.run(
            delta,
            projected,
            mixer.taps,
            mixer.decay_rate,
            mixer.dt_bias,
            mixer.norm,
            places,
            slot,
            layers.eps,
            uncommitted=uncommitted,
            column_sums=sums,
        )
    return mixed if sums is None else Summed(mixed, sums)
