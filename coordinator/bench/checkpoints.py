"""What a bench measures: a checkpoint, or a published shape with random weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from coordinator.bench.shapes import DRAFT_KINDS, TARGETS, write_shape
from coordinator.cli.option_groups import Flag
from coordinator.cli.options.model import OptionalModelOptions
from services.errors import InvalidArgument
from services.model.checkpoint_files import model_name
from services.model.random_weights import PACKINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What is measured: a shape with random weights, or a checkpoint with its draft."""

    shape: Annotated[
        str | None,
        Flag(
            "Instead of a checkpoint: a published shape with random weights, and its draft's where a figure needs it.",
            type=click.Choice(list(TARGETS)),
        ),
    ] = None
    shape_packing: Annotated[
        str | None,
        Flag(
            "What the shape's matrices are packed in: a type of GGUF, or q4_k_m, the mix of files of that name. "
            "int4, int8 and fp8 are what --quantize makes of it.",
            type=click.Choice(PACKINGS),
        ),
    ] = None
    draft_kind: Annotated[
        str,
        Flag(
            "The layout of the shape's draft: dflash, or the same layers with another way to choose tokens.",
            type=click.Choice(list(DRAFT_KINDS)),
        ),
    ] = "dflash"
    draft_vocabulary: Annotated[
        int | None,
        Flag(
            "How many tokens the shape's draft proposes, by an lm_head of its own. Default: all of the target's, by "
            "the target's lm_head.",
            type=click.IntRange(1),
        ),
    ] = None
    checkpoint: OptionalModelOptions = OptionalModelOptions()

    @property
    def name(self) -> str:
        """The shape and what it is packed in, or the name of the checkpoint."""
        if self.shape is not None:
            return self.shape if self.shape_packing is None else f"{self.shape} in {self.shape_packing}"
        return model_name(self.checkpoint.model) if self.checkpoint.model is not None else ""

    @contextlib.contextmanager
    def directories(
        self, drafting: Sequence[str] = (), accepted: float | None = None
    ) -> Iterator[tuple[Path, Path | None]]:
        """Give the directories of the target and the draft, those of a shape until the context ends.

        drafting: what is measured that needs a draft. A shape has a draft only for these, or where it is told how many
        of its draft tokens are accepted: what a draft with random weights proposes is worth nothing. accepted: as of
        `write_shape`. Raises InvalidArgument for options that contradict each other or lack one.
        """
        model, draft = self.checkpoint.model, self.checkpoint.draft
        if accepted is not None and self.shape is None:
            raise InvalidArgument(
                "--synthetic-acceptance is for a --shape, whose weights are random: a checkpoint's draft is "
                "accepted for what it guesses",
                field="--synthetic-acceptance",
            )
        if self.shape_packing is not None and self.shape is None:
            raise InvalidArgument(
                f"--shape-packing {self.shape_packing} is for a --shape, whose weights are random: leave it out, or "
                "pack a checkpoint with --quantize",
                field="--shape-packing",
            )
        self._check_shape_draft(self.shape, needed=bool(drafting) or accepted is not None)
        if self.shape is None and model is not None:
            if drafting and draft is None:
                raise InvalidArgument(
                    f"--draft is missing: name the checkpoint of one for {' and '.join(drafting)}, or measure other "
                    "kinds",
                    field="--draft",
                )
            yield model, draft
        elif self.shape is None or model is not None:
            raise InvalidArgument("give --shape or --model, one of them", field="--shape")
        elif draft is not None:
            raise InvalidArgument(
                "--draft has no effect with --shape, which has its own: leave it out", field="--draft"
            )
        else:
            with tempfile.TemporaryDirectory(prefix="flashsplit-bench-") as directory:
                target, shape_draft = write_shape(
                    self.shape,
                    Path(directory),
                    accepted,
                    self.shape_packing,
                    self.draft_kind,
                    self.draft_vocabulary,
                )
                yield target, shape_draft if drafting or accepted is not None else None

    def _check_shape_draft(self, shape: str | None, *, needed: bool) -> None:
        """Raise InvalidArgument where what is said of a shape's draft has no effect, or makes none. needed: whether
        what is measured needs a draft."""
        given = {"--draft-kind": self.draft_kind, "--draft-vocabulary": self.draft_vocabulary}
        for field, value in given.items():
            if value not in (None, "dflash") and (shape is None or not needed):
                raise InvalidArgument(
                    f"{field} {value} is for the draft of a --shape, in what is measured with one: leave it out, or "
                    "give --shape and measure draft or cycle",
                    field=field,
                )
        if shape is None or self.draft_vocabulary is None:
            return
        if self.draft_kind == "dflash2":
            raise InvalidArgument(
                f"--draft-vocabulary {self.draft_vocabulary}: a DFlash2 draft proposes all tokens of its target; leave "
                "it out, or name another --draft-kind",
                field="--draft-vocabulary",
            )
        if self.draft_vocabulary >= TARGETS[shape]["vocab_size"]:
            raise InvalidArgument(
                f"--draft-vocabulary {self.draft_vocabulary}: {shape} has {TARGETS[shape]['vocab_size']} tokens; ask "
                "for fewer, or leave it out for all of them",
                field="--draft-vocabulary",
            )
