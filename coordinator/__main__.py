"""`flashsplit`: the command line. Commands import what they need when they run, so that --help stays fast."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until a command runs there is nothing to clean up: Ctrl-C ends the imports without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from importlib import import_module, metadata

import click

from services.telemetry.logs import FORMATS, configure_logs
from services.telemetry.tracing import start_tracing

_COMMANDS = {
    "serve": "Serve a model to OpenAI and Anthropic clients.",
    "generate": "Answer one prompt.",
    "chat": "Talk with a model in the terminal.",
    "status": "Show the workers behind a running server, and how busy they are.",
    "cache": "See, check and clean up the prefix snapshots kept on disk.",
    "plan": "Show who would hold which layers, what that takes and how fast it would be.",
    "manifests": "Write a cluster file as Kubernetes objects, for Kustomize.",
    "certs": "Make certificates for the workers' hosts and the coordinator.",
    "bench": "Measure steps, answers, clients at once, prefixes and hops on this machine.",
    "demo": "Show the demo pair at work: plain and DFlash, split over two workers.",
}


class _Lazy(click.Group):
    """Finds a command by its name: `coordinator.cli.commands.<name>`, or the room `coordinator.bench`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        room = "coordinator" if cmd_name == "bench" else "coordinator.cli.commands"
        command: click.Command = getattr(import_module(f"{room}.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(metadata.version("flashsplit"), prog_name="flashsplit")
@click.option(
    "--log-level",
    default="warning",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least important line to log.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    help="How log lines look.  [default: console on a terminal, json elsewhere]",
)
def main(log_level: str, log_format: str | None) -> None:
    """One LLM, served from whatever GPUs its owner has."""
    configure_logs(log_level, log_format)
    start_tracing("flashsplit")


if __name__ == "__main__":
    main()
