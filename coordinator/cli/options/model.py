"""Which checkpoints a command works with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import click

from coordinator.cli.option_groups import Flag
from services.model.families import known_families
from services.model.gguf.container import SUFFIX, is_gguf

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class CheckpointPath(click.Path):
    """The type of flags that name a checkpoint: a directory, or a GGUF file, that is there."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Refuses a model's name on the Hugging Face hub with how to download it, and other files."""
        name = str(value)
        if _HUB_NAME.fullmatch(name) and not Path(name).exists():
            directory = name.partition("/")[2]
            self.fail(
                f"there is no directory {name!r}, and nothing is downloaded here. If it is a model of the Hugging Face "
                f"hub: hf download {name} --local-dir {directory}, then name {directory}",
                param,
                ctx,
            )
        path = Path(str(super().convert(value, param, ctx)))
        if not path.is_dir() and not is_gguf(path):
            self.fail(f"{name!r} is a file: name a Hugging Face directory or a file that ends in {SUFFIX}", param, ctx)
        return path


_TARGET = Flag(
    "Target checkpoint: a Hugging Face directory or a GGUF file. Families that are served, by the model_type in their "
    f"config.json: {', '.join(known_families())}.",
    type=CheckpointPath(),
    metavar="DIR|FILE.gguf",
)
_DRAFT = Flag("DFlash draft checkpoint made for the target.", type=CheckpointPath(), metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model to work with: the target, which must be named, and its draft."""

    model: Annotated[Path, _TARGET]
    draft: Annotated[Path | None, _DRAFT] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalModelOptions:
    """The model to work with, where the command needs one: the target and its draft."""

    section: ClassVar = "Model options"

    model: Annotated[Path | None, _TARGET] = None
    draft: Annotated[Path | None, _DRAFT] = None
