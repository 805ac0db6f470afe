"""Children that end with their parent, and parents that know at once of their children's ends, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.processes.lifeline import Lifeline
from services.same_host.process import ending_code

ROOT = Path(__file__).parents[3]

CHILD = """
import sys, time
from services.processes.lifeline import die_with
die_with(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""

# What a container does that may not use unshare(2).
REFUSED = "import ctypes; ctypes.CDLL = lambda name: type('Library', (), {'unshare': staticmethod(lambda flags: -1)})\n"

# Starts the child above with a pipe that only this process holds open, and waits to be killed.
PARENT = """
import os, subprocess, sys, time
theirs, ours = os.pipe()
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(theirs)], pass_fds=[theirs])
time.sleep(60)
"""


def test_a_child_ends_when_the_pipe_is_closed() -> None:
    """Closing the parent's end ends the child at once, with code 0; bytes in the pipe don't."""
    theirs, ours = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(theirs)], pass_fds=[theirs], cwd=ROOT, stdout=subprocess.PIPE
    )
    os.close(theirs)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.write(ours, b"still here")
        try:
            child.wait(0.3)
        except subprocess.TimeoutExpired:
            pass
        else:
            raise AssertionError("the child ended while its parent was there")
        os.close(ours)
        assert child.wait(2.0) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_child_ends_when_the_parent_is_killed() -> None:
    """A parent that is killed without a chance to clean up takes its child along."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        # The child inherited the output: it ends for us when the child has ended.
        assert parent.stdout.read() == b""
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


@contextlib.contextmanager
def started(lifeline: Lifeline, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """The child above at the other end of a lifeline."""
    child = subprocess.Popen(
        [sys.executable, "-c", before + CHILD, str(lifeline.child_end)],
        pass_fds=[lifeline.child_end],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    lifeline.handed_over()
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def holders(child: subprocess.Popen[bytes], descriptor: int) -> dict[str, int]:
    """How many files each thread has open that has this one, by the thread's number."""
    threads = Path(f"/proc/{child.pid}/task").iterdir()
    tables = {thread.name: [file.name for file in (thread / "fd").iterdir()] for thread in threads}
    return {name: len(files) for name, files in tables.items() if str(descriptor) in files}


@pytest.mark.parametrize("before", ["", REFUSED], ids=["", "unshare refused"])
async def test_a_parent_knows_of_a_killed_child(before: str) -> None:
    """It is told, and how the child ends can be read before it has ended."""
    lifeline = Lifeline()
    with started(lifeline, before) as child:
        assert ending_code(child.pid) is None
        cut = asyncio.ensure_future(lifeline.cut())
        await asyncio.sleep(0.1)
        assert not cut.done()
        child.kill()
        async with asyncio.timeout(5):
            await cut
            while (code := ending_code(child.pid)) is None:
                await asyncio.sleep(0.001)
        assert code == -9
        assert child.wait(5) == code
    lifeline.close()


def test_one_thread_alone_has_the_childs_end() -> None:
    """And nothing else: so the end is closed as that thread ends, and what others close is closed."""
    refused = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x400) != 0)"
    if subprocess.run([sys.executable, "-c", refused], check=False).returncode:
        pytest.skip("this system refuses threads a table of open files of their own")
    lifeline = Lifeline()
    with started(lifeline) as child:
        [(thread, files)] = holders(child, lifeline.child_end).items()
        assert int(thread) != child.pid
        assert files == 1
        lifeline.close()
        assert child.wait(5) == 0


def test_where_that_is_refused_all_threads_have_it() -> None:
    """Then it is closed as the process ends."""
    lifeline = Lifeline()
    with started(lifeline, REFUSED) as child:
        assert len(holders(child, lifeline.child_end)) == 2
        lifeline.close()
        assert child.wait(5) == 0


def test_how_a_child_ended_that_is_waited_for() -> None:
    """Its exit status is that of `subprocess`; 0 says nothing, and no process says nothing either."""
    for status, expected in ((3, 3), (0, None)):
        child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert ending_code(child.pid) == expected
        assert child.wait() == status
        assert ending_code(child.pid) is None
