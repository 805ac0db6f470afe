"""Runs a command's coroutine: errors become one sentence and an exit code, Ctrl-C ends everything cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from coordinator.cli.console import print_error
from services import event_loop
from services.errors import FlashsplitError
from services.processes.worker_process import WorkerFailed

EXIT_ERROR, EXIT_USAGE = 1, 2


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine to its end, and end the process where it fails.

    Exit codes: 1 something failed, 2 the input was refused, 130 Ctrl-C, 143 SIGTERM, 141 the reader went away.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        event_loop.run(_until_terminated(main))
    except FlashsplitError as error:
        lines = error.log_lines if isinstance(error, WorkerFailed) else ()
        print_error("\n  ".join([error.message + "; its last log lines:" * bool(lines), *lines]))
        sys.exit(EXIT_USAGE if error.code_name == "INVALID_ARGUMENT" else EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # `flashsplit generate | head`: not an error, and nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


async def _until_terminated(main: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine; SIGTERM ends it the way Ctrl-C does, so that children are stopped in order."""
    task = asyncio.ensure_future(main)
    terminated = False

    def terminate() -> None:
        """Cancel the task, and remember that it was not somebody else."""
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await task
    except asyncio.CancelledError:
        if terminated:
            sys.exit(128 + signal.SIGTERM)
        raise
