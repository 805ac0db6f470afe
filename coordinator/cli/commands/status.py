"""`flashsplit status`: shows a running server's chain of workers, once or all the time."""

from __future__ import annotations

import asyncio
import sys

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from coordinator.cli.command import Command
from coordinator.cli.http_client import ClientOptions, RemoteServer
from coordinator.cli.option_groups import with_options
from coordinator.cli.running import EXIT_ERROR
from coordinator.status.report import Status
from coordinator.status.table import picture
from services.errors import Unavailable

_EPILOG = """Examples:

\b
  flashsplit status
  flashsplit status --url https://host.lan:8000 --watch
  flashsplit status --json | jq '.workers[] | {name, load, error}'

Exit codes: 0 all is well, 1 no server answers or one of its workers doesn't, 2 refused input.
"""


@click.command(cls=Command, epilog=_EPILOG)
@with_options
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, metavar="SECONDS",
              help="With --watch: how long to wait in between.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what the server says as one JSON object a line.")
async def status(client: ClientOptions, watch: bool, interval: float, as_json: bool) -> None:
    """Show the workers behind a running server: what they hold, how busy they are, what the draft and the cache bring.

    Load is the share of the last seconds in which a worker computed. A step's time is that of the last minute's decode
    steps: what of it the worker computed and drafted, what messages between it and the one above took, and how long it
    waited for the others. A worker that doesn't answer is shown as such.
    """
    # Where nobody looks at a terminal, tables are not squeezed to one's width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

    async def show(server: RemoteServer) -> Status:
        """Print the server's status once, and return it."""
        report = await server.status()
        if as_json:
            print(report.model_dump_json(), flush=True)
        else:
            console.print(picture(report, console, server.url))
        return report

    async def repeat(server: RemoteServer, seconds: float) -> None:
        """Print the status again and again."""
        while True:
            await show(server)
            await asyncio.sleep(seconds)

    async def live(server: RemoteServer, seconds: float) -> None:
        """Draw the status in place, again and again; wait for a server that has gone."""
        last: Status | None = None
        with Live(console=console, auto_refresh=False) as shown:
            while True:
                trouble = ""
                try:
                    last = await server.status()
                except Unavailable as error:
                    # One that was there is waited for.
                    if last is None:
                        raise
                    trouble = error.message
                assert last is not None
                shown.update(frame(picture(last, console, server.url), trouble), refresh=True)
                await asyncio.sleep(seconds)

    async with client.connect() as server:
        if watch:
            await (live(server, interval) if console.is_terminal and not as_json else repeat(server, interval))
        report = await show(server)
        if not report.ready or any(worker.error for worker in report.workers):
            sys.exit(EXIT_ERROR)


def frame(shown: RenderableType, trouble: str) -> RenderableType:
    """Return the last status, with what has been wrong since below it."""
    return Group(shown, Text(f"{trouble}; trying again", style="bold red")) if trouble else shown
