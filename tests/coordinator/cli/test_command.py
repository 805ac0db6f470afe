"""The options that every command has: those of the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
import structlog
from click.testing import CliRunner

from coordinator.__main__ import main
from coordinator.cli.command import Command


@pytest.fixture(autouse=True)
def log_of_the_tests() -> Iterator[None]:
    """Set up the log again as it was before."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@click.command(cls=Command)
def speak() -> None:
    """Log a line of each level."""
    log = structlog.get_logger()
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)("said")


def said(*words: str, **extra: Any) -> list[str]:
    """Run the program with a command that logs a line of each level; return the levels of those that were written."""
    group = click.Group("program", {"speak": speak}, params=list(main.params))
    result = CliRunner().invoke(group, words, **extra)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["level"] for line in result.stderr.splitlines()]


@pytest.mark.parametrize(
    ("words", "levels"),
    [
        (["speak"], ["warning", "error"]),
        (["speak", "--log-level", "error"], ["error"]),
        (["--log-level", "error", "speak"], ["error"]),
        (["--log-level", "error", "speak", "--log-level", "info"], ["info", "warning", "error"]),
        (["--log-level", "info", "speak", "--log-format", "json"], ["info", "warning", "error"]),
    ],
)
def test_the_level_stands_before_the_command_or_behind_it(words: list[str], levels: list[str]) -> None:
    """What stands behind wins; the other option is kept from where it was given."""
    assert said(*words) == levels


def test_every_command_has_them() -> None:
    """Those of groups, too."""
    context = click.Context(main)

    def leaves(command: click.Command) -> Iterator[click.Command]:
        if not isinstance(command, click.Group):
            yield command
            return
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from leaves(child)

    found = list(leaves(main))
    assert len(found) > 15
    for command in found:
        names = [option.name for option in command.params]
        assert names.count("log_level") == names.count("log_format") == 1, command.name


def test_a_file_says_less_than_the_command_line() -> None:
    """A file of flags, whose values are a command's defaults, may hold the level; one before the command wins."""
    file = {"speak": {"log_level": "info"}}
    assert said("speak", default_map=file) == ["info", "warning", "error"]
    assert said("--log-level", "error", "speak", default_map=file) == ["error"]
