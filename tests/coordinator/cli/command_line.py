"""A command with one group of options: what the group is given by a command line, and how it refuses one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import click
from click.testing import CliRunner, Result

from coordinator.cli.option_groups import with_options

Group = TypeVar("Group")


def parse(group: type[Group], *words: object, environment: Mapping[str, str] | None = None) -> Group:
    """Return the group that a command line makes; its refusal fails the test."""
    result, options = _invoke(group, words, environment)
    assert result.exit_code == 0, result.output
    assert isinstance(options, group)
    return options


def refusal(group: type[object], *words: object, environment: Mapping[str, str] | None = None) -> str:
    """Return the error that a command line is refused with, on one line."""
    result, _ = _invoke(group, words, environment)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def help_of(group: type[object]) -> str:
    """Return the group's part of a command's help."""
    return _invoke(group, ["--help"], None)[0].stdout


def _invoke(group: type[object], words: Any, environment: Mapping[str, str] | None) -> tuple[Result, object]:
    """Run a command that keeps what its group is, and return how it ended with that, None where it did not run."""
    taken: list[object] = []

    async def command(options: object) -> None:
        taken.append(options)

    command.__annotations__["options"] = group
    click_command = click.command("command", context_settings={"max_content_width": 200})(with_options(command))
    # Stores named by the environment of whoever runs the tests are none of theirs.
    clean = {"FLASHSPLIT_KV_CACHE_DIR": None, "FLASHSPLIT_KV_CACHE_URL": None}
    result = CliRunner().invoke(click_command, [str(word) for word in words], env={**clean, **(environment or {})})
    return result, taken[0] if taken else None
