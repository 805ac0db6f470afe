"""The weights of one decoder layer as its sublayers and kernels take them: fused, converted, on their device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

import torch

from services.model.config import Activation, AttentionShape, ClampedSwiGlu, LayerKind, ModelConfig, SigmoidRouting
from shard_worker.weights.weight import DenseWeight, Weight

T = TypeVar("T")


class LoadedWhenAsked(Mapping[str, T]):
    """Tensors that are loaded whenever they are asked for. names: theirs. load: loads the one of a name."""

    def __init__(self, names: Collection[str], load: Callable[[str], T]) -> None:
        self._names, self._load = frozenset(names), load

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer's tensors on their device, by the names of `services.model.layers.layer_shapes`.

    matrices: those that rows are multiplied by. vectors: all others, the convolution's taps included. Each is asked for
    once, and may be loaded then, so that what is made of one is there before the next. experts_in_host: as of
    `ExpertsWeights`; the tensors of these are in the host's memory.
    """

    matrices: Mapping[str, Weight]
    vectors: Mapping[str, torch.Tensor]
    experts_in_host: int = 0

    @classmethod
    def of(cls, loaded: Mapping[str, Weight | torch.Tensor]) -> LayerTensors:
        """Return them sorted by what they are; matrices may be given as dense tensors."""
        matrices: dict[str, Weight] = {}
        vectors: dict[str, torch.Tensor] = {}
        for name, tensor in loaded.items():
            if isinstance(tensor, Weight):
                matrices[name] = tensor
            elif tensor.dim() == 2:
                matrices[name] = DenseWeight(tensor)
            else:
                vectors[name] = tensor
        return cls(matrices, vectors)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of an attention mixer.

    shape: how it attends. qkv: the rows of [queries | keys | values | gates], each head after head; gates only where
    attention is gated. qkv_bias: in the same order. qk_norm: float32 [heads + kv_heads, head_dim], so that queries and
    keys are normed in one call; None where they have no norms. out: [hidden, heads * head_dim]. sinks: float32 [heads],
    of each head's softmax; None where there are none. value_norm: float32 [head_dim], ones, where values have a norm.
    shares: whether keys and values are another layer's, so that there are rows of queries alone.
    head_gates: [heads or heads * head_dim, hidden], of what the output is multiplied by the softplus; None for nothing.
    """

    shape: AttentionShape
    qkv: Weight
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: Weight
    out_bias: torch.Tensor | None
    gated: bool
    sinks: torch.Tensor | None = None
    head_gates: Weight | None = None
    value_norm: torch.Tensor | None = None
    shares: bool = False


@dataclass(frozen=True, slots=True)
class LinearAttentionWeights:
    """The weights of a Gated DeltaNet mixer. All vectors are float32.

    projection: the rows of [q, k, v | z | b | a]: inputs of the convolution, gates, betas, decays. taps: [t, channels].
    qk_scale: [2 * key_heads, 1], what makes an RMSNorm of a key an L2 norm, with the query's 1/sqrt(dim) on top.
    decay_rate: `-exp(A_log)`, [value_heads]. dt_bias: [value_heads]. norm: [value_head_dim], of the gated norm. out:
    [hidden, value_dim].
    """

    projection: Weight
    taps: torch.Tensor
    qk_scale: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: Weight


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The weights of SwiGLU, or of the same with another activation of gates. gate_up: [2 * mlp, hidden], gate rows
    first. down: [hidden, mlp]. Their biases, if any: of their rows.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: Activation | ClampedSwiGlu = Activation.SILU


@dataclass(frozen=True, slots=True)
class ExpertsTogether:
    """The matrices of a mixture as kernels take them: one of all experts, in the order of their numbers.

    scores: float32 [experts, hidden], the router's, or one row more, the shared expert's gate. gate_up: [experts * 2 *
    size, hidden], gate rows first in each expert. down: [experts * hidden, size]. Packed ones have as many rows as
    `Weight.room_for` makes. gate_up_bias, down_bias: [experts * 2 * size] and [experts * hidden], None for none.
    clamped: how all of them gate, None for plain SwiGLU or, where that is true of `gelu`, GeGLU.
    """

    scores: torch.Tensor
    gate_up: Weight
    down: Weight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    clamped: ClampedSwiGlu | None = None
    gelu: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The weights of a mixture of experts.

    router: float32 [experts, hidden]. experts: each one's, views of `together` where that is there. chosen: how many of
    them a row goes through. normalised: whether the shares of the chosen ones are made to sum up to 1. shared,
    shared_gate: of the expert that all rows go through, and [1, hidden], how much of it they take; None without one.
    together: None for matrices of unlike forms, and where a CPU multiplies by any of them. router_bias:
    float32 [experts], None where there are none. scales: float32 [experts], what each one's share is multiplied by;
    None for nothing. sigmoid, choice_bias: how the router chooses, and its biases, float32 [experts], None for the
    largest shares of a softmax. in_host: how many of the experts, the first ones, are in the host's memory, where a GPU
    has all else: rows go through them on the CPU.
    """

    router: Weight
    experts: tuple[MlpWeights, ...]
    chosen: int
    normalised: bool
    shared: MlpWeights | None = None
    shared_gate: Weight | None = None
    together: ExpertsTogether | None = None
    router_bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    sigmoid: SigmoidRouting | None = None
    choice_bias: torch.Tensor | None = None
    in_host: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsBesideWeights:
    """The weights of a mixture of experts beside a dense part. All vectors are float32, [hidden] unless said.

    router_norm, experts_norm: of the norms of rows on their way to the router and to the experts. dense_output_norm,
    experts_output_norm: of the norms behind each part. eps: of all norms. The scores of `experts.together` have the
    router's norm in them.
    """

    dense: MlpWeights
    experts: ExpertsWeights
    router_norm: torch.Tensor
    experts_norm: torch.Tensor
    dense_output_norm: torch.Tensor
    experts_output_norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """What takes a token's own input of a layer into the residual stream. gate: [size, hidden]. out: [hidden, size].
    norm: float32 [hidden], of what it makes. activation: of the gate."""

    gate: Weight
    out: Weight
    norm: torch.Tensor
    activation: Activation


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """Two convolutions over the rows of a block, before a sublayer and behind it.

    base: float32 [2, taps, hidden], of both; tap t is for the row that stands t rows before. projection: [2 * taps *
    groups, hidden], which makes of the sublayer's input what is added to them, alike for the elements of a group.
    """

    base: torch.Tensor
    projection: Weight


@dataclass(frozen=True, slots=True)
class SublayerConvolutions:
    """What surrounds the two sublayers of a layer."""

    attention: BlockConvolution
    mlp: BlockConvolution


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of one layer. input_norm, post_norm: float32 [hidden], before the mixer and before the MLP.

    feed_forward: what the MLP is, as of `ModelConfig.feed_forward`. mixer_output_norm, mlp_output_norm: float32
    [hidden], behind them, before what they made is added; None without such norms. output_scale: [1], what the layer's
    output is multiplied by; None for nothing. per_layer: None without per-layer embeddings. convolutions: of a
    draft's layer over its blocks, None for none.
    """

    kind: LayerKind
    input_norm: torch.Tensor
    mixer: AttentionWeights | LinearAttentionWeights
    post_norm: torch.Tensor
    mlp: MlpWeights | ExpertsWeights | ExpertsBesideWeights
    feed_forward: str = "swiglu"
    mixer_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None
    output_scale: torch.Tensor | None = None
    per_layer: PerLayerWeights | None = None
    convolutions: SublayerConvolutions | None = None


def matrices_of(weights: DecoderWeights) -> list[Weight]:
    """Return all matrices of a layer."""
    parts = (weights.mixer, weights.mlp, weights.per_layer, weights.convolutions)
    return [matrix for part in parts for matrix in _matrices(part)]


def _matrices(part: object) -> Iterator[Weight]:
    if isinstance(part, Weight):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from _matrices(one)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _matrices(getattr(part, field.name))


def norm_factor(config: ModelConfig, stored: torch.Tensor) -> torch.Tensor:
    """Return what an RMSNorm multiplies by, float32, from its stored weight: the family may store it less 1."""
    return stored.float() + config.norm_offset if config.norm_offset else stored.float()
