"""Which checkpoints a command works with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import click

from coordinator.cli.option_groups import Flag
from services.errors import InvalidArgument
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


class DraftSource(CheckpointPath):
    """The type of --draft: a checkpoint, or the word for looking draft tokens up in the text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or `LOOKUP` for that word; refusals as of `CheckpointPath`."""
        return LOOKUP if str(value) == str(LOOKUP) else super().convert(value, param, ctx)


LOOKUP = Path("ngram")
"""The word that asks for draft tokens without a model; a checkpoint in a directory of this name is named ./ngram."""

_DRAFT = Flag(
    "Where draft tokens come from: a draft checkpoint made for the target (DFlash, DFlash2, DSpark or Domino), or "
    "ngram, which needs no model and "
    "proposes what followed where the last tokens stood before in the prompt or the answer. Give it twice for both: "
    "each step takes those that promise more.",
    "--draft",
    type=DraftSource(),
    metavar="DIR|ngram",
)


class _Drafts:
    """What --draft says."""

    __slots__ = ()

    if TYPE_CHECKING:
        # A field of those who say it, behind that of the target.
        drafts: tuple[Path, ...]

    def __post_init__(self) -> None:
        named = [str(source) for source in self.drafts]
        if len(self.drafts) > 2 or len({source == LOOKUP for source in self.drafts}) < len(self.drafts):
            raise InvalidArgument(
                f"--draft is {' and '.join(named)}: name one checkpoint, {LOOKUP}, or one of each", field="--draft"
            )

    @property
    def draft(self) -> Path | None:
        """The draft model's checkpoint, None without one."""
        return next((source for source in self.drafts if source != LOOKUP), None)

    @property
    def prompt_lookup(self) -> bool:
        """Whether draft tokens are looked up in the text."""
        return LOOKUP in self.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(_Drafts):
    """The model to work with: the target, which must be named, and its draft."""

    model: Annotated[Path, _TARGET]
    drafts: Annotated[tuple[Path, ...], _DRAFT] = ()


_COMPARED = Flag(
    "A draft to compare, given once for each: a draft checkpoint made for the target, or ngram.",
    "--draft",
    type=DraftSource(),
    metavar="DIR|ngram",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDrafts:
    """The target, and drafts of it that are not used together."""

    section: ClassVar = "Model options"

    model: Annotated[Path, _TARGET]
    drafts: Annotated[tuple[Path, ...], _COMPARED] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalModelOptions(_Drafts):
    """The model to work with, where the command needs one: the target and its draft."""

    section: ClassVar = "Model options"

    model: Annotated[Path | None, _TARGET] = None
    drafts: Annotated[tuple[Path, ...], _DRAFT] = ()
