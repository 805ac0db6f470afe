"""What a GGUF file says about text, as the files that a Hugging Face checkpoint has for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.model.gguf.architectures import read_config
from services.model.gguf.container import read_gguf
from services.model.gguf.metadata import Metadata, shortest
from services.model.gguf.tokenizer import named_tokens, tokenizer_json

_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""The sampling parameters, behind general.sampling in the metadata, that generation_config.json calls otherwise."""

_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>")
"""Tokens that end an answer in any vocabulary that has them."""

_TEMPLATE = "tokenizer.chat_template"


def text_file(path: Path, name: str) -> str | None:
    """Return the content that a checkpoint's file of this name would have; None where the model has none.

    path: the GGUF file. Raises what `read_gguf` raises, and InvalidArgument, Unimplemented and DataLoss for metadata
    that cannot be used.
    """
    file = read_gguf(path)
    match name:
        case "config.json":
            return json.dumps(read_config(file))
        case "tokenizer.json":
            return tokenizer_json(Metadata(file))
        case "tokenizer_config.json":
            return json.dumps(_tokenizer_config(Metadata(file)))
        case "generation_config.json":
            return json.dumps(_generation_config(Metadata(file)))
        case _:
            return None


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    settings: dict[str, Any] = dict(named_tokens(metadata))
    if metadata.has(_TEMPLATE):
        named = metadata.starting_with(f"{_TEMPLATE}.")
        templates = {"default": metadata.text(_TEMPLATE)} | {name: str(text) for name, text in named.items()}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    settings: dict[str, Any] = {
        _SAMPLING.get(name, name): shortest(value)
        for name, value in metadata.starting_with("general.sampling.").items()
        if isinstance(value, int | float)
    }
    ends = [token for token in map(metadata.token, ("eos", "eot", "eom")) if token is not None]
    if metadata.has("tokenizer.ggml.tokens"):
        tokens = metadata.texts("tokenizer.ggml.tokens")
        ends += [tokens.index(token) for token in _ENDS if token in tokens]
    if ends:
        settings["eos_token_id"] = list(dict.fromkeys(ends))
    return settings
