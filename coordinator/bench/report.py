"""A bench's report, as a table, as JSON and as a picture, with the run that its figures come from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from rich.console import Console
from rich.table import Table

from coordinator.bench.run_description import describe_run, run_lines
from coordinator.cli.option_groups import Flag
from services.messages.description import WorkerDescription

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = Mapping[str, Any]
"""A row of a report: whole numbers and words say what was measured, fractions are the measurements."""

FILE_WIDTH = 200

_MEASURED_COUNTS = ("identical", "kept", "requests", "set_aside")
"""Whole numbers that are measurements all the same."""

_UNITS = {"_ms": "milliseconds", "_us": "microseconds", "_per_s": "a second"}


def _check_plot(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Raise BadParameter for a picture that could not be written, before anything is measured."""
    if path is None:
        return None
    if path.suffix not in (".png", ".svg", ".pdf") or not path.absolute().parent.is_dir():
        raise click.BadParameter(f"{path} must be a .png, .svg or .pdf in a directory that exists")
    if find_spec("matplotlib") is None:
        raise click.BadParameter("pictures need matplotlib: pip install 'flashsplit[plot]'")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How figures are shown: as tables, as JSON, as a picture."""

    as_json: Annotated[bool, Flag("Print a JSON object instead of tables.", "--json")] = False
    plot: Annotated[
        Path | None,
        Flag(
            "Draw it into this file as well: .png, .svg or .pdf.",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            metavar="FILE",
            callback=_check_plot,
        ),
    ] = None

    def show(
        self,
        rows: Sequence[DataclassInstance],
        table: Table,
        workers: Sequence[WorkerDescription] = (),
        *,
        note: str = "",
        picture: Callable[[Sequence[Row], Path], None] | None = None,
        **more: Any,
    ) -> None:
        """Print a report: where its figures come from, and the figures.

        rows: of one kind; table: the same for people; workers: those that were measured; note: a line before the table;
        picture: draws the rows into a file, None for bars of all that was measured; more: what else the JSON object
        holds.
        """
        figures = [asdict(row) for row in rows]
        run = asdict(describe_run(workers))
        if self.plot is not None:
            (picture or draw)(figures, self.plot)
        if self.as_json:
            print(json.dumps({"run": run, "rows": figures, **more}))
            return
        for line in [*run_lines(run), *([note] if note else [])]:
            print(line)
        print_table(table)


def empty_table(*headings: str) -> Table:
    """Return a table for figures, whose columns are aligned right; those without a heading hold words."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    return table


def print_table(table: Table) -> None:
    """Print the whole table, also where the output is no terminal and has no width."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def identity(row: Row) -> dict[str, str]:
    """Return what was measured: the row's words and whole numbers."""
    return {
        name: str(value) for name, value in row.items() if not isinstance(value, float) and name not in _MEASURED_COUNTS
    }


def measures(row: Row) -> dict[str, float]:
    """Return the row's measurements."""
    return {name: value for name, value in row.items() if isinstance(value, float)}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw bars into a file: a picture for each unit, a group of bars for each row."""
    from matplotlib.figure import Figure

    names: dict[str, list[str]] = {}
    for name in measures(rows[0]) if rows else ():
        unit = next((unit for suffix, unit in _UNITS.items() if f"_{name}".endswith(suffix)), "")
        names.setdefault(unit, []).append(name)
    labels = [" ".join(identity(row).values()) for row in rows]
    figure = Figure(figsize=(max(6.0, 1.2 * len(rows)), 3.2 * max(1, len(names))), layout="constrained")
    for place, (unit, group) in enumerate(names.items()):
        axes = figure.add_subplot(len(names), 1, place + 1)
        width = 0.8 / len(group)
        for number, name in enumerate(group):
            at = [index - 0.4 + (number + 0.5) * width for index in range(len(rows))]
            axes.bar(at, [row[name] for row in rows], width, label=name)
        axes.set_xticks(range(len(rows)), labels, rotation=20, ha="right")
        axes.set_ylabel(unit)
        axes.legend(fontsize="small")
    figure.savefig(path)
