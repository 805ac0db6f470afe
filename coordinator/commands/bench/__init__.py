"""`flashsplit bench`: figures of this machine, each beside what it is to be compared with."""

from __future__ import annotations

import click

from coordinator.commands.bench.compare import compare
from coordinator.commands.bench.compress import compress
from coordinator.commands.bench.generate import generate
from coordinator.commands.bench.hop import hop
from coordinator.commands.bench.serve import serve
from coordinator.commands.bench.snapshot import snapshot
from coordinator.commands.bench.step import SINGLES, single, step


@click.group()
def bench() -> None:
    """Measure. Figures of one run belong together: compare them as ratios."""


bench.add_command(compare)
bench.add_command(compress)
bench.add_command(generate)
bench.add_command(hop)
bench.add_command(serve)
bench.add_command(snapshot)
bench.add_command(step)
for kind in SINGLES:
    bench.add_command(single(kind))
