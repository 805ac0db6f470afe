"""What a bench measures: a checkpoint, or a published shape with random weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from coordinator.bench.shapes import TARGETS, write_shape
from coordinator.cli.options import model_options
from services.errors import InvalidArgument


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--shape, --model and --draft, which `checkpoints` takes."""
    command = model_options(required=False)(command)
    return click.option(
        "--shape",
        type=click.Choice(list(TARGETS)),
        help="Instead of a checkpoint: a published shape with random weights, and its draft's where a figure needs it.",
    )(command)


@contextlib.contextmanager
def checkpoints(
    shape: str | None, model: Path | None, draft: Path | None, drafting: Sequence[str] = ()
) -> Iterator[tuple[Path, Path | None]]:
    """Directories of the target and the draft. drafting: what cannot be measured without a draft.

    A shape has a draft only for these: guesses of random weights are worth nothing. Raises InvalidArgument.
    """
    if (shape is None) == (model is None):
        raise InvalidArgument("give --shape or --model, one of them", field="--shape")
    if model is not None:
        if drafting and draft is None:
            raise InvalidArgument(
                f"--draft is missing: name the checkpoint of one for {' and '.join(drafting)}, or measure other kinds",
                field="--draft",
            )
        yield model, draft
        return
    if draft is not None:
        raise InvalidArgument("--draft has no effect with --shape, which has its own: leave it out", field="--draft")
    assert shape is not None
    with tempfile.TemporaryDirectory(prefix="flashsplit-bench-") as directory:
        target, drafted = write_shape(shape, Path(directory))
        yield target, drafted if drafting else None
