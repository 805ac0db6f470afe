"""The files of a checkpoint that say how text is treated, whatever kind of checkpoint a user names.

A Hugging Face directory has them as they are. A GGUF file says the same in its metadata; where such files lie beside
it, they win over that, settings key by key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import InvalidArgument
from services.model.gguf.container import is_gguf
from services.model.gguf.text_files import text_file

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"

_BESIDE = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION_CONFIG, SPECIAL_TOKENS)
_SETTINGS = (TOKENIZER_CONFIG, GENERATION_CONFIG)


@dataclass(frozen=True, slots=True)
class TextFile:
    """One of the files. origin: what errors call it."""

    origin: str
    content: bytes

    def json_object(self) -> dict[str, Any]:
        """Return the JSON object that it holds. Raises InvalidArgument for anything else."""
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{self.origin} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidArgument(f"{self.origin} must hold a JSON object")
        return value


def find_text_file(model: Path, name: str) -> TextFile | None:
    """Return a checkpoint's file of this name, None where it has none.

    model: a directory or a GGUF file. Raises InvalidArgument for a file that cannot be read, and what reading a GGUF
    file's metadata raises.
    """
    if not is_gguf(model):
        return _read(model / name)
    beside = _read(model.with_name(name)) if name in _BESIDE else None
    if beside is not None and name not in _SETTINGS:
        return beside
    made = text_file(model, name)
    if made is None:
        return beside
    within = TextFile(f"{model}: {name}", made.encode())
    if beside is None:
        return within
    settings = within.json_object() | beside.json_object()
    return TextFile(beside.origin, json.dumps(settings).encode())


def _read(path: Path) -> TextFile | None:
    try:
        return TextFile(str(path), path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
