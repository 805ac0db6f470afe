"""Workers of tests are forked from a process that has torch imported already, which takes longer than most tests do.

They are real processes with the command line, files and environment that they were started with, and run all of
`shard_worker.__main__`. Whoever started one sees a process that stands in for it, passes on signals and ends like it.
So tests that stop a worker's process, or look into it, use `forking.without()`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
ADDRESS = "FLASHSPLIT_TESTS_FORK_SERVER"


@contextlib.contextmanager
def server(folder: Path) -> Iterator[None]:
    """Run a fork server, by which all workers start that are started in the context."""
    path = folder / "forks.sock"
    startup = str(Path(__file__).parent / "startup")
    more = os.environ.get("PYTHONPATH")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forking.server", str(path)], cwd=ROOT, stdin=subprocess.PIPE
    )
    search = startup if more is None else os.pathsep.join((startup, more))
    try:
        with mock.patch.dict(os.environ, {ADDRESS: str(path), "PYTHONPATH": search}):
            yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Start workers as users do, without the fork server."""
    with mock.patch.dict(os.environ):
        os.environ.pop(ADDRESS, None)
        yield


def is_server(pid: int) -> bool:
    """Whether a process is a fork server. Raises OSError for one that is gone."""
    return b"tests.forking.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
