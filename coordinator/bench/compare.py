"""`flashsplit bench compare`: two reports of one bench side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from coordinator.bench.report import Row, empty_table, identity, measures, print_table
from coordinator.bench.run_description import run_lines
from coordinator.cli.command import Command

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class FigurePair:
    """One measurement in both reports. what: was measured, in words; measure: the measurement's name."""

    what: str
    measure: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """The ratio of the second measurement to the first; 0 where the first is 0."""
        return self.second / self.first if self.first else 0.0


@click.command(cls=Command)
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Put two reports of one bench side by side, as its --json wrote them.

    The ratio is that of the second to the first: below 1, times have become shorter. Rows that only one of them has are
    left out. Compare what was measured on one machine, best in turns.
    """
    reports = read(first), read(second)
    pairs = match(*(report["rows"] for report in reports))
    if not pairs:
        raise click.UsageError(f"{first} and {second} have no row in common: give two reports of the same bench")
    if as_json:
        print(json.dumps([{**asdict(pair), "ratio": pair.ratio} for pair in pairs]))
        return
    for name, report in zip(("first", "second"), reports, strict=True):
        for line in report["run"]:
            print(f"{name}: {line}")
    print_table(table(pairs))


def read(path: Path) -> dict[str, Any]:
    """Return a report's rows, and its run as lines for people. Raises UsageError for what is no report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report["rows"], list) and all(isinstance(row, dict) for row in report["rows"]):
            # Reports of earlier versions don't say where their figures come from.
            return {"rows": report["rows"], "run": run_lines(report["run"]) if "run" in report else []}
    except (ValueError, KeyError, TypeError):
        pass
    raise click.UsageError(f"{path} is no report of a bench: it must be what flashsplit bench … --json prints")


def match(first: list[Row], second: list[Row]) -> list[FigurePair]:
    """Return the measurements of what stands in both reports."""
    known = {tuple(identity(row).items()): row for row in second}
    pairs = []
    for row in first:
        other = known.get(tuple(identity(row).items()))
        if other is None:
            continue
        what = " ".join(identity(row).values())
        others = measures(other)
        pairs += [
            FigurePair(what, name, value, others[name]) for name, value in measures(row).items() if name in others
        ]
    return pairs


def table(pairs: list[FigurePair]) -> Table:
    """Return the measurements for people."""
    figures = empty_table("", "", "first", "second", "ratio")
    before = None
    for pair in pairs:
        figures.add_row(
            pair.what if pair.what != before else "",
            pair.measure,
            f"{pair.first:.4g}",
            f"{pair.second:.4g}",
            f"{pair.ratio:.3f}",
        )
        before = pair.what
    return figures
