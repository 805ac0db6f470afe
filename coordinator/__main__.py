"""`flashsplit`: the command line. A command's module is imported when the command is called: --help stays fast."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until a command runs there is nothing to clean up: Ctrl-C ends the imports without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from collections.abc import Mapping
from importlib import import_module, metadata

import click

from coordinator.cli.command import log_options
from services.telemetry.tracing import start_tracing

_COMMANDS: Mapping[str, str] = {
    "serve": "Serve a model to OpenAI and Anthropic clients.",
    "generate": "Answer one prompt.",
    "chat": "Talk with a model in the terminal.",
    "status": "Show the workers behind a running server, and how busy they are.",
    "drain": "Have another worker take the place of one, while answers go on.",
    "cache": "See, check and clean up the prefix snapshots kept on disk.",
    "plan": "Show who would hold which layers, what that takes and how fast it would be.",
    "manifests": "Write a cluster file as an overlay for Kustomize, to run it on Kubernetes.",
    "certs": "Make certificates for the workers' hosts and the coordinator.",
    "bench": "Measure steps, answers, clients at once, prefixes and hops on this machine.",
    "demo": "Show the demo pair at work: plain and DFlash, split over two workers.",
}


class _LazyGroup(click.Group):
    """A group that imports a command when it is called: `coordinator.cli.commands.<name>`, or `coordinator.bench`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        room = "coordinator" if cmd_name == "bench" else "coordinator.cli.commands"
        command: click.Command = getattr(import_module(f"{room}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(metadata.version("flashsplit"), prog_name="flashsplit")
def main() -> None:
    """One LLM, served from whatever GPUs its owner has."""
    start_tracing("flashsplit")


main.params += log_options()


if __name__ == "__main__":
    main()
