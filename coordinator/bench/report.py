"""What a bench has found, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

Command = TypeVar("Command", bound=Callable[..., Any])
Found = Mapping[str, Any]
"""A row: whole numbers and words say what was measured, fractions are the measurements."""

FILE_WIDTH = 200

_COUNTED = ("identical", "kept")
"""Whole numbers that are measurements all the same."""

_UNITS = {"_ms": "milliseconds", "_us": "microseconds", "_per_s": "a second"}


def output_options(command: Command) -> Command:
    """--json and --plot, which `show` takes."""
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of tables."),
        click.option(
            "--plot",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            metavar="FILE",
            callback=_check_plot,
            help="Draw it into this file as well: .png, .svg or .pdf.",
        ),
    )
    for option in options:
        command = option(command)
    return command


def show(rows: Sequence[Any], table: Table, *, as_json: bool, plot: Path | None, **more: Any) -> None:
    """rows: dataclasses of one kind. more: what else the JSON object tells."""
    found = [asdict(row) for row in rows]
    if plot is not None:
        draw(found, plot)
    if as_json:
        print(json.dumps({"rows": found, **more}))
    else:
        print_table(table)


def print_table(table: Table) -> None:
    """All of it, also where the output is no terminal of some width."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def identity(row: Found) -> dict[str, str]:
    """What was measured."""
    return {name: str(value) for name, value in row.items() if not isinstance(value, float) and name not in _COUNTED}


def measures(row: Found) -> dict[str, float]:
    """What came out."""
    return {name: value for name, value in row.items() if isinstance(value, float)}


def draw(rows: Sequence[Found], path: Path) -> None:
    """Bars: a picture for each unit, a group for each row."""
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


def _check_plot(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Before anything is measured."""
    if path is None:
        return None
    if path.suffix not in (".png", ".svg", ".pdf") or not path.absolute().parent.is_dir():
        raise click.BadParameter(f"{path} must be a .png, .svg or .pdf in a directory that exists")
    if find_spec("matplotlib") is None:
        raise click.BadParameter("pictures need matplotlib: pip install 'flashsplit[plot]'")
    return path
