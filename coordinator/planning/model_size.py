"""What a target takes on a device: bytes of weights and of a session's caches, layer by layer.

Read from the checkpoint's config.json and its tensors' headers, as a worker reads them: the figures are those of what a
worker allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.dtypes import ITEM_BYTES
from services.layers import LayerRange
from services.model.cached_tensors import Per, held_positions
from services.model.checkpoint_files import model_name, read_config
from services.model.config import ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_caches, read_share
from services.model.quantization import OPTIONS, Quantization
from services.model.random_weights import read_headers
from services.model.rope import with_rope_scaling
from services.model.stored_experts import experts_in_host, is_of_expert
from services.model.target_tensors import TargetTensors, cpu_bytes, loaded_bytes
from services.model.tensor_headers import TensorHeader


@dataclass(frozen=True, slots=True)
class LayerSize:
    """One layer. All in bytes, but for its kind in Hugging Face's words.

    cpu_bytes: the weights on a CPU, which unpacks some packed matrices. read_bytes: the matrices that a one-row step
    reads; of experts, those that the row goes through. token_bytes: what is cached of one position. window: of how many
    positions, None for all. state_bytes: what is cached whatever the length. block_row_bytes: what is cached for each
    row of the largest verify. expert_bytes, cpu_expert_bytes: of weight_bytes and cpu_bytes that of all routed experts.
    expert_read, cpu_expert_read: of these that of the experts that a row goes through.
    """

    kind: str
    weight_bytes: int
    cpu_bytes: int
    read_bytes: int
    token_bytes: int
    state_bytes: int
    block_row_bytes: int
    expert_bytes: int = 0
    cpu_expert_bytes: int = 0
    expert_read: int = 0
    cpu_expert_read: int = 0
    window: int | None = None

    def cache_bytes(self, length: int, block_rows: int) -> int:
        """Return the caches of one session of up to `length` tokens. block_rows: rows of its largest verify."""
        positions = held_positions(length, self.window, block_rows)
        return self.token_bytes * positions + self.state_bytes + self.block_row_bytes * block_rows

    def context_bytes(self, length: int) -> int:
        """Return what a step reads of the positions before it, of which there are so many."""
        return self.token_bytes * (length if self.window is None else min(length, self.window))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A target, in bytes at the element types that it is to be loaded with; hidden_size and vocab_size count elements.

    name: what it is called, by its path, whatever is at it. kv_dtype: the element type of attention keys and values.
    cpu_head_bytes: lm_head on a CPU. packed_head: whether lm_head is stored packed, and stays so in memory. last_cut:
    as of `ModelConfig`. experts: how many routed ones layers have, 0 for a dense model.
    """

    name: str = field(compare=False)
    dtype: str
    kv_dtype: str
    layers: tuple[LayerSize, ...]
    hidden_size: int
    vocab_size: int
    max_position: int
    embedding_bytes: int
    norm_bytes: int
    head_bytes: int
    cpu_head_bytes: int
    tied_head: bool
    packed_head: bool
    last_cut: int
    experts: int = 0

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of its weights and activations."""
        return ITEM_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Weights of the whole model on one device."""
        ends = self.embedding_bytes + self.norm_bytes + (0 if self.tied_head else self.head_bytes)
        return sum(layer.weight_bytes for layer in self.layers) + ends

    def draft_head_bytes(self, item_bytes: int, *, on_cpu: bool = False) -> int:
        """Return what lm_head takes in the worker of a draft. item_bytes: those of an element of the draft."""
        if not self.packed_head or (on_cpu and item_bytes != self.item_bytes):
            return self.vocab_size * self.hidden_size * item_bytes
        return self.cpu_head_bytes if on_cpu else self.head_bytes

    def in_host(self, share: float) -> float:
        """Return which share of each layer's experts a GPU leaves to the host: a whole number of experts, near to the
        share that is asked for."""
        return experts_in_host(self.experts, share) / self.experts if self.experts else 0.0

    def left_bytes(self, layers: LayerRange, host_experts: float) -> tuple[int, int]:
        """Return the bytes of experts that a GPU leaves to the host, as they would be there and as they are here.

        host_experts: as of `StagePlan`.
        """
        share, held = self.in_host(host_experts), self.layers[layers.first : layers.last]
        return (
            sum(round(layer.expert_bytes * share) for layer in held),
            sum(round(layer.cpu_expert_bytes * share) for layer in held),
        )

    def layers_bytes(self, layers: LayerRange) -> int:
        """Return the weights of some layers, without embedding and head."""
        return sum(layer.weight_bytes for layer in self.layers[layers.first : layers.last])

    def cpu_layers_bytes(self, layers: LayerRange) -> int:
        """Return the same on a CPU."""
        return sum(layer.cpu_bytes for layer in self.layers[layers.first : layers.last])


def read_model_size(
    directory: Path,
    dtype: str | None,
    kv_dtype: str | None = None,
    field: str = "--model",
    quantization: Quantization | None = None,
    rope_scaling: str | None = None,
) -> ModelSize:
    """Read a target's sizes.

    dtype: what --dtype says, None for the checkpoint's own. kv_dtype: of keys and values, None for the weights'. field:
    the option that named the directory. quantization: how matrices are packed while they are loaded, None for as they
    are. rope_scaling: as of `with_rope_scaling`.

    Raises what reading its config.json, `read_headers` and `TargetTensors` raise.
    """
    raw = with_rope_scaling(read_config(directory, field), rope_scaling)
    config, headers = read_model_config(raw), read_headers(directory, raw, field)
    if quantization is not None:
        headers = quantization.headers(headers, directory, OPTIONS[field])
    tensors = TargetTensors(config, headers, directory)
    layers = [tensors.layer(layer) for layer in range(config.num_layers)]
    tensors.per_layer()
    tensors.check_first()
    tensors.check_last()
    dtype = dtype or tensors.dtype(0)
    kv_dtype = kv_dtype or dtype
    return ModelSize(
        name=model_name(directory),
        dtype=dtype,
        kv_dtype=kv_dtype,
        layers=tuple(
            _layer_size(config, layer, {name: headers[name] for name in names.values()}, dtype, kv_dtype)
            for layer, names in enumerate(layers)
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        embedding_bytes=loaded_bytes(tensors.embedding, headers[tensors.embedding], dtype),
        norm_bytes=loaded_bytes(tensors.norm, headers[tensors.norm], dtype),
        head_bytes=loaded_bytes(tensors.head, headers[tensors.head], dtype),
        cpu_head_bytes=cpu_bytes(tensors.head, headers[tensors.head], dtype),
        tied_head=config.tied_head,
        packed_head=headers[tensors.head].packed is not None,
        last_cut=config.last_cut,
        experts=0 if config.experts is None else config.experts.count,
    )


def _layer_size(
    config: ModelConfig, layer: int, headers: Mapping[str, TensorHeader], dtype: str, kv_dtype: str
) -> LayerSize:
    weights = {name: loaded_bytes(name, header, dtype) for name, header in headers.items()}
    # Its rows of the matrix that makes the layer's own inputs; their table stays in the mapped file.
    on_cpu = {name: cpu_bytes(name, header, dtype) for name, header in headers.items()}
    own = 0 if config.per_layer is None else config.per_layer.size * config.hidden_size * ITEM_BYTES[dtype]
    cached, caches = dict.fromkeys(Per, 0), layer_caches(config, layer)
    for tensor in caches:
        cached[tensor.per] += tensor.size_bytes(dtype, kv_dtype)
    return LayerSize(
        kind=config.layer_kinds[layer].value,
        weight_bytes=sum(weights.values()) + own,
        cpu_bytes=sum(on_cpu.values()) + own,
        read_bytes=own + _read(config, headers, weights),
        token_bytes=cached[Per.TOKEN],
        state_bytes=cached[Per.SESSION],
        block_row_bytes=cached[Per.BLOCK_ROW],
        expert_bytes=sum(_of_experts(weights).values()),
        cpu_expert_bytes=sum(_of_experts(on_cpu).values()),
        expert_read=_read(config, headers, _of_experts(weights)),
        cpu_expert_read=_read(config, headers, _of_experts(on_cpu)),
        window=next((tensor.window for tensor in caches if tensor.per is Per.TOKEN), None),
    )


def _of_experts(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if is_of_expert(name)}


def _read(config: ModelConfig, headers: Mapping[str, TensorHeader], sizes: Mapping[str, int]) -> int:
    """Return the bytes of matrices that a step of one row reads."""
    return round(sum(size * read_share(config, name) for name, size in sizes.items() if len(headers[name].shape) == 2))
