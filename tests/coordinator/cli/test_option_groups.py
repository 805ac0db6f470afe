"""A dataclass whose fields are flags, as an argument of a command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner

from coordinator.cli.option_groups import Flag, OptionSource, group_options, with_options
from services.errors import InvalidArgument, Unavailable
from tests.coordinator.cli.command_line import help_of, parse, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A group within a group."""

    switch: Annotated[bool | None, Flag("A pair.", "--switch/--no-switch")] = None
    path: Annotated[Path | None, Flag("A path.", metavar="FILE")] = None


class Sum(OptionSource):
    """Two options of which one number is made."""

    def options(self) -> Iterator[click.Option]:
        """Yield both."""
        yield click.Option(["left", "--left"], type=int, default=1, help="One addend.")
        yield click.Option(["right", "--right"], type=int, default=2, help="The other.")

    def take(self, values: dict[str, Any]) -> int:
        """Return their sum."""
        return int(values.pop("left")) + int(values.pop("right"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """One field of every kind, one that isn't a flag, and a rule."""

    count: Annotated[int, Flag("A number.", type=click.IntRange(1))]
    text_field: Annotated[str | None, Flag("A text.  [default: some]")] = None
    ratio: Annotated[float, Flag("A fraction.")] = 0.0
    loud: Annotated[bool, Flag("A switch.")] = False
    words: Annotated[tuple[str, ...], Flag("Several.", "--word", "-w")] = ()
    inner: Inner = Inner()
    total: Annotated[int, Sum()] = 3
    other: str = "no flag"

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a number that nobody likes."""
        if self.count == 13:
            raise InvalidArgument("--count 13 is refused: give another", field="--count")


def test_fields_are_flags_by_their_names_and_types() -> None:
    """Defaults are the dataclass's; a tuple may be given several times; groups within are filled too."""
    assert parse(Outer, "--count", 2) == Outer(count=2)
    words = ["--count", 3, "--text-field", "a", "--ratio", 0.5, "--loud", "--word", "x", "-w", "y"]
    assert parse(Outer, *words, "--no-switch", "--path", "f", "--left", 5) == Outer(
        count=3,
        text_field="a",
        ratio=0.5,
        loud=True,
        words=("x", "y"),
        inner=Inner(switch=False, path=Path("f")),
        total=7,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Missing option '--count'"),
        (["--count", "x"], "'x' is not a valid integer range"),
        (["--count", 0], "0 is not in the range x>=1"),
        (["--count", 1, "--ratio", "x"], "'x' is not a valid float"),
        (["--count", 1, "--other", "x"], "No such option '--other'"),
        (["--count", 13], "flashsplit: error: --count 13 is refused: give another"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[object], expected: str) -> None:
    """By click for a single value, by the group's own rule for values together; both with exit code 2."""
    assert expected in refusal(Outer, *words)


def test_the_help_shows_defaults_that_say_something() -> None:
    """A number's default is shown, also 0; that of None, a switch or a tuple is not."""
    lines = {line.split()[0]: line for line in help_of(Outer).splitlines() if line.strip().startswith("-")}
    assert "[default: 0.0]" in lines["--ratio"]
    assert "required]" in lines["--count"]
    assert "A text.  [default: some]" in lines["--text-field"]
    assert all("default" not in lines[flag] for flag in ("--loud", "-w,", "--switch", "--path"))


def test_options_come_in_the_order_of_parameters_and_fields() -> None:
    """Groups first, then those of click's own decorators, which keep their order."""

    @click.command()
    @with_options
    @click.option("--first")
    @click.option("--second")
    async def command(first: str, outer: Outer, second: str) -> None: ...

    names = [parameter.name for parameter in command.params]
    assert names == [option.name for option in group_options(Outer)] + ["first", "second"]
    assert names[:3] == ["count", "text_field", "ratio"]
    assert names[5:9] == ["switch", "path", "left", "right"]


def test_a_failure_of_the_command_is_one_sentence_and_an_exit_code() -> None:
    """1 for what failed; refusals of the input have 2."""

    @click.command()
    @with_options
    async def command() -> None:
        raise Unavailable("nobody answers")

    result = CliRunner().invoke(command, [])
    assert (result.exit_code, result.stderr) == (1, "flashsplit: error: nobody answers\n")
