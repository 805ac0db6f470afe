"""`flashsplit drain`: has another worker take the place of one that is to be switched off, while answers go on."""

from __future__ import annotations

import click

from coordinator.cli.command import Command
from coordinator.cli.http_client import ClientOptions
from coordinator.cli.option_groups import with_options
from coordinator.status.report import Drained

_EPILOG = """Examples:

\b
  flashsplit drain "stage 1" --to cuda:1
  flashsplit drain host.lan:7001 --to other.lan:7001 --url https://server.lan:8000
  flashsplit drain draft --to cpu --json

Exit codes: 0 done, 1 not done, and all is as it was, 2 refused input.
"""


@click.command(cls=Command, epilog=_EPILOG, short_help="Have another worker take the place of one.")
@click.argument("worker")
@click.option("--to", required=True, metavar="OTHER",
              help="Who takes the place: a worker that stands by, one at an address that has no part, or a device on "
                   "which one is started.")  # fmt: skip
@with_options
@click.option("--json", "as_json", is_flag=True, help="Print what the server says as one JSON object.")
async def drain(worker: str, to: str, client: ClientOptions, as_json: bool) -> None:
    """Have another worker of a running server take the place of one, so that it can be switched off or updated.

    WORKER is "stage 0", "draft", or an address, as flashsplit status shows them. The other one loads what WORKER holds
    while answers go on. Then these pause between two steps, their state and the kept prefixes go over, and they go on
    there: none is lost, no token is computed twice, and all tokens are the same. WORKER has no part any more then; it
    ends where the server has started it.
    """
    async with client.connect() as server:
        done = await server.drain(worker, to)
    print(done.model_dump_json() if as_json else sentence(done))


def sentence(done: Drained) -> str:
    """Return what a hand-over came to, for people."""
    anew = f", {done.computed_anew} are computed anew" if done.computed_anew else ""
    return (
        f"{done.to} has the place of {done.worker}: answers paused for {done.paused_ms:.0f} ms{anew}; "
        f"{done.prefixes} kept prefixes went over"
    )
