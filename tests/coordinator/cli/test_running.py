"""How a command ends: its exit code, what it says, and that it has cleaned up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, contextlib, os, signal
from coordinator.cli.running import run
from services.errors import InvalidArgument, Unavailable

async def main():
    try:
        {body}
    finally:
        print("cleaned up", flush=True)

run(main())
"""


def start(body: str) -> subprocess.Popen[str]:
    """Run a command with this body."""
    line = [sys.executable, "-c", PROGRAM.format(body=body)]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("pass", 0, ""),
        ("raise InvalidArgument('--x is wrong')", 2, "flashsplit: error: --x is wrong\n"),
        ("raise Unavailable('nobody [answers]')", 1, "flashsplit: error: nobody [answers]\n"),
        (f"raise Unavailable({'long ' * 60!r})", 1, f"flashsplit: error: {'long ' * 60}\n"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(body: str, code: int, words: str) -> None:
    """2 for refused input, 1 for what failed; the line is neither wrapped nor read as markup."""
    with start(body) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "cleaned up\n", words)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_it_in_order(number: signal.Signals, code: int) -> None:
    """What the command has opened is closed first, and nothing is printed about it."""
    with start("print('ready', flush=True); await asyncio.sleep(60)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "cleaned up\n", "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As with `flashsplit generate | head`."""
    with start("[print('x' * 1000, flush=True) for _ in range(100_000)]") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert "Traceback" not in process.stderr.read()
