"""--config: a file of flags, the same for all commands that place a model."""

from __future__ import annotations

from pathlib import Path

import click

from coordinator.config.config_file import read_config

config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="Flags from a YAML file by their names, the same file for serve, generate, plan and bench: flags of serve "
    "that a command doesn't have are passed over. The command line and the environment win.",
)
