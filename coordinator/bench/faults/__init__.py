"""`flashsplit bench faults`: ends or stops workers in every phase of answers, and says what became of these.

It owns the clusters that it starts for that, and what it knows of their processes. It ends no other process.
"""

from coordinator.bench.faults.command import faults

__all__ = ["faults"]
