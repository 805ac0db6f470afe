"""Which checkpoints a command works with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import click

from coordinator.cli.option_groups import Flag

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)

_TARGET = Flag("Target checkpoint, a Hugging Face directory.", type=_DIRECTORY, metavar="DIR")
_DRAFT = Flag("DFlash draft checkpoint made for the target.", type=_DIRECTORY, metavar="DIR")


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
