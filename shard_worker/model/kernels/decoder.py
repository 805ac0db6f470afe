"""Decoder layers with kernels: what `layers.decoder` does, for a few rows whose position is data on the device.

Six launches a layer with attention, seven one with a recurrent mixer, one more where there are experts. Every product
also does what lies between it and the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from services.model.config import LayerKind
from shard_worker.model.kernels import deltanet, experts
from shard_worker.model.kernels.attention import attend, rope_table
from shard_worker.model.kernels.heads import Heads, HeadShape
from shard_worker.model.kernels.matmul import Normed, Summed, begin, linear
from shard_worker.model.kernels.step_parameters import Places
from shard_worker.model.layer_weights import AttentionWeights, DecoderWeights, ExpertsWeights, MlpWeights
from shard_worker.ops.rope import Rotation
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers in order, each with its slot in the caches of its kind.

    heads: the shape of each kind of attention layer. delta: that of recurrent layers, None where there are none.
    longest: positions that any session may have. rotation: RoPE's. eps: of all norms.
    """

    weights: Sequence[DecoderWeights]
    slots: Sequence[int]
    heads: dict[LayerKind, HeadShape]
    delta: deltanet.Shape | None
    longest: int
    rotation: Rotation
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
) -> Result:
    """Take rows [n, hidden] through all layers.

    places: where the rows stand, by kind of layer. uncommitted: recurrent layers record the rows and do not advance.
    then: float32 [hidden], the weight of the norm behind the last layer. capture: indices into `layers.weights` of the
    layers whose output is wanted.
    """
    captured = []
    rope = rope_table(next(iter(places.values())), len(hidden), layers.rotation, hidden.dtype)
    norms = [*(weights.input_norm for weights in layers.weights[1:]), then]
    firsts = [*(_first_matrix(weights) for weights in layers.weights[1:]), None]
    normed: Normed | Summed | None = begin(hidden, layers.weights[0].input_norm, layers.eps)
    for index, (weights, slot) in enumerate(zip(layers.weights, layers.slots, strict=True)):
        assert isinstance(normed, Normed)
        mlp = weights.mlp
        # `have_layers` says which there are kernels for.
        assert isinstance(mlp, ExpertsWeights | MlpWeights)
        mixed = _mix(layers, weights, slot, normed, rope, places[weights.kind], uncommitted)
        bias = weights.mixer.out_bias if isinstance(weights.mixer, AttentionWeights) else None
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
            hidden, normed = experts.run(mlp, normed, hidden, norms[index], layers.eps, firsts[index])
            if index in capture:
                captured.append(hidden)
            continue
        gated, summed = linear(normed, mlp.gate_up, paired=True, then=mlp.down)
        hidden, normed = linear(
            gated if summed is None else summed,
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


def _first_matrix(weights: DecoderWeights) -> Weight:
    """Return what the rows that enter a layer are multiplied by."""
    return weights.mixer.qkv if isinstance(weights.mixer, AttentionWeights) else weights.mixer.projection


def _gate_up(mlp: MlpWeights | ExpertsWeights) -> Weight | None:
    """Return what all rows of a layer's feed-forward part are multiplied by first; None where a router alone is it."""
    of_all = mlp if isinstance(mlp, MlpWeights) else mlp.shared
    return None if of_all is None else of_all.gate_up


def _mix(
    layers: Layers,
    weights: DecoderWeights,
    slot: int,
    normed: Normed,
    rope: tuple[torch.Tensor, torch.Tensor],
    places: Places,
    uncommitted: bool,
) -> torch.Tensor:
    mixer = weights.mixer
    if isinstance(mixer, AttentionWeights):
        shape = layers.heads[weights.kind]
        heads = Heads(shape, mixer.qk_norm, *rope, places, slot)
        queries, _ = linear(normed, mixer.qkv, bias=mixer.qkv_bias, heads=heads, eps=layers.eps)
        return attend(shape, queries, places, slot, layers.longest, mixer.sinks)
    assert layers.delta is not None
    projected, _ = linear(normed, mixer.projection)
    return deltanet.run(
        layers.delta,
        projected,
        mixer.taps,
        mixer.decay_rate,
        mixer.dt_bias,
        mixer.norm,
        places,
        slot,
        layers.eps,
        uncommitted=uncommitted,
    )
