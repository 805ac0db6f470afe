"""Llama, and Mistral without a window: the converter interleaves the rows of queries and keys, and resolves how RoPE is
scaled into a divisor of each frequency, which `rope_freqs.weight` holds.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from services.errors import DataLoss
from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import DECODER_NAMES, decoder_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import InterleavedHalves, StoredTensor

DIVISORS = "rope_freqs.weight"
"""The name of what each frequency of RoPE is divided by, where files have that."""


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    config = decoder_config(metadata, tensors)
    if DIVISORS in tensors:
        divisors = {"rope_type": "divided", "divisors": read_numbers(tensors[DIVISORS])}
        config["rope_parameters"] = config["rope_parameters"] | divisors
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return DECODER_NAMES | {"ffn_norm": "post_attention_layernorm"}


def stored_tensor(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor with what was changed of it."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stem = name.removeprefix("self_attn.").partition(".")[0]
    if stem not in heads:
        return StoredTensor(tensor, tensor.shape)
    return StoredTensor(tensor, tensor.shape, rows=InterleavedHalves(heads[stem], config["head_dim"]))


def read_numbers(tensor: GgufTensor) -> list[float]:
    """Return the numbers of a vector of float32. Raises DataLoss for a file that ends before, or another type."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        content = file.read(tensor.nbytes)
    if tensor.type.name != "F32" or len(content) != tensor.nbytes:
        raise DataLoss(f"tensor {tensor.name} in {tensor.path} must be a whole vector of F32", field=tensor.name)
    return list(struct.unpack(f"<{len(content) // 4}f", content))
