"""Architectures of GGUF, one file each, named as `general.architecture` has them and found by that name.

A module reads the configuration out of the metadata, in the words of Hugging Face's config.json, and says under which
names a checkpoint has the tensors, and what llama.cpp's converter changed of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from typing import Any, Protocol, cast

from services.model.gguf.container import GgufFile, GgufTensor
from services.model.gguf.metadata import ARCHITECTURE, Metadata
from services.model.gguf.tensors import StoredTensor
from services.model.stored_experts import experts_apart
from services.model.tensor_headers import TensorHeader

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


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
        block = _BLOCK.fullmatch(stored)
        if block is None:
            name = _ENDS.get(stored, stored)
            found[name] = module.stored_tensor(name, tensor, config)
        elif int(block[1]) < config["num_hidden_layers"]:
            stem, dot, end = block[2].rpartition(".")
            leaf = names.get(block[2]) or names.get(stem, stem) + dot + end
            found[f"model.layers.{int(block[1])}.{leaf}"] = module.stored_tensor(leaf, tensor, config)
    together = {name: TensorHeader(stored.tensor.type.name, stored.shape) for name, stored in found.items()}
    headers, parts = experts_apart(together)
    experts = {name: found[part.stored].of_expert(part) for name, part in parts.items()}
    return {name: experts.get(name) or found[name] for name in headers}


def _module(metadata: Metadata) -> Architecture:
    if metadata.architecture not in known_architectures():
        raise metadata.unsupported(ARCHITECTURE, f"known architectures are {', '.join(known_architectures())}")
    return cast(Architecture, importlib.import_module(f"{__name__}.{metadata.architecture}"))
