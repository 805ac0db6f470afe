"""`flashsplit bench`: figures of this machine, each beside what it is to be compared with.

It owns the sessions and workers that it measures, and ends them. Nothing that serves requests may import it.
"""

from __future__ import annotations

import click

from coordinator.bench.compare import compare
from coordinator.bench.compress import compress
from coordinator.bench.drafts import drafts
from coordinator.bench.faults import faults
from coordinator.bench.generate import generate
from coordinator.bench.hop import hop
from coordinator.bench.products import products
from coordinator.bench.serve import serve
from coordinator.bench.snapshot import snapshot
from coordinator.bench.step import SINGLE_KINDS, single_kind, step


@click.group()
def bench() -> None:
    """Measure steps, products, answers, clients at once, prefixes and hops on this machine.

    Figures of one run belong together: compare them as ratios. Each table says on which machine, by which command and
    at which commit it was measured; --json holds the same.
    """


bench.add_command(compare)
bench.add_command(compress)
bench.add_command(drafts)
bench.add_command(faults)
bench.add_command(generate)
bench.add_command(hop)
bench.add_command(products)
bench.add_command(serve)
bench.add_command(snapshot)
bench.add_command(step)
for kind in SINGLE_KINDS:
    bench.add_command(single_kind(kind))
