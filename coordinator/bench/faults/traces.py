"""What a cluster can leave behind on its host: processes, directories, open files, sockets and shared memory."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from services.processes.worker_process import WorkerProcess


@dataclass(frozen=True, slots=True)
class Traces:
    """What there is of clusters. processes: of workers, by their ids. directories: of workers. descriptors: the files
    that this process has open, by what they are, like "socket". segments: of shared memory that it has mapped."""

    processes: frozenset[int]
    directories: frozenset[Path]
    descriptors: Counter[str]
    segments: int

    def since(self, before: Traces) -> list[str]:
        """Return what there is more than before, a phrase each."""
        return [
            *(f"process {number}" for number in sorted(self.processes - before.processes)),
            *(f"directory {path}" for path in sorted(self.directories - before.directories)),
            *(f"{count} open: {name}" for name, count in sorted((self.descriptors - before.descriptors).items())),
            *([f"{more} mapped segments"] if (more := self.segments - before.segments) > 0 else []),
        ]


@dataclass(slots=True)
class Watched:
    """The workers that there were. Use `see` whenever there may be others."""

    processes: set[int] = field(default_factory=set)
    directories: set[Path] = field(default_factory=set)

    def see(self, process: WorkerProcess) -> None:
        """Remember a worker that has been started."""
        if process.process_id is not None:
            self.processes.add(process.process_id)
            self.directories.add(process.directory)

    def traces(self) -> Traces:
        """Return what there is now of these workers, and what this process has open."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        return Traces(
            frozenset([*map(int, children), *filter(_runs, self.processes)]),
            frozenset(path for path in self.directories if path.exists()),
            _descriptors(),
            Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count("/memfd:flashsplit"),
        )


def _runs(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def _descriptors() -> Counter[str]:
    """Return the open files of this process by what they are; those of one kind without a name count together."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{number}")
            found[link if link.startswith("/") else link.partition(":")[0] if "[" in link else link] += 1
    return found
