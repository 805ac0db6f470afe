"""Workers and coordinators of tests are forked from processes that have imported their modules, torch above all, which
takes longer than most tests do.

They are real processes with the command line, files and environment that they were started with, and run all of
`shard_worker.__main__` or `coordinator.__main__`. Whoever started one sees a process that stands in for it, passes on
signals and ends like it. Tests that stop such a process, or look into it, ask `forking.forked()` for its id; tests of
how processes start and end use `forking.without()`. A coordinator with a terminal is never forked: what it shows
depends on the terminal when modules are imported.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.forking.server import MODULES

ROOT = Path(__file__).parents[2]
FOLDER = "FLASHSPLIT_TESTS_FORK_SERVERS"


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[None]:
    """Run a fork server of each program, by which workers and coordinators start in the context."""
    startup = str(Path(__file__).parent / "startup")
    more = os.environ.get("PYTHONPATH")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.forking.server", program, str(folder)], cwd=ROOT, stdin=subprocess.PIPE
        )
        for program in MODULES
    ]
    search = startup if more is None else os.pathsep.join((startup, more))
    try:
        with mock.patch.dict(os.environ, {FOLDER: str(folder), "PYTHONPATH": search}):
            yield
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait(10)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Start workers and coordinators as users do, without fork servers."""
    with mock.patch.dict(os.environ):
        os.environ.pop(FOLDER, None)
        yield


def is_server(pid: int) -> bool:
    """Whether a process is a fork server. Raises OSError for one that is gone."""
    return b"tests.forking.server" in Path(f"/proc/{pid}/cmdline").read_bytes()


def forked(pid: int) -> int:
    """The process that another stands in for, or that other one itself. Raises OSError for one that is gone."""
    name = Path(f"/proc/{pid}/comm").read_text().split()
    return int(name[1]) if name[0] == "forked" else pid
