"""The tensors of a target's checkpoint: which there must be, under which names, and how they are held once loaded.

A worker loads a checkpoint by this, and the planner counts its bytes by the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from services.dtypes import ITEM_BYTES
from services.errors import InvalidArgument
from services.model.config import ModelConfig
from services.model.layers import Shapes, layer_shapes, sublayer_of
from services.model.stored_experts import ROUTERS, is_of_expert
from services.model.tensor_headers import TensorHeader

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""What the names of the decoder's tensors may begin with."""

HEAD = "lm_head.weight"

CPU_GROUPS, CPU_ROWS_MULTIPLE = (256, 128, 64, 32), 16
"""The groups of columns that torch's product with packed matrices on CPUs takes, and what divides their rows."""

_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def loaded_dtype(name: str, header: TensorHeader, dtype: str) -> str:
    """Return the element type that a dense tensor is loaded in: for matrices and biases of projections the model's.

    All other vectors (norms, decays and such) keep their stored type until they are widened to float32. Routers of
    experts are float32: a rounded score would send a row to another expert.
    """
    if name.endswith(ROUTERS):
        return "float32"
    return dtype if len(header.shape) > 1 or name.endswith("_proj.bias") else header.dtype(name)


def loaded_bytes(name: str, header: TensorHeader, dtype: str) -> int:
    """Return the bytes that a stored tensor takes in a model of this element type; a packed matrix stays packed.

    Raises Unimplemented for a stored type that weights cannot have.
    """
    if header.packed is not None:
        return header.packed.loaded_bytes
    header.dtype(name)
    return math.prod(header.shape) * ITEM_BYTES[loaded_dtype(name, header, dtype)]


def cpu_bytes(name: str, header: TensorHeader, dtype: str) -> int:
    """Return the bytes that a stored tensor takes on a CPU in the form that it multiplies by.

    x86 CPUs multiply bfloat16 by whole numbers of 4 bits with a scale and an offset, 4 bytes, for each group of 32 to
    256 columns; those of 8 bits are twice 4. Everything else that is packed is unpacked to the model's element type,
    but for routed experts, which stay packed.

    Raises as `loaded_bytes`.
    """
    packed = header.packed
    if packed is None:
        return loaded_bytes(name, header, dtype)
    *extents, columns = header.shape
    rows = math.prod(extents)
    group = next((size for size in CPU_GROUPS if columns % size == 0 and packed.group % size == 0), None)
    if packed.cpu_bits is None or group is None or dtype != "bfloat16" or rows % CPU_ROWS_MULTIPLE:
        if is_of_expert(name):
            return packed.loaded_bytes
        return rows * columns * ITEM_BYTES[dtype]
    fours = packed.cpu_bits // 4
    return rows * fours * (columns // 2 + columns // group * 4)


def target_shapes(config: ModelConfig) -> Shapes:
    """Return all tensors of a target's checkpoint by their usual full names."""
    matrix = (config.vocab_size, config.hidden_size)
    return {
        **{
            f"model.layers.{layer}.{name}": shape
            for layer in range(config.num_layers)
            for name, shape in layer_shapes(config, layer).items()
        },
        "model.embed_tokens.weight": matrix,
        **{f"model.{name}": shape for name, shape in per_layer_shapes(config).items()},
        **({} if config.tied_head else {HEAD: matrix}),
        "model.norm.weight": (config.hidden_size,),
    }


PER_LAYER_TABLE = "embed_tokens_per_layer.weight"
PER_LAYER_PROJECTION = "per_layer_model_projection.weight"
PER_LAYER_PROJECTION_NORM = "per_layer_projection_norm.weight"
"""What per-layer embeddings are made of: of which each stage takes its own layers' part."""


def per_layer_shapes(config: ModelConfig) -> Shapes:
    """Return the tensors that per-layer embeddings are made of, by their names behind the decoder's prefix."""
    if config.per_layer is None:
        return {}
    size, layers = config.per_layer.size, config.num_layers
    return {
        PER_LAYER_TABLE: (config.per_layer.vocab_size, layers * size),
        PER_LAYER_PROJECTION: (layers * size, config.hidden_size),
        PER_LAYER_PROJECTION_NORM: (size,),
    }


class TargetTensors:
    """The full names of a target's tensors in one checkpoint, each checked before its name is given out.

    embedding, norm, head: names of the embedding, of the final norm and of lm_head, which may be the embedding;
    `check_first` and `check_last` check them.
    """

    def __init__(self, config: ModelConfig, headers: Mapping[str, TensorHeader], directory: Path) -> None:
        """directory: named in errors. Raises InvalidArgument for a checkpoint without any decoder layer."""
        self._config, self._headers, self._directory = config, headers, directory
        self._prefix = self._find_prefix()
        self.embedding = self._prefix + "embed_tokens.weight"
        self.norm = self._prefix + "norm.weight"
        self.head = self.embedding if config.tied_head else HEAD

    def layer(self, layer: int) -> dict[str, str]:
        """Return the full names of a layer's tensors by those of `layer_shapes`.

        Raises InvalidArgument for a missing, unknown or mis-shaped tensor, Unimplemented for an element type that is
        not served.
        """
        start = f"{self._prefix}layers.{layer}."
        shapes = layer_shapes(self._config, layer)
        # Files have the tensors of a layer that shares keys and values too.
        unread = layer_shapes(self._config, self._config.keys_of(layer))
        for name, shape in shapes.items():
            self._check(start + name, shape)
        for name in self._headers:
            short = name.removeprefix(start)
            if name.startswith(start) and short not in shapes | unread and not _IGNORED.search(name):
                raise InvalidArgument(
                    f"tensor {name} is not one that family {self._config.family} has: the checkpoint is of another "
                    "family, or packed in another way than quantization_config in its config.json says",
                    field=name,
                )
        return {name: start + name for name in shapes}

    def per_layer(self) -> dict[str, str]:
        """Return the full names of the tensors of `per_layer_shapes`. Raises as `layer`."""
        shapes = per_layer_shapes(self._config)
        for name, shape in shapes.items():
            self._check(self._prefix + name, shape)
        if shapes:
            self.check_first()
        return {name: self._prefix + name for name in shapes}

    def check_first(self) -> None:
        """Check what the first stage has beside its layers. Raises as `layer`."""
        self._check(self.embedding, (self._config.vocab_size, self._config.hidden_size))

    def check_last(self) -> None:
        """Check what the last stage has beside its layers. Raises as `layer`."""
        self._check(self.head, (self._config.vocab_size, self._config.hidden_size))
        self._check(self.norm, (self._config.hidden_size,))

    def dtype(self, layer: int) -> str:
        """Return the element type that a model keeps unless told otherwise: that of a layer's matrices as stored.

        Where any matrix is packed it is what the configuration names, else that of the layer's first norm.
        """
        feed_forward = sublayer_of(self._config.feed_forward(layer))
        name = f"{self._prefix}layers.{layer}.{next(iter(feed_forward.tensor_shapes(self._config, layer)))}"
        if any(header.packed is not None for header in self._headers.values()):
            if self._config.dtype is not None:
                return self._config.dtype
            name = f"{self._prefix}layers.{layer}.input_layernorm.weight"
        return self._headers[name].dtype(name)

    def _find_prefix(self) -> str:
        for prefix in PREFIXES:
            if any(name.startswith(f"{prefix}layers.") for name in self._headers):
                return prefix
        raise InvalidArgument(f"{self._directory} has no tensor named model.layers.* or model.language_model.layers.*")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        header = self._headers.get(name)
        if header is None:
            raise InvalidArgument(f"tensor {name} is missing in {self._directory}", reason="TENSOR_MISSING", field=name)
        header.check_served(name, matrix=len(shape) == 2)
        if header.shape != shape:
            raise InvalidArgument(
                f"tensor {name} has shape {list(header.shape)}, config.json asks for {list(shape)}",
                reason="TENSOR_SHAPE",
                field=name,
            )
