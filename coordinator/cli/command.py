"""What all commands have in common: help in sections, one for each group of options, and the options of the log.

It knows click and the log, nothing of what commands do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from coordinator.cli.option_groups import GroupOption, sections
from services.errors import InvalidArgument
from services.telemetry.logs import FORMATS, LEVEL_FLAG, LEVELS, configure_logs

LEVEL = "warning"
"""The least important level that is logged unless it is said otherwise."""

_SECTION = "Log options"
_ABOUT = "What is logged on stderr, and how lines look. They may stand before the command or behind it."


class Command(click.Command):
    """A command that takes the options of the log beside its own; use as `click.command(cls=Command)`."""

    def __init__(self, name: str | None, *, params: Sequence[click.Parameter] | None = None, **attributes: Any) -> None:
        own = list(params or ())
        # A command made of another one's options has those of the log already.
        names = {option.name for option in own}
        own += [option for option in log_options() if option.name not in names]
        super().__init__(name, params=own, **attributes)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: those of groups by their sections, then the command's own."""
        for heading, options in sections(self.get_params(ctx)).items():
            if records := [record for option in options if (record := option.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(records)


class CommandGroup(click.Group, Command):
    """A command that has commands below it and does something of its own without them."""


def log_options() -> list[click.Parameter]:
    """Return --log-level and --log-format, which set up the log of the process as soon as they are read.

    A command's own win over those of the group that it belongs to, but for what a file says.
    """
    return [
        GroupOption(
            _SECTION,
            _ABOUT,
            [LEVEL_FLAG],
            metavar=f"{'|'.join(LEVELS)}|@FILE",
            help="Least important line to log. A server reads it again from FILE at SIGHUP, with all other files that "
            f"may change while it runs.  [default: {LEVEL}]",
            expose_value=False,
            callback=_configure,
        ),
        GroupOption(
            _SECTION,
            _ABOUT,
            ["--log-format"],
            type=click.Choice(FORMATS),
            help="How log lines look.  [default: console on a terminal, json elsewhere]",
            expose_value=False,
            callback=_configure,
        ),
    ]


def _configure(context: click.Context, option: click.Parameter, value: str | None) -> None:
    # Contexts of a group and its commands share `meta`, so that each option completes what was said before.
    said: dict[str | None, str] = context.meta.setdefault(__name__, {})
    from_file = context.get_parameter_source(str(option.name)) is ParameterSource.DEFAULT_MAP
    if value is not None and not (from_file and option.name in said):
        said[option.name] = value
    try:
        configure_logs(said.get("log_level", LEVEL), said.get("log_format"))
    except InvalidArgument as error:
        raise click.UsageError(error.message, context) from error
