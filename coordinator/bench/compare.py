"""`flashsplit bench compare`: two reports of one bench side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from coordinator.bench.report import Found, identity, measures, print_table

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Pair:
    """One measurement in both reports."""

    what: str
    measure: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """Of the second to the first."""
        return self.second / self.first if self.first else 0.0


@click.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Put two reports of one bench side by side, as its --json wrote them.

    The ratio is that of the second to the first: below 1, times have become shorter. Rows that only one of them has are
    left out. Compare what was measured on one machine, best in turns.
    """
    pairs = match(read(first), read(second))
    if not pairs:
        raise click.UsageError(f"{first} and {second} have no row in common: give two reports of the same bench")
    if as_json:
        print(json.dumps([{**asdict(pair), "ratio": pair.ratio} for pair in pairs]))
    else:
        print_table(table(pairs))


def read(path: Path) -> list[Found]:
    """Rows of a report. Raises UsageError for what is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
    except (ValueError, KeyError, TypeError):
        pass
    raise click.UsageError(f"{path} is no report of a bench: it must be what flashsplit bench … --json prints")


def match(first: list[Found], second: list[Found]) -> list[Pair]:
    """Rows of what is the same."""
    known = {tuple(identity(row).items()): row for row in second}
    pairs = []
    for row in first:
        other = known.get(tuple(identity(row).items()))
        if other is None:
            continue
        what = " ".join(identity(row).values())
        others = measures(other)
        pairs += [Pair(what, name, value, others[name]) for name, value in measures(row).items() if name in others]
    return pairs


def table(pairs: list[Pair]) -> Table:
    made = Table(box=None, pad_edge=False)
    for heading in ("", "", "first", "second", "ratio"):
        made.add_column(heading, justify="left" if not heading else "right")
    before = None
    for pair in pairs:
        made.add_row(
            pair.what if pair.what != before else "",
            pair.measure,
            f"{pair.first:.4g}",
            f"{pair.second:.4g}",
            f"{pair.ratio:.3f}",
        )
        before = pair.what
    return made
