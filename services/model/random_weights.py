"""Checkpoints of which there is a config.json alone, whose tensors are random: which those are, dense or packed.

They serve to measure shapes whose weights are not at hand. A worker makes the tensors by this, and the planner counts
by the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.errors import InvalidArgument
from services.model import checkpoint_files
from services.model.config import named_dtype
from services.model.drafts import draft_format, draft_kind
from services.model.drafts.dflash import TOKEN_OFFSETS
from services.model.families import read_model_config
from services.model.gguf.blocks import BLOCK_TYPES, BlockType
from services.model.quantization import Quantization, QuantizedTo
from services.model.safetensors_header import DTYPE_CODES
from services.model.stored_experts import is_of_expert
from services.model.target_tensors import target_shapes
from services.model.tensor_headers import PackedMatrix, TensorHeader

KEY = "random_weights"
"""The key of config.json that asks for random weights in place of files, where it is true."""

PACKING = "random_packing"
"""The key of config.json that says what such a target's matrices are packed in, one of PACKINGS; without it in none."""

Q4_K_M = "q4_k_m"
"""The mix of files of that name: Q6_K for the head, half of `down_proj` and half of `v_proj`, else Q4_K."""

MXFP4_EXPERTS = "mxfp4_experts"
"""What gpt-oss is published in: MXFP4 for routed experts alone."""

PACKINGS = (Q4_K_M, "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "iq4_xs")
"""Types of GGUF, and mixes of them, for shapes of any family."""

_TYPES: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in BLOCK_TYPES.values()}
_PACKED_AS_USUAL = Quantization(QuantizedTo.INT8, ends=True)


def is_random(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json asks for random weights."""
    return config.get(KEY) is True


def read_headers(directory: Path, config: Mapping[str, Any], field: str) -> dict[str, TensorHeader]:
    """Return the headers of a checkpoint's tensors as `checkpoint_files.read_headers` does, of random ones too.

    Raises what that and `random_headers` raise.
    """
    if is_random(config):
        return random_headers(config)
    return checkpoint_files.read_headers(directory, config, field)


def random_headers(config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """Return the headers of the tensors that a target's or a draft's config.json asks for.

    Raises InvalidArgument and Unimplemented as reading the configuration does, and InvalidArgument for an unknown
    packing.
    """
    code = DTYPE_CODES[named_dtype(config) or "bfloat16"]
    kind = draft_kind(config)
    if kind is not None:
        format_ = draft_format(kind)
        draft = format_.read_config(config)
        headers = {name: TensorHeader(code, shape) for name, shape in format_.tensor_shapes(draft).items()}
        if draft.draft_vocab_size is not None:
            headers[TOKEN_OFFSETS] = TensorHeader("I64", (draft.draft_vocab_size,))
        return headers
    model = read_model_config(config)
    dense = {name: TensorHeader(code, shape) for name, shape in target_shapes(model).items()}
    packing = config.get(PACKING)
    if packing is None:
        return dense
    known = (*PACKINGS, MXFP4_EXPERTS)
    if packing not in known:
        raise InvalidArgument(
            f"config.json: {PACKING} {packing!r} is unknown: it must be one of {', '.join(known)}", field=PACKING
        )
    taken = _PACKED_AS_USUAL.headers(dense, Path(), PACKING)

    def is_packed(name: str) -> bool:
        return taken[name].packed is not None and (packing != MXFP4_EXPERTS or is_of_expert(name))

    return {
        name: header if not is_packed(name) else _packed(name, header, packing, tied=model.tied_head)
        for name, header in dense.items()
    }


def _packed(name: str, header: TensorHeader, packing: str, *, tied: bool) -> TensorHeader:
    kind = _TYPES[_type_of(name, packing, tied=tied)]
    rows, columns = header.shape
    if columns % kind.values:
        # As llama.cpp does where a row is not whole blocks.
        kind = _TYPES["q8_0"]
    assert kind.held is not None
    packed = PackedMatrix(
        kind.name,
        bits=kind.held_bits(columns),
        group=kind.held.group,
        stored_bytes=rows * kind.row_bytes(columns),
        loaded_bytes=rows * kind.held_row_bytes(columns),
        cpu_bits=kind.cpu_bits(columns),
    )
    return TensorHeader(kind.name, header.shape, packed)


def _type_of(name: str, packing: str, *, tied: bool) -> str:
    """Return the type of a matrix, in lower case. tied: whether the embedding is lm_head."""
    if packing == MXFP4_EXPERTS:
        return "mxfp4"
    if packing != Q4_K_M:
        return packing
    if name.endswith("lm_head.weight") or (tied and name.endswith("embed_tokens.weight")):
        return "q6_k"
    halved = name.endswith(("v_proj.weight", "down_proj.weight"))
    return "q6_k" if halved and int(name.split(".layers.")[1].split(".")[0]) % 2 else "q4_k"
