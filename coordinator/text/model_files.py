"""What the coordinator itself reads of a checkpoint: its number of layers and its text side, never its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.generation_defaults import GenerationDefaults
from coordinator.text.tokenizer import Tokenizer, stop_token_ids
from services.errors import InvalidArgument
from services.model.checkpoint_files import CONFIG, read_json_object


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What was read from a checkpoint's directory; tokenizer and chat_template are None where it has none."""

    directory: Path
    num_layers: int
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    stop_token_ids: frozenset[int]
    text_fingerprint: str
    """A hash of the files that turn text into tokens, tokenizer and chat template: 32 hex digits."""
    defaults: GenerationDefaults = GenerationDefaults()
    """What holds where a request says nothing."""


def read_model_files(directory: Path, defaults: GenerationDefaults | None = None) -> ModelFiles:
    """Read a checkpoint's directory. defaults: None where requests say everything.

    Raises NotFound and InvalidArgument naming the file and key, TokenizerError and TemplateError for the tokenizer's
    and the template's files.
    """
    config = read_json_object(directory / CONFIG, "--model")
    text = config.get("text_config")
    decoder = text if isinstance(text, Mapping) else config
    layers = decoder.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise InvalidArgument(
            f"{directory / CONFIG}: num_hidden_layers is {layers!r}; it must be a whole number above 0",
            field="num_hidden_layers",
        )
    tokenizer = Tokenizer.from_checkpoint(directory)
    return ModelFiles(
        directory=directory,
        num_layers=layers,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_checkpoint(directory),
        stop_token_ids=frozenset(stop_token_ids(directory, tokenizer)),
        text_fingerprint=_text_fingerprint(directory),
        defaults=defaults or GenerationDefaults(),
    )


def _text_fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]
