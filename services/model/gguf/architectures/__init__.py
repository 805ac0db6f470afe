"""Architectures of GGUF, one file each, named as `general.architecture` has them and found by that name; - is _ there.

A module reads the configuration out of the metadata, in the words of Hugging Face's config.json, and says under which
names a checkpoint has the tensors, and what llama.cpp's converter changed of them.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

from services.errors import InvalidArgument
from services.model.gguf.container import GgufFile, GgufTensor
from services.model.gguf.metadata import ARCHITECTURE, Metadata
from services.model.gguf.tensors import StoredTensor
from services.model.stored_experts import experts_apart
from services.model.tensor_headers import TensorHeader

_SCALED = "NVFP4"
"""The type whose matrices may have a scale in a tensor of its own."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


class Architecture(Protocol):
    """What a module of this package offers."""

    def read_config(self, metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
        """Return the configuration. tensors: by their names in the file.

        Raises InvalidArgument and Unimplemented naming the key that cannot be served.
        """

    def tensor_names(self) -> Mapping[str, str]:
        """Return the names of a layer's tensors behind `model.layers.N.` by those behind `blk.N.` in the file; for
        those that end alike, in .weight or .bias, without that end."""

    def stored_tensor(self, name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> StoredTensor:
        """Return a tensor with what was changed of it. name: the checkpoint's, without `model.layers.N.`."""


def known_architectures() -> list[str]:
    """Return the names of all architectures, sorted."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def read_config(file: GgufFile) -> dict[str, Any]:
    """Return the configuration of a model, as its config.json would have it.

    Raises Unimplemented, listing the known ones, for an unknown architecture, and what its module raises.
    """
    metadata = Metadata(file)
    return _module(metadata).read_config(metadata, file.tensors)


def stored_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Return the tensors of a model by the names of Hugging Face's checkpoints. Raises as `read_config`.

    Layers behind the model's own, which guess further tokens, are left out; a tensor whose name is unknown keeps it.
    Experts that are held all together are one matrix each.
    """
    metadata = Metadata(file)
    module = _module(metadata)
    config, names = module.read_config(metadata, file.tensors), module.tensor_names()
    found: dict[str, StoredTensor] = {}
    for stored, tensor in file.tensors.items():
        block, scale = _BLOCK.fullmatch(stored), _scale(tensor, file.tensors)
        if _is_of_packed(stored, file.tensors):
            continue
        if block is None:
            name = _ENDS.get(stored, stored)
            found[name] = replace(module.stored_tensor(name, tensor, config), scale=scale)
        elif int(block[1]) < config["num_hidden_layers"]:
            stem, dot, end = block[2].rpartition(".")
            leaf = names.get(block[2]) or names.get(stem, stem) + dot + end
            own = replace(module.stored_tensor(leaf, tensor, config), scale=scale)
            found[f"model.layers.{int(block[1])}.{leaf}"] = own
    together = {name: TensorHeader(stored.tensor.type.name, stored.shape) for name, stored in found.items()}
    headers, parts = experts_apart(together)
    experts = {name: found[part.stored].of_expert(part) for name, part in parts.items()}
    return {name: experts.get(name) or found[name] for name in headers}


def _is_of_packed(name: str, tensors: Mapping[str, GgufTensor]) -> bool:
    """Return whether a tensor belongs to a matrix of NVFP4: its scale, or the one that activations would have."""
    stem, _, end = name.rpartition(".")
    weight = tensors.get(f"{stem}.weight")
    return end in ("scale", "input_scale") and weight is not None and weight.type.name == _SCALED


def _scale(tensor: GgufTensor, tensors: Mapping[str, GgufTensor]) -> GgufTensor | None:
    """Return the scale of a whole matrix, or those of all experts' matrices, if it has any.

    Raises InvalidArgument for one of another type, or of another number of them.
    """
    scale = tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
    if scale is None or tensor.type.name != _SCALED:
        return None
    count = tensor.shape[0] if len(tensor.shape) == 3 else 1
    if scale.type.name != "F32" or math.prod(scale.shape) != count:
        raise InvalidArgument(
            f"tensor {scale.name} in {scale.path} is {scale.type.name} {list(scale.shape)}; it must be F32 [{count}], "
            f"a number for each matrix of {tensor.name}",
            field=scale.name,
        )
    return scale


def _module(metadata: Metadata) -> Architecture:
    if metadata.architecture not in known_architectures():
        raise metadata.unsupported(ARCHITECTURE, f"known architectures are {', '.join(known_architectures())}")
    return cast(Architecture, importlib.import_module(f"{__name__}.{metadata.architecture.replace('-', '_')}"))
