"""Children that end with their parent, as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

CHILD = """
import sys, time
from services.processes.lifeline import die_with
die_with(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""

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
